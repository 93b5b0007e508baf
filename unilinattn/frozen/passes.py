"""`FrozenPass`: one pass of a host with frozen factors, which keeps its graph."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge

from unilinattn.call.axes import as_tokens, in_shape
from unilinattn.call.exactness import layer_tolerance
from unilinattn.call.nested import mapped, tensors
from unilinattn.errors import UncoveredError
from unilinattn.frozen.layers import frozen_output, live_output, without_operator
from unilinattn.frozen.modules import plain_output
from unilinattn.frozen.shares import Stream
from unilinattn.host.forwards import Forward, replaced_forwards
from unilinattn.host.inputs import bound_arguments, call_host
from unilinattn.host.observer import Inputs, Observer
from unilinattn.host.recomputation import captures
from unilinattn.host.recorder import MAIN, main_tensor
from unilinattn.host.run import run
from unilinattn.registry import architecture_of, plain_form_of
from unilinattn.rules.freezing import Freezing
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.lookups import TokenIds
from unilinattn.tracing.token_source import Source
from unilinattn.tracing.tokens import TokenCall, first_stream


@dataclass(frozen=True)
class FrozenSpec:
    """A model, its arguments, and how a pass freezes it.

    Attributes:
        model: the host model.
        arguments: its arguments.
        layers: the traced layers in order of execution.
        rule: how a product of two factors of different rank is frozen (see `Freezing`).
        sources: where the tokens of each stream get their vectors.
        blocks: the paths of the modules that contain layers of one of these streams, with the number of its source (see
            `block_names`).
    """

    model: nn.Module
    arguments: Mapping[str, Any]
    layers: Sequence[Layer]
    rule: str
    sources: Sequence[Source]
    blocks: Mapping[str, int]


class _Call(NamedTuple):
    """A call of a module, with the stream of tokens that entered a block."""

    path: str
    module: nn.Module
    stream: Stream | None


class FrozenPass(Observer[_Call]):
    """One pass of a host as an affine map of its tokens.

    Args:
        spec: the model and its arguments.
        whole: whether tangents are those of all parts of a value, those from tokens too.
        records_sources: whether the constants that are added to the tokens become leaves of the graph.

    Attributes:
        output: the output.
        tangents: the tangents of its tensors: the parts of them that come from constants.
        leaves: the vectors of the tokens of each source, one tensor for each lookup.
        outputs: the layers' outputs.
        mixed: the edges of the graph after each layer's cores, if the rule is "half" (see `live_output`).
        entries: the stream that enters the first block, by the number of its source.
        streams: the stream that enters each layer's numbered block, None without one.
        last_stream: the stream after the last sum, None if the layers are not all added to one.
        sources: the constants with the path of the module that added them.
        shared: names of functions that multiplied two factors of equal rank, each of which got half.
        suspect: the first module whose output has other tangents than values; for a `whole` pass.

    Raises `UncoveredError` for a function without a rule or without a forward-mode derivative.
    """

    sees_given_inputs = False

    def __init__(self, spec: FrozenSpec, *, whole: bool = False, records_sources: bool = False) -> None:
        """Run the host."""
        super().__init__(spec.model)
        self._spec, self._whole, self._records_sources = spec, whole, records_sources
        self.leaves: list[list[Tensor]] = [[] for _ in spec.sources]
        self.outputs: list[Tensor] = []
        self.mixed: list[list[GradientEdge]] = []
        self.entries: dict[int, Stream] = {}
        self.streams: list[Stream | None] = []
        self.last_stream: Stream | None = None
        self.sources: list[tuple[str, Tensor]] = []
        self.shared: frozenset[str] = frozenset()
        self.suspect: str | None = None
        self._in_blocks: set[int] = set()
        self._without_operator = without_operator(spec.layers)
        self._queues: dict[nn.Module, list[Layer]] = {}
        for layer in spec.layers:
            self._queues.setdefault(layer.module, []).append(layer)
        mixers, observer = replaced_forwards(self.model, self._replaced), self._observed()
        self.output, self.tangents = run(self.model, self._compute, gradients=True, mixers=mixers, observer=observer)

    @contextmanager
    def _observed(self) -> Iterator[None]:
        with self.attached(), captures(self.model), forward_ad.dual_level():
            yield

    def _record(self, leaf: Tensor) -> None:
        self.sources.append((self.stack[-1].path, leaf))

    def _compute(self) -> tuple[Any, Any]:
        """Return the output of the host and its tangents."""
        arguments = dict(self._spec.arguments)
        for number, source in enumerate(self._spec.sources):
            if isinstance(source.origin, str):
                arguments[source.origin] = self._leaf(number, arguments[source.origin])
        half, record = self._spec.rule == "half", self._record if self._records_sources else None
        with Freezing(self._where, self._marker(), half=half, record=record) as mode:
            self._mode = mode
            try:
                output = call_host(self.model, arguments)
            except NotImplementedError as error:
                if isinstance(error, UncoveredError):
                    raise
                raise UncoveredError(
                    f"{self._where()} computes in a function without a forward-mode derivative, such as a "
                    "fused kernel, so the part of its biases in the output is unknown. Use the module's "
                    "plain code, or give it one (`register_plain_form`)."
                ) from error
        del self._mode  # Through its cycle with the pass, the graph would outlive both.
        self.shared = frozenset(mode.shared)
        if mode.last_sum is not None and mode.in_stream(mode.last_sum):
            self.last_stream = Stream(mode.last_sum, forward_ad.unpack_dual(mode.last_sum).tangent)
        tangents = mapped(output, _tangent)
        # A view of a parameter requires a gradient again after the run.
        values = mapped(output, lambda t: forward_ad.unpack_dual(t).primal if t.requires_grad else t.detach())
        return values, tangents

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> _Call:
        """Find the stream that enters a block."""
        number = self._spec.blocks.get(path)
        if number is None:
            return _Call(path, module, None)
        args, kwargs = inputs
        entered, shape = None, self._spec.sources[number].stream.shape if len(self.leaves) > 1 else None
        # The mode of the run counts the functions that the host calls.
        with torch._C.DisableTorchFunction():
            stream = first_stream((*args, *kwargs.values()), shape)
            if stream is not None and stream.requires_grad:
                entered = Stream(stream, forward_ad.unpack_dual(stream).tangent)
        if entered is None:
            return _Call(path, module, None)
        self.entries.setdefault(number, entered)
        # The code before the first block of a list may scale the embeddings.
        if path.rpartition(".")[2].isdigit() and number not in self._in_blocks:
            self._in_blocks.add(number)
            self._mode.enter_stream(entered.value)
        return _Call(path, module, entered)

    def leaving(self, frame: _Call, module: nn.Module, inputs: Inputs, output: Any) -> None:
        """Compare the tangents of a whole pass with the values: they are the same computation."""
        for tensor in tensors(output) if self._whole else ():
            if self.suspect is None and tensor.requires_grad:
                with torch._C.DisableTorchFunction():
                    value, tangent = forward_ad.unpack_dual(tensor)
                    missing = (value if tangent is None else value - tangent).detach().norm()
                    if not float(missing) <= layer_tolerance(value.dtype) * float(value.detach().norm()):
                        self.suspect = self._where()

    def _where(self) -> str:
        path, module, _ = self.stack[-1]
        return f"{path or 'the model'} ({type(module).__name__})"

    def _leaf(self, number: int, vectors: Tensor) -> Tensor:
        """Return tokens' vectors as a leaf of the graph; the host may write into the copy that it gets."""
        origin, axis = self._spec.sources[number].origin, -1
        if isinstance(origin, TokenCall):
            origin.require_same(vectors)
            axis = origin.axis
        # Ids may be looked up in another shape, and windows are sequences of the layers.
        by_token = vectors
        if isinstance(origin, TokenCall):
            by_token = as_tokens(vectors, axis=axis).reshape(*self._spec.sources[number].stream.shape, -1)
        self.leaves[number].append(by_token.detach().clone().requires_grad_())
        carried = self.leaves[number][-1].clone()
        if by_token is not vectors:
            windows = as_tokens(vectors, axis=axis).shape
            carried = in_shape(carried.reshape(windows), vectors.shape, axis)
        return forward_ad.make_dual(carried, vectors.detach().clone()) if self._whole else carried

    def _replaced(self, path: str, module: nn.Module, host: Forward) -> Forward | None:
        """Return the forward of a traced layer, or of a module with a plain form."""
        if module in self._queues:
            queue = self._queues[module]

            def forward(*args: Any, **kwargs: Any) -> Any:
                layer = queue.pop(0)
                if layer in self._without_operator:
                    return self._by_the_rules(layer, partial(host, *args, **kwargs))
                return self._mixer(layer, bound_arguments(module, args, kwargs))

            return forward
        form = plain_form_of(type(module))
        return None if form is None else partial(plain_output, self._where, module, form, host)

    def _mixer(self, layer: Layer, arguments: Mapping[str, Any]) -> Any:
        """Return a layer's result in the trace, with the tensors that depend on tokens in the graph."""
        self.streams.append(self._block_stream())
        returned = self._layer(layer, arguments)
        architecture = architecture_of(type(layer.module))
        if architecture is None or architecture.shared_values is None:
            return returned
        values = architecture.shared_values(layer.module, arguments)
        return mapped(returned, lambda t: values if t.shape == values.shape and not t.requires_grad else t)

    def _block_stream(self) -> Stream | None:
        """Return the stream that entered the outermost numbered block that runs."""
        numbered = (call.stream for call in self.stack if call.path.rpartition(".")[2].isdigit())
        return next((stream for stream in numbered if stream is not None), None)

    def _by_the_rules(self, layer: Layer, host: Callable[[], Any]) -> Any:
        """Run a layer of which later modules need more than its operator's output, by the rules of functions.

        Its weights are frozen, as those of an operator are.
        """
        self.streams.append(self._block_stream())
        returned = host()
        with torch._C.DisableTorchFunction():
            output = main_tensor(returned)
            assert output is not None
            self.mixed.append([])
            self.outputs.append(output)
        return returned

    def _layer(self, layer: Layer, arguments: Mapping[str, Any]) -> Any:
        """Return a layer's result in the trace, with its output in the graph."""
        mixed: list[GradientEdge] = []
        if self._spec.rule == "half":
            output, mixed = live_output(layer, arguments)
        with torch._C.DisableTorchFunction():
            if self._spec.rule == "freeze":
                output = frozen_output(layer, arguments)
            self.mixed.append(mixed)
            self.outputs.append(output)
            return mapped(layer.structure, lambda tensor: output if tensor is MAIN else tensor)

    def _marker(self) -> Callable[[Any, Any, Any], Any]:
        """Return the function that makes tokens' vectors carried, from a function, its arguments and its result."""
        marks = [self._mark_of(number, source) for number, source in enumerate(self._spec.sources)]

        def mark(func: Any, args: Any, result: Any) -> Any:
            for each in marks:
                marked = each(func, args, result)
                if marked is not result:
                    return marked
            return result

        return mark

    def _mark_of(self, number: int, source: Source) -> Callable[[Any, Any, Any], Any]:
        """Return the function that marks the vectors of one source."""
        ids = None if source.ids is None else TokenIds(self._spec.arguments[source.ids])
        is_source = source.origin.finder() if isinstance(source.origin, TokenCall) else lambda func, result: False

        def mark(func: Any, args: Any, result: Any) -> Any:
            if ids is None:
                return self._leaf(number, result) if is_source(func, result) else result
            if not ids.looks_up(func, args, result):
                return result
            return ids.as_looked_up(self._leaf(number, ids.by_token(result)), result.shape)

        return mark


def _tangent(tensor: Tensor) -> Tensor:
    """Return a tensor's tangent; a constant is a source, a carried tensor without a tangent has none."""
    if not tensor.is_floating_point():
        return tensor
    value, tangent = forward_ad.unpack_dual(tensor)
    if tangent is None:
        return torch.zeros_like(value) if tensor.requires_grad else value.detach()
    return tangent.detach().clone()
