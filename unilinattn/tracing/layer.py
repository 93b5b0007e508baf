"""`Layer`: one call of a token-mixing module with its operator; `Step`: layers that are added to a stream together."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.call import Call
from unilinattn.call.axes import as_read, as_tokens, in_shape
from unilinattn.call.exactness import tolerance
from unilinattn.call.nested import exchanged
from unilinattn.call.offloaded import device_of
from unilinattn.call.parameters import constant_parameters
from unilinattn.errors import UncoveredError
from unilinattn.host.isolation import in_gradient_mode, isolated
from unilinattn.host.module_calls import OPAQUE, CallRecord
from unilinattn.host.substitution import build_flow
from unilinattn.host.weights import Weights
from unilinattn.kernels.precision import full_precision
from unilinattn.operator.flow import Flow, evaluated_by
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.piecewise import PiecewiseOperator
from unilinattn.operator.reconstruction import worst_error
from unilinattn.operator.stages import Stage, walk
from unilinattn.tracing.around import stream_around
from unilinattn.tracing.copied import Copied
from unilinattn.tracing.following import stages_after
from unilinattn.tracing.frozen_pullback import last_projection, to_cores, to_projection
from unilinattn.tracing.trust import precision_of


class Layer(Copied):
    """One call of one token-mixing module: its input, its output, and the operator between them.

    Attributes:
        name: the module's path, with "#2" for the second call of a shared module.
        kind, architecture: the kind of token mixer ("Mamba-1 (S6)"), and the name of the adapter.
        input, output: the module's input (batch, key, in) and output (batch, query, out), in the operator's dtype.
        multiplier: the host's factor on the output in its sum with the stream.
        mask: real positions of the output (batch, query), None if all are real.
        module: the host's module.
        arguments: the arguments of the call, by parameter name.
        input_shape, output_shape, axes: the shapes of the host's tensors, and the axes of channels in them.
        structure: the nesting that the module returned, with `recorder.MAIN` in place of the output.
        seen: the records that the architecture's `capture` made during the call.
        stream: the host's residual stream before the layer, times the host's factor on it; None if none was found
            outside the module.
        next_stream: the stream after the layer less other outputs in its sum; None with `stream` or if it is in files.
        tower: the part of the model with its sequence, if another sequence has as many tokens; else empty.
        is_recorded: whether the operator was recorded from the module's functions; False before it is built.
        stream_dtype, precision: dtype of the host's stream, and the coarsest one that the host computed in.
    """

    def __init__(
        self,
        record: CallRecord,
        name: str,
        dtype: torch.dtype,
        mask: Bool[Tensor, "batch query"] | None,
        latest: dict[str, MixerOperator],
        weights: Weights | None,
    ) -> None:
        """Freeze a recorded call; layers that share `latest` keep the operator of only one of them at a time.

        Without `weights` no change of a weight since the call is noticed.
        """
        assert record.architecture is not None and record.output is not None
        source, prefix = record.entered, record.prefix
        if source is None:
            raise WithoutVectorsError(name, record.name)
        self.name, self.module, self._architecture = name, record.module, record.architecture
        self.kind, self.architecture = record.kind, record.architecture.name
        self.structure, self.seen = record.structure, tuple(record.seen)
        # The host may have written into its tensor; `source` is the copy made before the call.
        self.arguments: dict[str, Any] = exchanged(record.arguments, record.input, source)
        self.precision = precision_of(record.module, record.output)
        in_pieces = prefix is not None and prefix.pieces is not None
        # The files of streams stay where they are.
        device = record.output.device if in_pieces else device_of(record.module, record.output.device)
        sides = zip((source, record.output), record.axes, strict=True)
        self.input, self.output = (as_tokens(x.detach().to(device, dtype), record.batch, axis) for x, axis in sides)
        self.input_shape, self.output_shape, self.axes = source.shape, record.output.shape, record.axes
        self.mask = None if mask is None else mask.to(device)
        around = stream_around(record, device, dtype)
        self.stream, self.multiplier = around.entering, around.multiplier
        self.next_stream = None if in_pieces else around.leaving
        self.stream_dtype = around.dtype or self.output.dtype
        self._following, self._masks = record.following, record.masks
        self._reader, self._weights = record.reader, weights
        self._prefix = None if prefix is None else replace(prefix, output=prefix.output.to(device, dtype))
        self._latest = None if prefix is None else latest
        self._error: float | None = None
        self.is_recorded, self.tower = False, ""

    def __repr__(self) -> str:
        """Show path, kind and shapes."""
        checked = "" if self.expected is None else f", the host's own on the first {self.expected.shape[1]} tokens"
        return f"Layer({self.name}, {self.kind}, {tuple(self.input.shape)} -> {tuple(self.output.shape)}{checked})"

    def as_returned(self, vectors: Float[Tensor, "batch query out"]) -> Tensor:
        """Return vectors of the output's tokens in the shape in which the host returns them."""
        return in_shape(vectors, self.output_shape, self.axes.output)

    def in_shape(self, vectors: Float[Tensor, "batch token channel"], shape: torch.Size) -> Tensor:
        """Return vectors of an input's tokens in the shape of the host's tensor."""
        return in_shape(vectors, shape, self.axes.inputs)

    def as_read(self, tensor: Tensor, shape: torch.Size) -> Float[Tensor, "batch token channel"]:
        """Return an input of the host as vectors of tokens, (batch, token, channel) = `shape`."""
        return as_read(tensor, shape, self.axes.inputs)

    def output_as_read(self, tensor: Tensor) -> Float[Tensor, "batch query out"]:
        """Return a tensor in the shape of the host's output as vectors of tokens."""
        return as_read(tensor, self.output.shape, self.axes.output)

    @property
    def expected(self) -> Float[Tensor, "batch prefix out"] | None:
        """The host's output on a prefix, if an operator computed the output (see `trace`), else None."""
        return None if self._prefix is None else self._prefix.output

    @property
    def prefix_error(self) -> float | None:
        """Relative error of the operator on the prefix, None without it."""
        return None if self._prefix is None else self._prefix.error

    @property
    def operator(self) -> MixerOperator:
        """The layer as a frozen linear map, built on first access and cached.

        Of the layers whose operator replaced the host's forward, only the latest one accessed is cached. Its matrices
        are the model's weights, which are cast at each use; `copy.deepcopy(operator)` holds copies.

        Raises `ModelStateError` if a weight changed since the trace, here or at a use, `UncoveredError` for a
        configuration that the adapter does not cover, and `FactorError` for NaN or infinity in a factor; gates and
        norms, which are computed on first use, raise it then.
        """
        return self._cached_operator() or self._built()[0]

    def _cached_operator(self) -> MixerOperator | None:
        cache, key = self._cache
        return cache.get(key)

    @property
    def _cache(self) -> tuple[dict[str, Any], str]:
        """The dictionary and the key of the cached operator."""
        # An ordinary layer caches it in its attributes, so that a copy has another cache.
        return (vars(self), "operator") if self._latest is None else (self._latest, self.name)

    def _built(self) -> tuple[MixerOperator, Flow | None]:
        """Build and cache the operator; return it with its flow, None for one in pieces."""
        cache, key = self._cache
        if self._latest is not None:
            self._latest.clear()
        if self._prefix is not None and self._prefix.pieces is not None:
            cache[key] = PiecewiseOperator(self._prefix.pieces, self._flow_of_piece, output=self.output, name=self.name)
            return cache[key], None
        flow = in_gradient_mode(False, lambda: isolated(self.module, lambda: self.flow(self.input)))
        self.is_recorded = flow.is_recorded
        cache[key] = MixerOperator(
            flow.chains, inputs=flow.inputs, output=self.output, mask=self.mask, name=self.name, expected=self.expected
        )
        return cache[key], flow

    @property
    def ports(self) -> dict[str, tuple[int, int]]:
        """The (batch, tokens) of each tensor that the layer reads, by port: of an opaque layer that of its input."""
        if self.opaque:
            return {"x": (self.input.shape[0], self.input.shape[1])}
        # Builds no operator at length.
        if self._prefix is not None:
            return dict(self._prefix.ports)
        batch_and_keys = {port: x.shape[:2] for port, x in self.operator.inputs.items()}
        return {port: (shape[0], shape[1]) for port, shape in batch_and_keys.items()}

    def reconstruction_error(self) -> float:
        """Return the operator's relative error against the host's output, cached.

        It takes one forward pass of the operator, less what building it computes. If the operator replaced the host's
        forward, it is its error on the prefix (see `prefix_error`).
        """
        if self.prefix_error is not None:
            return self.prefix_error
        if self._error is None:
            self._error = self._measured_error()
        return self._error

    def build(self) -> None:
        """Build the operator, and measure its error if it covers the layer: building it computes the most of both.

        Raises the errors of `operator`.
        """
        with suppress(UncoveredError):
            self.reconstruction_error()
        _ = self.operator

    def _measured_error(self) -> float:
        if (operator := self._cached_operator()) is not None:
            return operator.reconstruction_error()
        operator, flow = self._built()
        # Some of the flow's values were needed to build it; one of several ports has one value for all of their chains.
        if flow is None or len(operator.ports) > 1:
            return operator.reconstruction_error()
        with full_precision():
            return operator.error_of(in_gradient_mode(False, lambda: flow.value))

    @property
    def needs_capture(self) -> bool:
        """Whether the adapter builds the operator from a capture of the host's run, not from the input only."""
        return self._architecture.needs_capture

    @property
    def in_pieces(self) -> bool:
        """Whether the trace ran on pieces of the tokens, so that the operator exists for one of them at a time."""
        return self._prefix is not None and self._prefix.pieces is not None

    @property
    def opaque(self) -> bool:
        """Whether the module has no adapter and hence no operator (see `trace(strict=False)`)."""
        return self._architecture is OPAQUE

    @property
    def stream_norms(self) -> Float[Tensor, "batch query"] | None:
        """The norm of the stream at each token, None without a stream."""
        if self._prefix is not None and self._prefix.stream_norms is not None:
            return self._prefix.stream_norms
        return None if self.stream is None else torch.linalg.vector_norm(self.stream, dim=-1)

    @property
    def residual(self) -> Float[Tensor, "batch query out"] | None:
        """The stream to which the host adds `multiplier` times the output; zeros if the module contains its residual.

        None if no such stream was found (for instance because of a norm in between).
        """
        if self.stream is None and not self.opaque and self.operator.has_residual:
            return torch.zeros_like(self.output)
        return self.stream

    @property
    def reads_its_output(self) -> bool:
        """Whether a module takes this layer's output itself, before anything was added to it."""
        return self._reader is not None

    @property
    def no_residual(self) -> str:
        """The reason why `residual` is None, such as a module that reads the output before any sum."""
        if self._reader is not None:
            return f"{self._reader} takes this output itself, and nothing was added to it before"
        return "no module received a stream, and later that stream with this output added"

    @cached_property
    def added(self) -> "Layer":
        """The layer with the norms and scales that the host applies to its output before it adds it to the stream.

        Its operator ends with their frozen stages, and its output is the tensor that is added.
        """
        if not self._following:
            return self
        other = copy(self)
        vars(other).pop("operator", None)
        other._following, other._error = (), None
        stages, other.output = stages_after(self._following, self.output, self.axes.output)
        chains = {
            port: (*chain, *(stage if port == self.operator.ports[0] else stage.unbiased() for stage in stages))
            for port, chain in self.operator.chains.items()
        }
        vars(other)["operator"] = MixerOperator(
            chains, inputs=self.operator.inputs, output=other.output, mask=self.mask, name=self.name
        )
        return other

    def before_output(self, grad: Float[Tensor, "batch query out"]) -> Float[Tensor, "batch query inner"]:
        """Pull d target / d output back to the input of the output projection (y' of HMA ACL Eq. 24).

        The derivative is that of the layer itself, including everything after the projection, not of the frozen map.
        """
        return self.pullback()(grad)

    def pullback(self) -> Callable[[Float[Tensor, "batch query out"]], Float[Tensor, "batch query inner"]]:
        """Return `before_output` as a function of the gradient, for many gradients at the cost of one set-up."""
        projection = last_projection(self.operator)
        if projection is not None:
            return lambda grad: projection.adjoint(grad.to(self.output))
        if self.is_recorded:
            return lambda grad: to_projection(self.operator, grad.to(self.output))

        def run() -> tuple[Tensor | None, Tensor]:
            flow = self.flow(self.input.detach().requires_grad_())
            return flow.before_output, flow.value

        inner, total = in_gradient_mode(True, lambda: isolated(self.module, run))

        def pull(grad: Tensor) -> Tensor:
            if inner is None:
                return grad
            return torch.autograd.grad(total, inner, grad.to(total), retain_graph=True)[0]

        return pull

    def core_pullback(
        self,
    ) -> Callable[[Float[Tensor, "batch query out"]], tuple[Float[Tensor, "batch query inner"], ...]]:
        """Return a function from d target / d output to the gradients with respect to the outputs of the cores.

        The derivative is that of the layer itself, norms and gates that read a core's output included, in the order of
        the operator's cores. Raises `UncoveredError` for a recorded layer with such norms or gates.
        """
        # Whether the layer is recorded is known when its operator is built.
        op = self.operator
        if self.is_recorded:
            return lambda grad: to_cores(op, grad.to(self.output))

        def run() -> tuple[list[Tensor], Tensor]:
            with evaluated_by(_from_cores), constant_parameters(self.module):
                flow = self.flow(self.input.detach())
                return [value() for value in flow.mixed], flow.value

        mixed, total = in_gradient_mode(True, lambda: isolated(self.module, run))
        return lambda grad: torch.autograd.grad(total, mixed, grad.to(total), retain_graph=True)

    def flow(self, x: Float[Tensor, "batch key in"]) -> Flow:
        """Build the layer's flow from another input, with gradients if they are enabled.

        Raises `ModelStateError` if a weight changed since the trace.
        """
        self._require_same_weights()
        return self.flow_in_run(x)

    def _require_same_weights(self) -> None:
        if self._weights is not None:
            self._weights.require_same(self.module, self.name, "its operator would not be the layer that ran")

    def _flow_of_piece(self, x: Float[Tensor, "batch token in"]) -> Flow:
        self._require_same_weights()
        device = device_of(self.module, x.device)
        call = Call(self.module, self.name, self.arguments, x.to(device))
        with full_precision():
            return in_gradient_mode(False, lambda: isolated(self.module, lambda: build_flow(self._architecture, call)))

    def flow_in_run(self, x: Float[Tensor, "batch key in"], arguments: Mapping[str, Any] | None = None) -> Flow:
        """Build `flow` inside a run of the model and with its weights, by default on the recorded `arguments`."""
        with full_precision():
            return build_flow(self._architecture, self.call(x, arguments))

    def call(self, x: Float[Tensor, "batch key in"], arguments: Mapping[str, Any] | None = None) -> Call:
        """Return the recorded call, with another input and by default the recorded `arguments`."""
        read = arguments or self.arguments
        return Call(self.module, self.name, read, x, self.output, self.seen, self.axes, self._masks)


