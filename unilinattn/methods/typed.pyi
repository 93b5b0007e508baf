# Written by `python -m tools.surface` from the options of the registered methods.

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, Unpack, overload

from torch import nn

from unilinattn.methods.run import Tokens
from unilinattn.methods.targets import NamedTarget
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.trace import Trace
from unilinattn.tracing.trust import Trust

class AltiKeywords(TypedDict, total=False):
    layers: Literal["all", "mean"] | int | Sequence[int | str]
    compose: Literal["none", "rollout"]
    by_head: bool
    heads: int | Sequence[int] | None
    activation: Literal["exact", "silu", "relu", "identity", "taylor1", "taylor2"]
    residual: bool

class AltiLogitKeywords(TypedDict, total=False):
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None

class AttentionGradKeywords(TypedDict, total=False):
    start_layer: int
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None
    sign: Literal["keep", "clamp", "abs"]

class AttributionKeywords(TypedDict, total=False):
    start_layer: int
    scope: Literal["core", "mixer", "unified"]
    heads: Literal["mean", "max", "min", "abs-mean", "product", "geometric-mean"] | int | Sequence[int]
    sign: Literal["keep", "clamp", "abs"]
    discard: float
    normalize: Literal["none", "rows", "min-max"]
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None
    gradient: Literal["mean", "per-head"]
    gradient_axis: Literal["row", "key"]
    variant: Literal["formula", "published-code"]

class ContributionKeywords(TypedDict, total=False):
    start_layer: int
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None
    sign: Literal["keep", "clamp", "abs"]

class GradientKeywords(TypedDict, total=False):
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None
    sign: Literal["abs", "keep"]

class InputXGradientKeywords(TypedDict, total=False):
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None

class IntegratedGradientsKeywords(TypedDict, total=False):
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None
    baseline: Literal["zero", "mean-embedding"] | int
    n_steps: int

class KernelShapKeywords(TypedDict, total=False):
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None
    baseline: Literal["zero", "mean-embedding"] | int
    n_samples: int
    seed: int

class KnockoutKeywords(TypedDict, total=False):
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None
    layers: Literal["all"] | int | Sequence[int | str]
    window: int | None
    edges: Sequence[tuple[int, int]] | None
    heads: int | Sequence[int] | Callable[[Any], Any] | None
    channels: int | Sequence[int] | Callable[[Any], Any] | None
    replace: Literal["zero", "mean"] | Trace
    measure: Literal["logit", "log-probability"]

class LatimKeywords(TypedDict, total=False):
    layers: Literal["all", "mean"] | int | Sequence[int | str]
    compose: Literal["none", "rollout"]
    by_head: bool
    heads: int | Sequence[int] | None
    p: float
    activation: Literal["exact", "silu", "relu", "identity", "taylor1", "taylor2"]
    bias: Literal["column", "query"]
    residual: bool
    sketch: int | None
    seed: int
    exact_keys: int
    discard: float
    normalize: Literal["none", "rows", "min-max"]

class LogitKeywords(TypedDict, total=False):
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None
    by: Literal["tokens", "depth", "layer"]

class LrpKeywords(TypedDict, total=False):
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None

class OcclusionKeywords(TypedDict, total=False):
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None
    baseline: Literal["zero", "mean-embedding"] | int
    window: int

class RawKeywords(TypedDict, total=False):
    layers: Literal["all", "mean"] | int | Sequence[int | str]
    compose: Literal["none", "rollout"]
    by_head: bool
    scope: Literal["core", "mixer", "unified"]
    heads: Literal["mean", "max", "min", "abs-mean", "product", "geometric-mean"] | int | Sequence[int]
    sign: Literal["keep", "clamp", "abs"]
    discard: float
    normalize: Literal["none", "rows", "min-max"]

class RolloutKeywords(TypedDict, total=False):
    start_layer: int
    scope: Literal["core", "mixer", "unified"]
    heads: Literal["mean", "max", "min", "abs-mean", "product", "geometric-mean"] | int | Sequence[int]
    sign: Literal["keep", "clamp", "abs"]
    discard: float
    normalize: Literal["none", "rows", "min-max"]

class SmoothgradKeywords(TypedDict, total=False):
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None
    sign: Literal["abs", "keep"]
    n_samples: int
    noise: float
    seed: int

