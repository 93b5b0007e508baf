"""Operators that differ from the host are refused with the cause; wrapped projections are exact."""

import copy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import unilinattn as ula
from unilinattn.call.exactness import layer_tolerance
from unilinattn.errors import ExactnessError, InputError, ModelStateError, OptionError
from unilinattn.registry import Method, overridden
from unilinattn.results.attribution import Attribution
from unilinattn.testing import TOLERANCES
from unilinattn.testing.hosts import host
from unilinattn.tracing.trace import Trace
from unilinattn.tracing.trust import precision_of, trusting

IDS = torch.arange(18).view(2, 9) % 11
mamba, mamba2, llama = (host(name).model for name in ("mamba", "mamba2", "llama, grouped queries"))


@contextmanager
def hooked(module: nn.Module) -> Iterator[None]:
    """Change the output of a module with a hook that is not a linear map."""
    hook = module.register_forward_hook(lambda _, args, out: out + out**2)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("method", ["raw", "rollout", "attribution", "latim", "alti"])
def test_every_method_refuses_an_inexact_layer(method: str) -> None:
    model = mamba()
    with (
        hooked(model.backbone.layers[1].mixer.in_proj),
        pytest.raises(
            ExactnessError,
            match=r"layers\.1\.mixer misses .* by \d.*1e-04 is accepted in float32.*forward hook on in_proj.*'warn'",
        ),
    ):
        ula.explain(model, IDS, method=method, target=-1)
    ula.explain(model, IDS, method=method, target=-1)


def test_compare_and_estimate_refuse_an_inexact_layer() -> None:
    model = mamba()
    with hooked(model.backbone.layers[0].mixer.x_proj):
        with pytest.raises(ExactnessError, match="hook on x_proj"):
            ula.estimate(model, IDS, method="latim")
        with pytest.raises(ExactnessError, match="hook on x_proj"):
            ula.compare({"one": model}, IDS, methods=["raw"])


def test_an_unused_layer_may_be_inexact() -> None:
    model = mamba()
    with hooked(model.backbone.layers[1].mixer.in_proj):
        result = ula.explain(model, IDS, method="latim", layers=[0])
    assert result.warnings == ()


@pytest.mark.parametrize("method", ["rollout", "alti"])
def test_trust_warn_returns_scores_and_the_warning(method: str, tmp_path) -> None:
    model = mamba()
    with (
        hooked(model.backbone.layers[1].mixer.in_proj),
        pytest.warns(UserWarning, match=r"layers\.1\.mixer misses the host's output") as caught,
    ):
        result = ula.explain(model, IDS, method=method, trust="warn")
    assert len(caught) == 1
    assert [str(caught[0].message)] == list(result.warnings)
    assert "WARNING: the operator of backbone.layers.1.mixer misses" in repr(result)
    assert "backbone.layers.1.mixer misses" in result.to_html()
    assert Attribution.load(result.save(tmp_path / "result.safetensors")).warnings == result.warnings


def test_an_exact_model_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ula.explain(mamba(), IDS, method="latim", trust="warn").warnings == ()


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_trust_is_refused() -> None:
    words: Any = "wran"
    message = "unknown trust 'wran'; did you mean 'warn'[?] Accepted: require, warn"
    with pytest.raises(OptionError, match=message), trusting(words):
        pass


def test_a_method_of_another_package_is_held_to_the_same() -> None:
    def careless(trace: Trace, *, target: object = None) -> Attribution:
        """Return a map without a check of the error."""
        layer = trace.layers[1]
        return Attribution(
            scores=layer.operator.matrix(), dims=("batch", "query", "key"), method="careless", layers=(layer.name,)
        )

    model = mamba()
    with overridden(Method("careless", "", careless)):
        assert ula.explain(model, IDS, method="careless").sizes["query"] == 9
        with hooked(model.backbone.layers[1].mixer.in_proj), pytest.raises(ExactnessError, match="in_proj"):
            ula.explain(model, IDS, method="careless")


def test_the_check_runs_the_operator_once() -> None:
    trace = ula.trace(mamba(), IDS)
    runs = []
    for layer in trace.layers:
        inner = layer.operator.reconstruction_error
        # An attribute of the object hides the method.
        layer.operator.reconstruction_error = lambda inner=inner: runs.append(1) or inner()  # type: ignore[method-assign]
    for method in ("raw", "latim", "alti"):
        ula.explain(trace, method=method)
    assert len(runs) == 2


@pytest.mark.parametrize("dtype", [dtype for comparison, dtype in TOLERANCES if comparison == "layer"])
def test_hosts_of_every_dtype_stay_far_below_its_tolerance(dtype: torch.dtype) -> None:
    for model in (mamba(), mamba2(), llama()):
        for layer in ula.trace(model.to(dtype), IDS).layers:
            assert layer.precision == dtype
            assert layer.reconstruction_error() <= layer_tolerance(dtype) / 2


def test_the_coarsest_dtype_sets_the_tolerance() -> None:
    layer = nn.Linear(4, 4)
    assert precision_of(layer, torch.zeros(1)) == torch.float32
    assert precision_of(layer, torch.zeros(1, dtype=torch.float64)) == torch.float32
    assert precision_of(layer.half(), torch.zeros(1)) == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert precision_of(layer, torch.zeros(1)) == torch.bfloat16


