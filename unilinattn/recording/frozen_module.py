"""`FrozenModule`: a module whose functions are no stages, such as a long loop over tokens, as one exact stage.

The module's code runs once by the rules of `freezing`, which keep its graph. The stage's map is the derivative of that
graph, and its bias the part of the output that comes from constants.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from unilinattn.call.exactness import layer_tolerance, relative_error
from unilinattn.call.nested import mapped, tensors
from unilinattn.call.parameters import constant_parameters
from unilinattn.errors import UncoveredError
from unilinattn.operator.stages import WHOLE, Chain, Stage
from unilinattn.recording.inner_core import Made, Node
from unilinattn.recording.keys import Keys, position
from unilinattn.recording.nodes import ATTENTION, GATED, OF_ONE_VALUE, SUMS, Position, is_zero
from unilinattn.recording.values import Operand, Token, Told, factor_values, summed_axes, values
from unilinattn.rules.composed import Compositions
from unilinattn.rules.forms import FORMS, carried, memory_of
from unilinattn.rules.freezing import Freezing
from unilinattn.rules.functions import (
    AFFINE,
    GATE,
    GATED_CONSTANT,
    GATED_FACTOR,
    LINEAR,
    PRODUCTS,
    SOLVING,
    rank_of_sum,
    sums_channels,
)

REPEATED = 3
"""Number of equal choices of the value at one call in a loop after which only every power of two of them is made."""


@dataclass(frozen=True, eq=False)
class FrozenModule(Stage):
    """A frozen module as a whole, which mixes tokens and channels in one step.

    `apply` and `adjoint` take one pass through the graph for each column. The graph, of the size that a training step
    keeps, lives as long as the stage.

    Attributes:
        source: the vectors of a port, the leaf of the graph, (batch, key, in).
        result: the module's output with its graph, (batch, query, out).
        reason: why the module has no other stages.
        bias: the part of the output that comes from constants, (batch, query, out).
    """

    source: Float[Tensor, "batch key in"]
    result: Float[Tensor, "batch query out"]
    reason: str
    bias: Float[Tensor, "batch query out"] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenModule":
        """Return the stage itself: a graph has no copies, and does not change."""
        return self

    @property
    def mixes(self) -> bool:
        """Always true."""
        return True

    def apply(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Map the tokens by the derivative in forward direction."""
        direction, gradient = self._pulled
        output = _derivative(gradient, direction, x)
        if not bias or self.bias is None:
            return output
        return output + self.bias.reshape(*self.bias.shape, *[1] * (x.ndim - 3))

    def adjoint(self, g: Tensor) -> Tensor:
        """Map the outputs back by the derivative in backward direction."""
        return _derivative(self.result, self.source, g)

    @cached_property
    def _pulled(self) -> tuple[Tensor, Tensor]:
        """A vector at the output and the gradient that it gives, whose derivative is the map in forward direction."""
        direction = torch.zeros_like(self.result, requires_grad=True)
        try:
            (gradient,) = torch.autograd.grad(self.result, self.source, direction, create_graph=True)
        except RuntimeError as error:
            raise UncoveredError(f"one of its functions has no second derivative ({error})") from error
        return direction, gradient