class TransformerAttributionKeywords(TypedDict, total=False):
    start_layer: int
    logit: int | tuple[int, int] | Callable[[Any], Any] | str | tuple[int | str, int | str] | None
    sign: Literal["keep", "clamp", "abs"]

class DefaultKeywords(LogitKeywords, AltiKeywords, total=False): ...

class Explains(Protocol):
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: None = None,
        **options: Unpack[DefaultKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["alti"],
        **options: Unpack[AltiKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["alti_logit"],
        **options: Unpack[AltiLogitKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["attention_grad"],
        **options: Unpack[AttentionGradKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["attribution"],
        **options: Unpack[AttributionKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["contribution"],
        **options: Unpack[ContributionKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["gradient"],
        **options: Unpack[GradientKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["input_x_gradient"],
        **options: Unpack[InputXGradientKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["integrated_gradients"],
        **options: Unpack[IntegratedGradientsKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["kernel_shap"],
        **options: Unpack[KernelShapKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["knockout"],
        **options: Unpack[KnockoutKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["latim"],
        **options: Unpack[LatimKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["logit"],
        **options: Unpack[LogitKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["lrp"],
        **options: Unpack[LrpKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["occlusion"],
        **options: Unpack[OcclusionKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["raw"],
        **options: Unpack[RawKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["rollout"],
        **options: Unpack[RolloutKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["smoothgrad"],
        **options: Unpack[SmoothgradKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: Literal["transformer_attribution"],
        **options: Unpack[TransformerAttributionKeywords],
    ) -> Attribution: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        method: str,
    ) -> Attribution: ...

class Estimates(Protocol):
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: None = None,
        **options: Unpack[DefaultKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["alti"],
        **options: Unpack[AltiKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["alti_logit"],
        **options: Unpack[AltiLogitKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["attention_grad"],
        **options: Unpack[AttentionGradKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["attribution"],
        **options: Unpack[AttributionKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["contribution"],
        **options: Unpack[ContributionKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["gradient"],
        **options: Unpack[GradientKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["input_x_gradient"],
        **options: Unpack[InputXGradientKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["integrated_gradients"],
        **options: Unpack[IntegratedGradientsKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["kernel_shap"],
        **options: Unpack[KernelShapKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["knockout"],
        **options: Unpack[KnockoutKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["latim"],
        **options: Unpack[LatimKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["logit"],
        **options: Unpack[LogitKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["lrp"],
        **options: Unpack[LrpKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["occlusion"],
        **options: Unpack[OcclusionKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["raw"],
        **options: Unpack[RawKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["rollout"],
        **options: Unpack[RolloutKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["smoothgrad"],
        **options: Unpack[SmoothgradKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: Literal["transformer_attribution"],
        **options: Unpack[TransformerAttributionKeywords],
    ) -> Estimate: ...
    @overload
    def __call__(
        self,
        model_or_trace: nn.Module | Trace,
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        target: NamedTarget | None = ...,
        max_memory: int | None = ...,
        trust: Trust = ...,
        method: str,
    ) -> Estimate: ...

class Compares(Protocol):
    def __call__(
        self,
        models: Mapping[str, nn.Module | Trace],
        inputs: Any = ...,
        *,
        tokenizer: Any = ...,
        processor: Any = ...,
        methods: Sequence[str] = ...,
        target: NamedTarget | None = ...,
        tokens: Tokens | None = ...,
        grid: tuple[int, int] | None = ...,
        max_memory: int | None = ...,
        progress: bool = ...,
        trust: Trust = ...,
        alti: AltiKeywords = ...,
        alti_logit: AltiLogitKeywords = ...,
        attention_grad: AttentionGradKeywords = ...,
        attribution: AttributionKeywords = ...,
        contribution: ContributionKeywords = ...,
        gradient: GradientKeywords = ...,
        input_x_gradient: InputXGradientKeywords = ...,
        integrated_gradients: IntegratedGradientsKeywords = ...,
        kernel_shap: KernelShapKeywords = ...,
        knockout: KnockoutKeywords = ...,
        latim: LatimKeywords = ...,
        logit: LogitKeywords = ...,
        lrp: LrpKeywords = ...,
        occlusion: OcclusionKeywords = ...,
        raw: RawKeywords = ...,
        rollout: RolloutKeywords = ...,
        smoothgrad: SmoothgradKeywords = ...,
        transformer_attribution: TransformerAttributionKeywords = ...,
        **options: Any,
    ) -> Comparison: ...