def test_an_operator_keeps_its_precision_under_autocast() -> None:
    for model in (mamba(), mamba2(), llama()):
        layer = ula.trace(model, IDS).layers[0]
        plain = layer.operator.matrix("core"), layer.operator.contributions(-1), layer.operator.apply(layer.input)
        again = ula.trace(model, IDS).layers[0]
        with torch.autocast("cpu", torch.bfloat16):
            op = again.operator
            within = op.matrix("core"), op.contributions(-1), op.apply(again.input)
            assert op.reconstruction_error() <= 1e-5
            assert torch.is_autocast_enabled("cpu")
            for rows, _ in op.row_blocks():
                assert torch.is_autocast_enabled("cpu"), rows
        for actual, expected in zip(within, plain, strict=True):
            assert torch.equal(actual, expected)


def test_a_host_under_autocast_has_the_tolerance_of_the_autocast_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        trace = ula.trace(mamba(), IDS)
    assert all(layer.precision == torch.bfloat16 for layer in trace.layers)
    assert 1e-4 < max(layer.reconstruction_error() for layer in trace.layers) <= layer_tolerance(torch.bfloat16)


class LowRank(nn.Module):
    """A linear layer with a low-rank adapter, as in LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=True)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


@pytest.mark.parametrize(
    ("build", "names"),
    [(mamba, ("in_proj", "x_proj", "out_proj")), (mamba2, ("in_proj", "out_proj")), (llama, ("q_proj", "v_proj"))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrapped_projections_are_folded_into_the_operator(build, names: tuple[str, ...], dtype: torch.dtype) -> None:
    model = build().to(dtype)
    for layer in ula.trace(model, IDS).layers:
        for name in names:
            setattr(layer.module, name, LowRank(getattr(layer.module, name)).to(dtype))
    trace = ula.trace(model, IDS)
    for layer in trace.layers:
        assert layer.reconstruction_error() <= (1e-5 if dtype == torch.float32 else 1e-6)
    # Gradients pass through the wrapped layers: the same function.
    gradients = trace.gradient(logit=3)
    assert all(bool(torch.isfinite(g).all()) for g in gradients)


def test_ignoring_the_adapter_of_a_projection_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mamba()
    model.backbone.layers[0].mixer.in_proj = LowRank(model.backbone.layers[0].mixer.in_proj)
    # The package's attribute of that name is a function.
    monkeypatch.setattr(sys.modules["unilinattn.call.call"], "is_plain", lambda *_: True)
    with pytest.raises(ExactnessError, match=r"in_proj is a tests\S*LowRank"):
        ula.explain(model, IDS, method="raw")


def test_recording_hooks_are_not_called_with_unit_vectors() -> None:
    model = mamba()
    layer = model.backbone.layers[0].mixer
    layer.in_proj = LowRank(layer.in_proj)
    calls: list[int] = []
    layer.in_proj.register_forward_hook(lambda *_: calls.append(1))
    result = ula.explain(model, IDS, method="raw")
    assert calls == [1]
    assert result.warnings == ()


def test_parametrized_projections_are_exact() -> None:
    model = mamba()
    parametrizations.weight_norm(model.backbone.layers[0].mixer.in_proj)
    parametrizations.orthogonal(model.backbone.layers[1].mixer.out_proj)
    assert max(layer.reconstruction_error() for layer in ula.trace(model, IDS).layers) <= 1e-5


def test_a_nonlinear_projection_is_refused_with_its_class() -> None:
    class Bent(LowRank):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.base(x))

    model = mamba()
    model.backbone.layers[0].mixer.in_proj = Bent(model.backbone.layers[0].mixer.in_proj)
    with pytest.raises(ExactnessError, match=r"in_proj is a \S*Bent"):
        ula.explain(model, IDS, method="raw")


@pytest.mark.parametrize("name", ["past_key_values", "cache_params"])
def test_a_cache_is_refused(name: str) -> None:
    model = llama() if name == "past_key_values" else mamba()
    cache = getattr(model(IDS, use_cache=True), name)
    with pytest.raises(
        InputError, match=f"the model was given {name} with the states of earlier tokens.* Leave it out"
    ):
        ula.trace(model, {"input_ids": IDS[:, -1:], name: cache})


def test_a_changed_buffer_is_refused() -> None:
    model = llama()
    model.model.layers[1].self_attn.register_buffer("extra", torch.ones(3))
    trace = ula.trace(model, IDS)
    model.model.layers[1].self_attn.extra[1] = 2
    with pytest.raises(ModelStateError, match=r"changed since the trace \(extra\)"):
        trace.layers[1].operator  # noqa: B018  the property builds it


def test_weights_with_restored_values_are_accepted() -> None:
    model = mamba()
    trace = ula.trace(model, IDS)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert trace.layers[0].reconstruction_error() <= 1e-5
    trace.gradient()


def test_inputs_overwritten_after_the_trace_have_no_effect() -> None:
    model, ids = mamba(), IDS.clone()
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    trace = ula.trace(model, {"input_ids": ids, "attention_mask": mask})
    expected = trace.gradient(logit=3)
    trace = ula.trace(model, {"input_ids": ids, "attention_mask": mask})
    ids.zero_()
    mask.fill_(1)
    for actual, gradient in zip(trace.gradient(logit=3), expected, strict=True):
        assert torch.equal(actual, gradient)
    assert max(layer.reconstruction_error() for layer in trace.layers) <= 1e-5
