"""`trace`: run a host model once, get every token-mixing layer as an exact operator."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unilinattn.architectures.call import Call
from unilinattn.errors import InputError, ModelStateError, UncoveredError
from unilinattn.flow import Flow
from unilinattn.frames import OPAQUE, Frame
from unilinattn.logits import kept_positions, logits_at, places_of
from unilinattn.operator import MixerOperator
from unilinattn.progress import bars
from unilinattn.recorder import Recorder, RefuseDropout, host_arguments, preserved
from unilinattn.registry import Architecture
from unilinattn.standins import build_flow, may_be_long, operators_at_length, through_operators

Target = int | Sequence[int] | Int[Tensor, " batch"]
"""A position, or one a sequence; negative counts from the end of the real tokens."""

Logit = int | tuple[int, int] | Callable[[Any], Tensor] | None
"""A token or class id, a pair (their difference), a scalar function of the model's output, None for its prediction."""


class Layer:
    """One call of one token-mixing module: what went in, what came out, and the operator between.

    Attributes:
        name: the module's path, with "#2" for a second call of a shared module.
        kind: what mixes the tokens.
        architecture: name of the adapter.
        input, output: the module's own argument and result, in the dtype that the operator computes in.
        multiplier: the factor that the host puts on the output when it adds it to the stream.
        mask: real positions of the output, None where all are real.
        prefix_error: None where the host's own forward ran. Else the output is the operator's own, and this is its
            relative error on the prefix that the host computed too (see `trace`).
    """

    def __init__(
        self,
        frame: Frame,
        name: str,
        dtype: torch.dtype,
        mask: Bool[Tensor, "batch query"] | None,
        latest: dict[str, MixerOperator],
    ) -> None:
        """Freeze what a recorded call holds; `latest` is shared by layers of which one keeps its operator at a time."""
        assert frame.architecture is not None and frame.output is not None
        source = frame.entered
        if source is None:
            raise UncoveredError(
                f"{name} was called without a (batch, length, channel) tensor; it cannot be an operator."
            )
        self._architecture: Architecture = frame.architecture
        self._module = frame.module
        self._versions = _weight_versions(frame.module)
        # The host's own tensor may have been written into since, and one copy of it is enough.
        self._arguments = {k: source if v is frame.input else v for k, v in frame.arguments.items()}
        self._seen = tuple(frame.seen)
        self.name, self.kind, self.architecture = name, frame.architecture.kind, frame.architecture.name
        device = next(frame.module.parameters(), frame.output).device
        self.input: Float[Tensor, "batch key in"] = source.detach().to(device, dtype)
        self.output: Float[Tensor, "batch query out"] = frame.output.detach().to(device, dtype)
        self._stream = None if frame.place is None else frame.place.stream.detach().to(device, dtype)
        self.multiplier = 1.0 if frame.place is None else frame.place.multiplier
        self.mask = None if mask is None else mask.to(device)
        self._expected = None if frame.prefix is None else frame.prefix.output.to(device, dtype)
        self.prefix_error = None if frame.prefix is None else frame.prefix.error
        self._ports = None if frame.prefix is None else frame.prefix.ports
        self._latest = None if frame.prefix is None else latest

    def __repr__(self) -> str:
        """Show the path, the kind and the shapes."""
        checked = "" if self._expected is None else f", the host's own on the first {self._expected.shape[1]} tokens"
        return f"Layer({self.name}, {self.kind}, {tuple(self.input.shape)} -> {tuple(self.output.shape)}{checked})"

    @property
    def operator(self) -> MixerOperator:
        """The layer as a frozen linear map, built when first asked for and then kept.

        Of layers whose operator ran in the host's place, the one that was asked for last alone is kept.

        Raises `ModelStateError` if a weight changed since the trace, `UncoveredError` for a configuration that the
        adapter does not cover, `FactorError` for NaN or infinity in a factor; gates and norms, which are made when they
        are first needed, raise it then.
        """
        # An ordinary layer keeps its operator with itself, as a cached property would: a copy has one of its own.
        kept, key = (vars(self), "operator") if self._latest is None else (self._latest, self.name)
        if key not in kept:
            if self._latest is not None:
                self._latest.clear()
            with torch.no_grad():
                flow = self._flow(self.input)
            kept[key] = MixerOperator(
                flow.chains,
                inputs=flow.inputs,
                output=self.output,
                mask=self.mask,
                name=self.name,
                expected=self._expected,
            )
        built: MixerOperator = kept[key]
        return built

    @property
    def ports(self) -> dict[str, tuple[int, int]]:
        """The batch and the number of tokens of what the layer reads, by port; builds no operator at length."""
        if self._ports is not None:
            return dict(self._ports)
        batch_and_keys = {port: x.shape[:2] for port, x in self.operator.inputs.items()}
        return {port: (shape[0], shape[1]) for port, shape in batch_and_keys.items()}

    def reconstruction_error(self) -> float:
        """Return the operator's; where it ran in the host's place, what that run was off on the prefix.

        The second is known without building the operator again.
        """
        return self.operator.reconstruction_error() if self.prefix_error is None else self.prefix_error

    @property
    def opaque(self) -> bool:
        """Whether no adapter knows the module, so that it has no operator (see `trace(strict=False)`)."""
        return self._architecture is OPAQUE

    @property
    def residual(self) -> Float[Tensor, "batch query out"] | None:
        """The stream that the host adds `multiplier` times the output to: zeros where the module has its own residual.

        None where no such stream was seen (a norm stands between, say).
        """
        if self._stream is None and not self.opaque and self.operator.has_residual:
            return torch.zeros_like(self.output)
        return self._stream

    def before_output(self, grad: Float[Tensor, "batch query out"]) -> Float[Tensor, "batch query inner"]:
        """Carry d target / d output back to the input of the output projection (y' of HMA ACL Eq. 24).

        The derivative is the layer's own, through whatever stands after the projection, not the frozen one.
        """
        return self.pullback()(grad)

    def pullback(self) -> Callable[[Float[Tensor, "batch query out"]], Float[Tensor, "batch query inner"]]:
        """Return `before_output` as a function that can be called for many gradients at the price of one set-up."""
        with torch.enable_grad():
            flow = self._flow(self.input.detach().requires_grad_())
            inner, total = flow.before_output, flow.value

        def pull(grad: Tensor) -> Tensor:
            if inner is None:
                return grad
            return torch.autograd.grad(total, inner, grad.to(total), retain_graph=True)[0]

        return pull

    def _flow(self, x: Tensor) -> Flow:
        _require_same_weights(self._module, self._versions, self.name, "its operator would not be the layer that ran")
        call = Call(self._module, self.name, self._arguments, x, self.output, self._seen)
        return build_flow(self._architecture, call)