def frozen_module(
    module: nn.Module,
    inputs: Mapping[str, Float[Tensor, "batch key in"]],
    compute: Callable[[Mapping[str, Tensor]], Tensor | None],
    factors: Any,
    masks: Any,
    reason: str,
    keys: Keys,
) -> tuple[Mapping[str, Chain], Made]:
    """Return a module's stage from each input that its output depends on, and the tensors of its graph with tokens.

    Args:
        module: the module.
        inputs: the vectors of each port.
        compute: runs the module on other vectors of the ports, and returns its output (batch, query, out).
        factors: further tensors that may depend on tokens.
        masks: further tensors that depend on no token, such as padding masks.
        reason: why the module has no other stages.
        keys: the operands of products that later functions tell, by the position of the calls.

    Raises `UncoveredError` for a function without a rule or without a derivative, for a map that mixes the sequences of
    a batch, and for one whose output is another than the module's.
    """
    sources = {port: x.detach().clone().requires_grad_() for port, x in inputs.items()}
    with constant_parameters(module), torch.enable_grad(), forward_ad.dual_level():
        freezing = _LayerFreezing(module, tuple(sources.values()), factors, masks, keys, {})
        with freezing:
            output = compute({port: source.clone() for port, source in sources.items()})
        # The first step of a loop has no state yet, and its products are those of the last one.
        if decided := {call: last for call, (first, last) in freezing.choices.items() if first != last}:
            freezing = _LayerFreezing(module, tuple(sources.values()), factors, masks, keys, decided)
            with freezing:
                output = compute({port: source.clone() for port, source in sources.items()})
        if output is None or not output.requires_grad:
            raise UncoveredError("its output does not depend on its inputs")
        result, tangent = forward_ad.unpack_dual(output)
        bias = None if tangent is None or not bool(tangent.any()) else tangent.detach().clone()
    probe = torch.zeros_like(result)
    gradients = torch.autograd.grad(result, tuple(sources.values()), probe, retain_graph=True, allow_unused=True)
    chains: dict[str, Chain] = {}
    for (port, source), gradient in zip(sources.items(), gradients, strict=True):
        if gradient is not None:
            stage = FrozenModule(WHOLE, source, result, reason, None if chains else bias)
            _require_separate_sequences(stage)
            chains[port] = (stage,)
    image = sum(chain[0].apply(inputs[port]) for port, chain in chains.items())
    if not relative_error(torch.as_tensor(image, device=result.device), result.detach()) <= layer_tolerance(
        result.dtype
    ):
        raise UncoveredError("its derivative and its constants do not give its output")
    return chains, freezing.made


def _require_separate_sequences(stage: FrozenModule) -> None:
    """Raise `UncoveredError` if a sequence of the output depends on another one of the input.

    With each sequence times another number, a map of single sequences gives its output times that number.
    """
    x = stage.source.detach()
    number = torch.linspace(0.5, 1, len(x), dtype=x.dtype, device=x.device).view(-1, 1, 1)
    scaled, plain = stage.apply(x * number, bias=False), stage.apply(x, bias=False) * number
    if not float((scaled - plain).norm()) <= layer_tolerance(x.dtype) * float(plain.norm()):
        raise UncoveredError("it mixes the sequences of a batch")


_Call = tuple[Callable[[Sequence[Operand]], list[int]], Position]
"""The rule that chooses the values of a product, and where the code calls it."""


