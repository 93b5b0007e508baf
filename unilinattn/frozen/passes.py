"""`FrozenPass`: one pass of a host with frozen factors, which keeps its graph."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge

from unilinattn.call.exactness import layer_tolerance
from unilinattn.call.nested import mapped, tensors
from unilinattn.errors import UncoveredError
from unilinattn.frozen.chosen import ChosenValues, ChosenValuesWithGamma, choices_in
from unilinattn.frozen.layers import frozen_output, live_output, with_shared_values, without_operator
from unilinattn.frozen.modules import plain_output
from unilinattn.frozen.shares import Stream
from unilinattn.frozen.token_pass import BlockCall, PassSpec, TokenPass
from unilinattn.host.forwards import Forward, replaced_forwards
from unilinattn.host.inputs import bound_arguments
from unilinattn.host.observer import Inputs
from unilinattn.host.recomputation import captures
from unilinattn.host.recorder import MAIN, main_tensor
from unilinattn.host.run import run
from unilinattn.recording.keys import called
from unilinattn.registry import UNREGISTERED, plain_form_of
from unilinattn.rules.forms import memory_of
from unilinattn.tracing.layer import Layer


class Rule(NamedTuple):
    """How a product shares its relevance.

    Attributes:
        half: whether two factors of different rank share it (see `Freezing`); by default the activated one is frozen.
        gamma: by how much products that have the sign of their sum count more, in the linear layers and convolutions of
            blocks (see `rules.gamma`).
        edges: whether a half rule keeps the edges of the graph after the cores of layers without gates too.
    """

    half: bool = False
    gamma: float = 0.0
    edges: bool = False


FREEZE, HALF, HALF_WITH_EDGES = Rule(), Rule(half=True), Rule(half=True, edges=True)


class FrozenPass(TokenPass):
    """One pass of a host as an affine map of its tokens.

    Args:
        spec: the model and its arguments.
        rule: how products share relevance.
        whole: whether tangents are those of all parts of a value, those from tokens too.
        records_sources: whether the constants that are added to the tokens become leaves of the graph.

    Attributes:
        output: the output.
        tangents: the tangents of its tensors: the parts of them that come from constants.
        outputs: the layers' outputs.
        mixed: the edges of the graph after each layer's cores, by a half rule (see `live_output`).
        streams: the stream that enters each layer's numbered block, None without one.
        last_stream: the stream after the last sum, None if the layers are not all added to one.
        sources: the constants with the path of the module that added them.
        origins: for each tensor of the output the function that made it a frozen factor, None for others.
        shared: names of functions that multiplied two factors of equal rank, each of which got half.
        suspect: the first module whose output has other tangents than values; for a `whole` pass.

    Raises `UncoveredError` for a function without a rule or without a forward-mode derivative.
    """

    def __init__(
        self, spec: PassSpec, *, rule: Rule = FREEZE, whole: bool = False, records_sources: bool = False
    ) -> None:
        """Run the host."""
        super().__init__(spec)
        self._rule, self._whole, self._records_sources = rule, whole, records_sources
        self.outputs: list[Tensor] = []
        self.mixed: list[list[GradientEdge]] = []
        self.streams: list[Stream | None] = []
        self.last_stream: Stream | None = None
        self.sources: list[tuple[str, Tensor]] = []
        self.shared: frozenset[str] = frozenset()
        self.suspect: str | None = None
        self.origins: list[str | None] = []
        self._without_operator = without_operator(spec.layers)
        recorded = (layer for layer in self._without_operator if layer.architecture == UNREGISTERED)
        self._choices = {layer: choices_in(layer) for layer in recorded}
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
        arguments, record = self.arguments(), self._record if self._records_sources else None
        with self._freezing(record) as mode:
            self._mode, mode.memory = mode, memory_of(self.model)
            try:
                output = self.call_host(arguments)
            except NotImplementedError as error:
                if isinstance(error, UncoveredError):
                    raise
                raise UncoveredError(
                    f"{self.where()} computes in a function without a forward-mode derivative, such as a "
                    "fused kernel, so the part of its biases in the output is unknown. Use the module's "
                    "plain code, or give it one (`register_plain_form`)."
                ) from error
        del self._mode  # Through its cycle with the pass, the graph would outlive both.
        self.shared = frozenset(mode.shared)
        if mode.last_sum is not None and mode.in_stream(mode.last_sum):
            self.last_stream = Stream(mode.last_sum, forward_ad.unpack_dual(mode.last_sum).tangent)
        self.origins = list(map(mode.origin, tensors(output)))
        tangents = mapped(output, _tangent)
        # A view of a parameter requires a gradient again after the run.
        values = mapped(output, lambda t: forward_ad.unpack_dual(t).primal if t.requires_grad else t.detach())
        return values, tangents

    def _freezing(self, record: Callable[[Tensor], None] | None) -> ChosenValues:
        where, mark, rule = self.where, self.marker(), self._rule
        if not rule.gamma:
            return ChosenValues(where, mark, half=rule.half, record=record)
        return ChosenValuesWithGamma(rule.gamma, self._in_block, where, mark, record=record)

    def _in_block(self) -> bool:
        """Tell whether a block runs; the head is outside of all of them, and has the plain rule in MambaLRP too."""
        return self._block_stream() is not None

    def entered(self, stream: Stream) -> None:
        """Mark the stream, to which layers are added."""
        self._mode.enter_stream(stream.value)

    def leaf(self, number: int, vectors: Tensor) -> Tensor:
        """Return tokens' vectors as a leaf of the graph, with all of them as the tangent in a whole pass."""
        carried = super().leaf(number, vectors)
        return forward_ad.make_dual(carried, vectors.detach().clone()) if self._whole else carried

    def leaving(self, frame: BlockCall, module: nn.Module, inputs: Inputs, output: Any) -> None:
        """Compare the tangents of a whole pass with the values: they are the same computation."""
        for tensor in tensors(output) if self._whole else ():
            if self.suspect is None and tensor.requires_grad:
                with torch._C.DisableTorchFunction():
                    value, tangent = forward_ad.unpack_dual(tensor)
                    missing = (value if tangent is None else value - tangent).detach().norm()
                    if not float(missing) <= layer_tolerance(value.dtype) * float(value.detach().norm()):
                        self.suspect = self.where()

    def _replaced(self, path: str, module: nn.Module, host: Forward) -> Forward | None:
        """Return the forward of a traced layer, or of a module with a plain form."""
        if module in self._queues:
            queue = self._queues[module]

            def forward(*args: Any, **kwargs: Any) -> Any:
                layer = queue.pop(0)
                if layer in self._without_operator:
                    return self._by_the_rules(layer, host, args, kwargs)
                return self._mixer(layer, bound_arguments(module, args, kwargs))

            return forward
        form = plain_form_of(type(module))
        if form is not None:
            return partial(plain_output, self.where, module, form, host)
        # A whole pass follows every function, the constants of a bias are sources, and the gamma rule reads weights.
        is_followed = self._whole or self._records_sources or self._rule.gamma
        return None if is_followed else self.known_product(module, host)

    def _mixer(self, layer: Layer, arguments: Mapping[str, Any]) -> Any:
        """Return a layer's result in the trace, with the tensors that depend on tokens in the graph."""
        self.streams.append(self._block_stream())
        return with_shared_values(layer, arguments, self._layer(layer, arguments))

    def _block_stream(self) -> Stream | None:
        """Return the stream that entered the outermost numbered block that runs."""
        numbered = (call.stream for call in self.stack if call.path.rpartition(".")[2].isdigit())
        return next((stream for stream in numbered if stream is not None), None)

    def _by_the_rules(self, layer: Layer, host: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer of which later modules need more than its operator's output, by the rules of functions.

        Its weights are frozen, as those of an operator are. The output of a recorded layer is its operator's, and what
        else it returns has the values of products that the operator has.
        """
        self.streams.append(self._block_stream())
        if layer.architecture == UNREGISTERED:
            with self._mode.choosing(self._choices[layer]):
                returned = called(host, args, kwargs)
            main, output = main_tensor(returned), self._output(layer, bound_arguments(layer.module, args, kwargs))
            return mapped(returned, lambda tensor: output if tensor is main else tensor)
        returned = host(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            main = main_tensor(returned)
            assert main is not None
            self.mixed.append([])
            self.outputs.append(main)
        return returned

    def _layer(self, layer: Layer, arguments: Mapping[str, Any]) -> Any:
        """Return a layer's result in the trace, with its output in the graph."""
        output = self._output(layer, arguments)
        with torch._C.DisableTorchFunction():
            return mapped(layer.structure, lambda tensor: output if tensor is MAIN else tensor)

    def _output(self, layer: Layer, arguments: Mapping[str, Any]) -> Tensor:
        mixed: list[GradientEdge] = []
        if self._rule.half:
            output, mixed = live_output(layer, arguments, self._rule.gamma, edges=self._rule.edges)
        with torch._C.DisableTorchFunction():
            if not self._rule.half:
                output = frozen_output(layer, arguments)
            self.mixed.append(mixed)
            self.outputs.append(output)
        return output


def _tangent(tensor: Tensor) -> Tensor:
    """Return a tensor's tangent; a constant is a source, a carried tensor without a tangent has none."""
    if not tensor.is_floating_point():
        return tensor
    value, tangent = forward_ad.unpack_dual(tensor)
    if tangent is None:
        return torch.zeros_like(value) if tensor.requires_grad else value.detach()
    return tangent.detach().clone()