@dataclass(frozen=True)
class Step:
    """Layers that are added to a stream together: x <- x + sum_l Op_l(x)."""

    layers: tuple[Layer, ...]
    stream: str = "x"


class Trace:
    """A host model's run: its token-mixing layers in order of execution, and its output.

    Attributes:
        layers: every call of a token-mixing module.
        steps: the same layers, those that are added together in one step.
        output: what the model returned; at length, the logits of the last real tokens alone (see `trace`).
        mask: real tokens (batch, length), None where all are real.
        model: the model's class name.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Mapping[str, Any],
        recorder: Recorder,
        output: Any,
        dtype: torch.dtype | None,
    ) -> None:
        """Freeze the layers of a recorded run."""
        self._model, self._given, self._strict = model, given, recorder.strict
        self._versions = _weight_versions(model)
        self.model = type(model).__name__
        self.output = output
        mask, inner_mask = _mask(given, "attention_mask"), _mask(given, "decoder_attention_mask")
        layers, streams = [], []
        latest: dict[str, MixerOperator] = {}
        seen: dict[str, int] = {}
        for frame in recorder.layers:
            seen[frame.name] = seen.get(frame.name, 0) + 1
            name = frame.name or type(frame.module).__name__
            name = name if seen[frame.name] == 1 else f"{name}#{seen[frame.name]}"
            encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and _in_encoder(frame.name)
            decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and not encoder
            own = inner_mask if decodes else mask
            assert frame.output is not None
            computed = torch.promote_types(dtype or frame.output.dtype, torch.float32)
            fits = own is not None and own.shape == frame.output.shape[:2]
            layers.append(Layer(frame, name, computed, own if fits else None, latest))
            streams.append("encoder" if encoder else "x")
        self.layers: tuple[Layer, ...] = tuple(layers)
        self.steps = _steps(recorder.layers, layers, streams)
        self.mask = mask

    def __repr__(self) -> str:
        """List the layers, one a line."""
        return "\n".join([f"Trace of {self.model}: {len(self.layers)} layers", *(f"  {x!r}" for x in self.layers)])

    @property
    def versions(self) -> dict[str, str]:
        """Versions of this library, of torch and of the host's package."""
        package = type(self._model).__module__.split(".")[0]
        found = {"unilinattn": version("unilinattn"), "torch": torch.__version__}
        host = getattr(sys.modules.get(package), "__version__", None)
        return found if host is None else {**found, package: str(host)}

    def positions(self, target: Target) -> Int[Tensor, " batch"]:
        """Turn a target into one position a sequence, counted over real tokens.

        Raises `InputError` if a sequence has no such real token.
        """
        batch, length = self.layers[-1].output.shape[:2]
        wanted = torch.as_tensor(target)
        if wanted.is_floating_point() or wanted.dtype == torch.bool or wanted.ndim > 1:
            raise InputError(f"target {target!r} is no position; give an int, or a list with one int a sequence.")
        if wanted.ndim == 1 and wanted.numel() != batch:
            raise InputError(
                f"target names {wanted.numel()} positions for {batch} sequences; give one each, or one int."
            )
        mask = self.layers[-1].mask
        real = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask.cpu()
        places = []
        for b, t in enumerate(wanted.expand(batch).tolist()):
            own = real[b].nonzero().squeeze(1)
            if not -len(own) <= t < len(own):
                raise InputError(f"target {t} is out of range: sequence {b} has {len(own)} real positions.")
            places.append(int(own[t]))
        return torch.tensor(places)

    def gradient(self, target: Target = -1, logit: Logit = None) -> tuple[Float[Tensor, "batch query out"], ...]:
        """Return d target / d layer output of the real model, one tensor a layer: the only door to gradients.

        The target is a logit at a position (`logit` None: the model's own prediction there), a class logit where the
        model returns one vector a sequence, a difference of two, or any scalar function of the model's output.
        Runs the model once more, with gradients, and leaves it as found. Registered mixers run through their live
        operators there: the same function, whose backward pass is linear in length where a host's loop is not.
        Above `standins.AT_LENGTH` tokens a host that takes `logits_to_keep` computes the logits of the targets alone;
        a function of the output gets them all.
        """
        return next(self.gradients([target], logit))

    def gradients(
        self, targets: Iterable[Target], logit: Logit = None
    ) -> Iterator[tuple[Float[Tensor, "batch query out"], ...]]:
        """Yield `gradient` for one target after the other, the model run forward only once."""
        _require_same_weights(self._model, self._versions, self.model, "this gradient would not be of what ran")
        recorder = _GradientRecorder(self._model, strict=self._strict)
        targets, given = list(targets), self._given
        if not callable(logit):
            given = logits_at(self._model, given, lambda: [self.positions(target) for target in targets])
        with torch.enable_grad(), through_operators(self._model), _running(self._model, recorder):
            output = self._model(**given)
        kept = kept_positions(given, self.layers[-1].output.shape[1])
        for target in targets:
            with torch.enable_grad():
                chosen = self._scalar(output, target, logit, kept).sum()
            grads = torch.autograd.grad(chosen, recorder.outputs, allow_unused=True, retain_graph=True)
            yield tuple(
                torch.zeros_like(layer.output) if g is None else g.to(layer.output)
                for layer, g in zip(self.layers, grads, strict=True)
            )

    def _scalar(self, output: Any, target: Target, logit: Logit, kept: Int[Tensor, " position"] | None) -> Tensor:
        if callable(logit):
            return logit(output)
        # Vision models return their class logits as they are.
        logits = output if isinstance(output, Tensor) and output.ndim == 2 else getattr(output, "logits", None)
        if logits is None:
            raise InputError(
                f"{self.model} returns no logits; give `logit` as a function of its output, such as "
                "lambda out: out.last_hidden_state[:, -1].sum()."
            )
        if logits.ndim == 3:
            positions = self.positions(target)
            positions = positions if kept is None else places_of(positions, kept)
            logits = logits[torch.arange(logits.shape[0], device=logits.device), positions.to(logits.device)]
        wanted = [logit] if isinstance(logit, int) else list(logit or ())
        if any(not 0 <= w < logits.shape[-1] for w in wanted):
            raise InputError(f"logit {logit} is out of range: the model has logits 0 to {logits.shape[-1] - 1}.")
        if not wanted:
            return logits.gather(-1, logits.detach().argmax(-1, keepdim=True)).squeeze(-1)
        return logits[:, wanted[0]] - (logits[:, wanted[1]] if len(wanted) == 2 else 0)