class _LayerFreezing(Freezing):
    """Freezes the factors that `recording` freezes: of each product with two carried operands all but one.

    Args:
        module: the module, whose parameters and buffers are constants.
        sources: the leaves of the graph.
        factors, masks: tensors that may depend on tokens, and tensors that do not.
        keys: the operands of products that later functions tell, by the position of the calls.
        decided: the values of products, by the rule and the position of the calls.
    """

    def __init__(
        self,
        module: nn.Module,
        sources: tuple[Tensor, ...],
        factors: Any,
        masks: Any,
        keys: Keys,
        decided: Mapping[_Call, list[int]],
    ) -> None:
        super().__init__(lambda: type(module).__name__, lambda func, args, result: result)
        self._sources, self._decided = sources, decided
        self._told = Told(keys)
        # The graph of a recording has no functions that are composed of others.
        self._composed = Compositions(())
        # The first and the last choice of the values of a product.
        self.choices: dict[_Call, tuple[list[int], list[int]]] = {}
        self.memory = memory_of(module)
        # Those of operands of the same ranks: how often, the last choice, and how often in a row.
        self._choices: dict[object, tuple[int, list[int], int]] = {}
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._sizes = {(source.shape[0], source.shape[1]) for source in sources}
        self.made: dict[tuple[Node, int], tuple[Tensor, Tensor | None]] = {}
        # Sums of several tokens, such as their mean.
        self._several: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for tensor in (*module.parameters(), *module.buffers(), *tensors(masks)):
            self._made[tensor] = True
        for tensor in tensors(factors):
            self._factors[tensor] = "argument"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count tensors as factors that neither the module has nor a function made; they may depend on tokens."""
        for tensor in tensors((args, kwargs or {})):
            if not (tensor.requires_grad or tensor in self._made or tensor in self._factors or is_zero(tensor)):
                self._factors[tensor] = "attribute"
        result = super().__torch_function__(func, types, args, kwargs)
        for tensor in tensors(result):
            self._made[tensor] = True
        for tensor in tensors(args[0] if func is Tensor.__setitem__ else result):
            if tensor.requires_grad and self._has_tokens(tensor):
                self._note(tensor)
        return result

    def _has_tokens(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is (batch, ..., token, ...)."""
        of_tokens = any(tensor.shape[:1] == (batch,) and length in tensor.shape[1:] for batch, length in self._sizes)
        return of_tokens and not tensor.is_complex()

    def _note(self, tensor: Tensor) -> None:
        """Store a tensor by its place in the graph; a later write makes it another one."""
        with torch._C.DisableTorchFunction():
            edge, dual = get_gradient_edge(tensor), forward_ad.unpack_dual(tensor)
            level = None if dual.tangent is None else dual.tangent.detach()
            self.made[edge.node, edge.output_nr] = dual.primal.detach(), level

    def _apply(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = self._without_gated_constants(args) if name in (*SUMS, "where") else args
        operands = list(tensors((args, kwargs)))
        rank = rank_of_sum(self.rank(tensor) for tensor in operands if tensor.requires_grad)
        result = super()._apply(name, func, args, kwargs)
        constant = [tensor for tensor in operands if not tensor.requires_grad]
        weighs = name in PRODUCTS and any(tensor in self._factors or is_zero(tensor) for tensor in constant)
        if weighs or name == ATTENTION or name in SOLVING:
            # A sum over tokens with weights that depend on them activates none of its values.
            rank = 0
        elif name in PRODUCTS and len(operands) > len(constant) + 1:
            rank = min(rank, GATED)
        is_linear = name in PRODUCTS or name in AFFINE or name in FORMS
        in_token = name in OF_ONE_VALUE or sums_channels(name, args, carried)
        several = any(x in self._several for x in operands) if in_token else is_linear or name in LINEAR
        if several:
            for tensor in tensors(result):
                self._several[tensor] = True
        # A sum over tokens of activations plus a constant is no activation.
        return self.ranked(result, rank) if is_linear or (several and name in SUMS) else result

    def _without_gated_constants(self, terms: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the terms of a sum; beside values a gate times a constant is the constant that it leaves."""
        ranks = {n: self.rank(x) for n, x in enumerate(terms) if isinstance(x, Tensor) and x.requires_grad}
        if min(ranks.values(), default=0) >= GATE:
            return terms
        frozen = {n: terms[n].detach() for n, rank in ranks.items() if rank >= GATED_CONSTANT}
        for n, factor in frozen.items():
            if ranks[n] == GATED_FACTOR:
                self._factors[factor] = "a gate times a factor"
        return tuple(frozen.get(n, x) for n, x in enumerate(terms))

    def _bilinear(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        operands = list(tensors((args, kwargs)))
        numbers = [n for n, tensor in enumerate(operands) if tensor.requires_grad]
        if len(numbers) > 1:
            # Of a layer and its weights the input is the value.
            axes = summed_axes(func.__name__.strip("_"), args, [tensor.shape for tensor in operands])
            terms = {n: operands[n] for n in numbers}
            live = operands[numbers[0] if name == "linear" else self._values(values, terms, axes)[-1]]
            args, kwargs = _mapped_except(live, args), _mapped_except(live, kwargs)
        result = super()._bilinear(name, func, args, kwargs)
        # Times a first state of zeros it is zero, and no path to the tokens.
        is_nothing = any(not x.requires_grad and is_zero(x) for x in operands)
        return result.detach() if is_nothing else result

    def _product(self, name: str, func: Callable[..., Tensor], x: Any, other: Any) -> Tensor:
        if not (carried(x) and carried(other)):
            result = super()._product(name, func, x, other)
            constants = [factor for factor in (x, other) if isinstance(factor, Tensor) and not carried(factor)]
            if any(map(is_zero, constants)):
                return result.detach()
            if self.rank(result) >= GATE and any(factor.ndim for factor in constants):
                depends = any(self._factors.get(factor) == "argument" for factor in constants)
                self.ranked(result, GATED_FACTOR if depends else GATED_CONSTANT)
            return result
        if x is other:
            return super()._product(name, func, x, other)
        numbers = self._values(factor_values, {0: x, 1: other}, ((), ()))
        if len(numbers) > 1:
            return super()._product(name, func, x, other)
        live, frozen = (other, x) if numbers[0] else (x, other)
        ranks = self.rank(x), self.rank(other)
        rank = GATE if min(ranks) >= GATE else min(max(ranks), GATED)
        rank = self.rank(live) if live.numel() > frozen.numel() else rank
        return self.ranked(super()._product(name, func, live, frozen.detach()), rank)

    def _values(
        self,
        choose: Callable[[Sequence[Operand]], list[int]],
        terms: Mapping[int, Tensor],
        summed: Sequence[tuple[int, ...]],
    ) -> list[int]:
        """Return which of the carried operands of a product, by their numbers, may be its value.

        A loop over tokens calls one product at each step, and a choice takes passes back through all earlier steps.
        """
        at = position()
        decided = self._decided.get((choose, at), [])
        if decided and set(decided) <= terms.keys():
            return decided
        plain = {n: Operand(self.rank(x), _primal(x), summed[n], partial(self._tokens, x)) for n, x in terms.items()}
        operands = self._told.operands(plain, at)
        call = choose, tuple((x.rank, len(x.shape), x.summed) for x in operands), at
        count, numbers, repeated = self._choices.get(call, (0, [], 0))
        if repeated < REPEATED or count.bit_count() == 1:
            before, numbers = numbers, [list(terms)[index] for index in choose(operands)]
            repeated = repeated + 1 if numbers == before else 1
        self._choices[call] = count + 1, numbers, repeated
        first, _ = self.choices.setdefault((choose, at), (numbers, numbers))
        self.choices[choose, at] = first, numbers
        return numbers

    def _tokens(self, tensor: Tensor, element: int) -> frozenset[Token]:
        """Return the tokens that an element of a carried tensor comes from."""
        with torch._C.DisableTorchFunction():
            value = forward_ad.unpack_dual(tensor).primal.flatten()[element]
            value = torch.view_as_real(value).sum() if value.is_complex() else value
            gradients = torch.autograd.grad(value, self._sources, retain_graph=True, allow_unused=True)
        images = ((str(n), g.abs().sum(2).nonzero()) for n, g in enumerate(gradients) if g is not None)
        return frozenset((port, *token) for port, image in images for token in image.tolist())


def _primal(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return forward_ad.unpack_dual(x).primal.detach()


def _mapped_except(live: Tensor, value: Any) -> Any:
    return mapped(value, lambda tensor: tensor if tensor is live else tensor.detach())


def _derivative(output: Tensor, point: Tensor, vectors: Tensor) -> Tensor:
    """Return the derivative of an output with respect to a point, in the directions (batch, length, channel, *columns).

    Each column takes a pass: in a batched one, every token that a loop reads would be written for all columns at once
    into zeros of the size of the whole tensor, which takes longer from a hundred tokens on.
    """
    is_live = torch.is_grad_enabled() and vectors.requires_grad
    products = [
        torch.autograd.grad(output, point, column, retain_graph=True, create_graph=is_live)[0]
        for column in vectors.reshape(*vectors.shape[:3], -1).unbind(3)
    ]
    return torch.stack(products, 3).reshape(*point.shape, *vectors.shape[3:])