class WithoutVectorsError(UncoveredError):
    """A layer, such as one that looks up ids and mixes their vectors, has no tensor of tokens among its arguments."""

    def __init__(self, layer: str, path: str) -> None:
        self.path = path
        super().__init__(
            f"{layer} was called without a (batch, length, channel) tensor; move what mixes to a module with one."
        )


@dataclass(frozen=True)
class Step:
    """Layers that are added to a stream in one sum: x <- skip(x) + sum_l multiplier_l * Op_l(x)."""

    layers: tuple[Layer, ...]

    def stream_error(self) -> float | None:
        """Return the relative error of stream plus layers against the host's next stream.

        Norm of the difference over the norm of the host's tensor, over real tokens, of the worst sequence. The output
        of an MLP that the host adds in the same sum is subtracted from that tensor. None if no stream was found outside
        the module.
        """
        first, last = self.layers[0], self.layers[-1]
        if first.stream is None or last.next_stream is None:
            return None
        total = last.next_stream.to(last.output)
        reached = first.stream.to(total, copy=True)
        for layer in self.layers:
            reached += layer.multiplier * layer.added.output.to(total)
        return worst_error(reached, total, last.mask)

    def stream_tolerance(self) -> float:
        """Return the largest `stream_error` that rounding in the host's dtype may cause."""
        return tolerance("stream", self.layers[-1].stream_dtype)


def _from_cores(stages: Sequence[Stage], x: Tensor) -> Tensor:
    """Run stages; the values after cores are leaves that require a gradient."""
    for stage in stages:
        x = stage.apply(x)
        if any(inner.role == "core" and inner.mixes for inner in walk([stage])):
            x = x.detach().requires_grad_()
    return x