class _GradientRecorder(Recorder):
    """Makes every layer's output require a gradient, so that the model's frozen parameters do not matter."""

    def __init__(self, model: nn.Module, *, strict: bool) -> None:
        super().__init__(model, strict=strict)
        self.outputs: list[Tensor] = []

    def on_layer(self, output: Any, result: Tensor) -> Any:
        leaf = result if result.requires_grad else result.detach().requires_grad_()
        self.outputs.append(leaf)
        # The host may write into what it gets, and nothing may write into a leaf.
        return _with_tensor(output, result, leaf.clone())


def trace(
    model: nn.Module, inputs: Any, *, dtype: torch.dtype | None = None, strict: bool = True, progress: bool = True
) -> Trace:
    """Run a model once and return its token-mixing layers, each with an exact operator built when asked for.

    `inputs` is a tensor of ids or pixels, or a mapping of the host's keyword arguments. The operators compute in
    float32 at least, in float64 where the model does or where `dtype` asks for it. The model is left exactly as
    found: hooks, buffers, parameters, training flags and attention implementation, also after an exception.

    With `strict=False` mixers that no adapter knows are kept as opaque layers, without an operator: methods leave
    them out, and every result names them in `left_out`.

    Above `standins.AT_LENGTH` tokens (8192) hosts' own scans ask for tens of GiB. There every causal mixer runs
    through its operator, checked on the first 2048 tokens of its input against the host's own forward; the layer's
    `prefix_error` and `reconstruction_error` are those of that prefix. A host that takes `logits_to_keep` then
    computes the logits of each sequence's last real token alone, and one layer's operator is kept at a time. The trace
    holds three tensors a layer, its input, its output and the stream: in float32 12 bytes a token, layer and channel
    of the model; while it runs, 4 more, and once about 40 a token and inner channel for the layer at work (Mamba-1 and
    Mamba-2). `progress` shows a bar on a terminal or in a notebook.

    Raises `UnknownArchitectureError` for a model without a token mixer or with one that no adapter knows,
    `ModelStateError` for active dropout, `InputError` for inputs that do not fit, and `UncoveredError` where an
    operator that runs in the host's place is not what the host computes.
    """
    given = host_arguments(model, inputs)
    recorder = Recorder(model, strict=strict)
    mask = _mask(given, "attention_mask")
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(bars(progress))
        if may_be_long(given):
            stack.enter_context(operators_at_length(model, mask, recorder.note_prefix))
        stack.enter_context(_running(model, recorder))
        output = model(**logits_at(model, given, lambda: [_last_real(mask)]))
    recorder.check()
    _warn_of_leaks(given, recorder)
    return Trace(model, given, recorder, output, dtype)


@contextmanager
def _running(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(preserved(model))
        if any(module.training for module in model.modules()):
            stack.enter_context(RefuseDropout())
        stack.enter_context(recorder.attached())
        yield


def _weight_versions(module: nn.Module) -> dict[str, tuple[object, ...]]:
    """Return what changes with a parameter: the tensor itself, its storage, dtype and version."""
    return {
        name: (id(p), p.data_ptr(), p.dtype, -1 if p.is_inference() else p._version)
        for name, p in module.named_parameters()
    }


def _require_same_weights(module: nn.Module, before: dict[str, tuple[object, ...]], name: str, otherwise: str) -> None:
    now = _weight_versions(module)
    changed = [parameter for parameter in {**before, **now} if before.get(parameter) != now.get(parameter)]
    if changed:
        raise ModelStateError(
            f"the weights of {name} changed since the trace ({changed[0]}), so {otherwise}; trace the model again."
        )


def _warn_of_leaks(given: Mapping[str, Any], recorder: Recorder) -> None:
    mask = _mask(given, "attention_mask")
    if mask is None:
        return
    after = mask.flip(1).cumsum(1).flip(1) == 0
    for side, other, padded in (("left", "right", mask | after), ("right", "left", ~after)):
        leak = None if bool(padded.all()) else _leak(recorder, padded)
        if leak is None:
            continue
        elsewhere = _leak(recorder, padded.sort(dim=1, descending=side == "left").values)
        advice = f"pad on the {other}" if elsewhere is None else "trace texts of different lengths one by one"
        warnings.warn(
            f"{side} padding reaches real tokens in this model: {leak}. Its operators reproduce that; {advice}.",
            stacklevel=3,
        )


def _leak(recorder: Recorder, mask: Bool[Tensor, "batch length"]) -> str | None:
    """Return what the first layer that lets this padding through says of it."""
    found = (f.architecture.leak(f.module, mask) for f in recorder.layers if f.architecture and f.architecture.leak)
    return next((leak for leak in found if leak is not None), None)


def _mask(given: Mapping[str, Any], name: str) -> Bool[Tensor, "batch length"] | None:
    mask = given.get(name)
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()) else None


def _last_real(mask: Bool[Tensor, "batch length"] | None) -> Int[Tensor, " batch"]:
    """Return the position of each sequence's last real token, -1 for all without a mask."""
    if mask is None:
        return torch.tensor([-1])
    return (torch.arange(mask.shape[1]) * mask.cpu()).amax(1)


def _steps(frames: Sequence[Frame], layers: Sequence[Layer], streams: Sequence[str]) -> tuple[Step, ...]:
    """Group layers that only the sum of both explains: they are added to the stream together."""
    steps: list[Step] = []
    for at, (frame, layer, stream) in enumerate(zip(frames, layers, streams, strict=True)):
        before = frames[at - 1] if at else None
        together = frame.place is not None and before is not None and frame.place.beside is before
        mutual = before is not None and before.place is not None and before.place.beside is frame
        if together and mutual:
            steps[-1] = Step((*steps[-1].layers, layer), stream)
        else:
            steps.append(Step((layer,), stream))
    return tuple(steps)


def _in_encoder(name: str) -> bool:
    return "encoder" in name.split(".")


def _with_tensor(output: Any, old: Tensor, new: Tensor) -> Any:
    if output is old:
        return new
    if isinstance(output, (tuple, list)):
        return type(output)(new if item is old else item for item in output)
    for key, value in output.items():
        if value is old:
            output[key] = new
    return output
