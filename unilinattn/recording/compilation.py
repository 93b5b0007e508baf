"""`Compilation`: the stages that compute a recorded tensor from a module's inputs, read from its functions."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from unilinattn.call.functions import meaning_of
from unilinattn.errors import UncoveredError
from unilinattn.operator.stages import Branch, Chain, Scale, run_adjoint
from unilinattn.recording.keys import Keys
from unilinattn.recording.layout import Carried, whole
from unilinattn.recording.nodes import Node, Position, nodes_in, without_constants
from unilinattn.recording.values import Operand, Token, Told
from unilinattn.rules.functions import FACTORS, RECURRENT
from unilinattn.rules.mixing_functions import MixingFunction

Rule = Callable[..., Carried]
"""Returns the stages of a function's result: `rule(compilation, node, *args, **kwargs)` with its arguments."""

MOST = 512
"""Largest number of stages, counted wherever they recur: each state of a loop contains the stages of earlier ones."""

MIXING = "a mixing function"
"""The name of the rule of all mixing functions."""

_rules: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of the functions with these names."""

    def decorate(function: Rule) -> Rule:
        _rules.update(dict.fromkeys(names, function))
        return function

    return decorate


class LongError(UncoveredError):
    """A tensor takes too many stages."""


@dataclass(eq=False)
class Joins:
    """How entries that are joined along an axis of neither tokens nor channels are read.

    Attributes:
        counts: the numbers of tokens of the inputs and of the output, times that of sequences.
        by_count: whether entries are tokens if they are as many as one of these, rather than by their axis.
        are_doubtful: whether the two readings differ.
    """

    counts: set[int]
    by_count: bool
    are_doubtful: bool = False

    def are_tokens(self, count: int, *, usual: bool) -> bool:
        """Tell whether `count` joined entries are tokens; `usual` says that tokens usually stand along their axis."""
        self.are_doubtful |= usual != (count in self.counts)
        return count in self.counts if self.by_count else usual


@dataclass(frozen=True, eq=False)
class NodeCore:
    """A part of a module that is one core of stages.

    Attributes:
        entered, left: the tensors that enter and leave it.
        after: returns the stages of the latter from those of the former.
    """

    entered: Node
    left: Node
    after: Callable[[Carried], Carried]


class Compilation:
    """The stages of the tensors of one recorded run, each compiled when it is first asked for.

    Args:
        like: a tensor of the operator's dtype and device.
        axis: the axis of channels of the inputs.
        transposed: whether inputs are (token, batch, channel).
        keys: the operands that later functions tell, by the position of the calls.
        decided: the values of products, by the position of their calls.
        joins: how joins are read.
        core: the part of the module that is one core, with the tensors that enter and leave it.

    Attributes:
        like: a tensor without elements of the operator's dtype and device.
        choices: the first and the last choice of the values of other products.
    """

    def __init__(
        self,
        like: Tensor,
        axis: int,
        *,
        transposed: bool,
        keys: Keys,
        decided: Mapping[Position, list[int]],
        joins: Joins,
        core: NodeCore | None = None,
    ) -> None:
        self.like, self._axis, self._transposed = like.new_empty(0), axis, transposed
        self._decided = decided
        self._told = Told(keys)
        self.joins, self._core = joins, core
        self.choices: dict[Position, tuple[list[int], list[int]]] = {}
        self._values: dict[int, Carried] = {}
        self._counts: dict[Branch, int] = {}

    def value(self, node: Any) -> Carried:
        """Return the stages of a carried tensor; raise `UncoveredError` with the reason if it has none."""
        if not is_carried(node):
            raise UncoveredError(_not_carried(node))
        if id(node) not in self._values:
            carried = self._values[id(node)] = self._compiled(node)
            if node.name == "input":
                self.joins.counts.add(carried.shape[0] * carried.shape[1])
            if self.stages(carried) > MOST:
                raise LongError(f"it takes more than {MOST} stages, as a loop over tokens does")
        return self._values[id(node)]

    def stages(self, carried: Carried) -> int:
        """Return the number of stages of a carried tensor, counted wherever they recur."""
        return sum(map(self._count, carried.chains.values()))

    def _count(self, chain: Chain) -> int:
        """Return the number of stages of a chain, those inside of branches too."""
        total = 0
        for stage in chain:
            if isinstance(stage, Branch):
                if stage not in self._counts:
                    self._counts[stage] = 1 + sum(map(self._count, stage.chains))
                total += self._counts[stage]
            else:
                total += 1
        return total

    def _compiled(self, node: Node) -> Carried:
        if node.name == "input":
            return self._input(node)
        if self._core is not None and node is self._core.left:
            return self._core.after(self.value(self._core.entered))
        if node.refusal is not None:
            raise UncoveredError(f"the call of {node.name!r} is not covered: {node.refusal}")
        if node.name in RECURRENT:
            raise UncoveredError(
                "its state passes a nonlinearity at every step, so it is no linear map of its tokens and has no "
                "operator"
            )
        name = MIXING if isinstance(meaning_of(node.func), MixingFunction) else node.name
        if name not in _rules:
            raise UncoveredError(f"{node.name!r} is applied to values that depend on the tokens, and has no rule")
        return _rules[name](self, node, *without_constants(node.args), **without_constants(node.kwargs))

    def _input(self, node: Node) -> Carried:
        x = node.value
        if self._transposed:
            shape = x.shape[1], x.shape[0], x.shape[2]
            return Carried({node.port: ()}, shape, whole(shape, x).transpose(0, 1), self.like)
        if self._axis == 1:
            shape = x.shape[0], x.shape[2:].numel(), x.shape[1]
            return Carried({node.port: ()}, shape, whole(shape, x).transpose(1, 2).reshape(x.shape), self.like)
        # Middle axes number the tokens: (batch, row, column, channel) has rows times columns of them.
        shape = (1, *x.shape) if x.ndim == 2 else (x.shape[0], x.shape[1:-1].numel(), x.shape[-1])
        return Carried({node.port: ()}, shape, whole(shape, x).view(x.shape), self.like)

    def number(self, value: Any) -> Any:
        """Return the value of a node, a copy of a constant tensor, or another value unchanged."""
        if isinstance(value, Node):
            return value.value.detach()
        if isinstance(value, (list, tuple)):
            return type(value)(self.number(entry) for entry in value)
        # Later changes of the model's weights do not reach the operator.
        return value.detach().clone() if isinstance(value, Tensor) else value

    def weight(self, value: Any) -> Any:
        """Return the value of a node, or a parameter itself, which a matrix may be a view of (see `chains.stored`)."""
        return value.detach() if isinstance(value, nn.Parameter) else self.number(value)

    def exact(self, value: Any) -> Tensor:
        """Return the value of a constant in the operator's precision, to which torch casts no number and no mask."""
        number = self.number(value)
        is_complex = number.is_complex() if isinstance(number, Tensor) else isinstance(number, complex)
        dtype = self.like.dtype.to_complex() if is_complex else self.like.dtype
        return torch.as_tensor(number, dtype=dtype, device=self.like.device)

    def values(
        self,
        product: Node,
        terms: Mapping[int, Node],
        summed: Sequence[tuple[int, ...]],
        choose: Callable[[Sequence[Operand]], list[int]],
    ) -> tuple[list[int], list[Operand]]:
        """Return which carried operands of a product may be its value (see `values`), by number, and all of them.

        The terms are by number, each with the axes over which it is summed.
        """
        # A product before this one tells whether its result has numbers of pairs of tokens.
        for term in terms.values():
            with suppress(UncoveredError):
                self.value(term)
        plain = {n: Operand(x.rank, x.value.detach(), summed[n], partial(self._tokens, x)) for n, x in terms.items()}
        operands = self._told.operands(plain, product.position)
        decided = self._decided.get(product.position, [])
        if decided and set(decided) <= terms.keys():
            return decided, operands
        numbers = [list(terms)[index] for index in choose(operands)]
        first, _ = self.choices.setdefault(product.position, (numbers, numbers))
        self.choices[product.position] = first, numbers
        return numbers, operands

    def _tokens(self, node: Node, element: int) -> frozenset[Token]:
        """Return the tokens that an element of a carried tensor comes from.

        An operand whose functions have no rule may be the value too, so the error of its rule is raised.
        """
        carried = self.value(node)
        position = int(carried.index.flatten()[element])
        unit = self.like.new_zeros(carried.shape)
        unit.view(-1)[max(position, 0)] = float(position >= 0)
        # Gates in the graph of a run have tangents.
        with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
            adjoints = {port: run_adjoint(chain, unit) for port, chain in carried.chains.items()}
        images = ((port, adjoint.abs().sum(2).nonzero()) for port, adjoint in adjoints.items())
        return frozenset((port, *token) for port, image in images for token in image.tolist())

    def scaled(
        self,
        carried: Carried,
        factor: Any,
        role: str,
        *,
        of_value: bool = True,
        norm_of: int | None = None,
        weighs: bool = False,
    ) -> Carried:
        """Multiply a carried tensor by a frozen factor, which may depend on it, broadcast to its shape.

        `of_value`, `norm_of` and `weighs` are those of `Scale`. In a run whose graph is kept, a gate is in the graph
        (see `_is_live`).
        """
        value = factor.value if role == "gate" and _is_live(factor, carried) else self.number(factor)
        factor = torch.as_tensor(value, dtype=self.like.dtype, device=self.like.device)
        carried = _broadcast(carried, factor)
        return carried.same_elements(Scale(role, carried.layout.factor(factor), None, of_value, norm_of, weighs))

    def shifted(self, carried: Carried, constant: Any) -> Carried:
        """Add a constant that is broadcast to a carried tensor's shape.

        Raises `UncoveredError` for a tensor that depends on the tokens, which would be hidden in a bias; zeros, such as
        a gate times a first state, hide nothing.
        """
        if isinstance(constant, Node) and not bool(constant.value.any()):
            constant = torch.zeros_like(constant.value)
        if isinstance(constant, Node):
            raise UncoveredError(f"the output of {constant.name!r} depends on the tokens and is added to their values")
        constant = torch.as_tensor(constant, dtype=self.like.dtype, device=self.like.device).detach()
        carried = _broadcast(carried, constant)
        if not bool(constant.any()):
            return carried
        bias = carried.layout.factor(constant)
        bias = bias.repeat_interleave(carried.shape[2] // bias.shape[2], 2)
        by_token = not torch.equal(bias, bias[:1, :1].expand_as(bias))
        ones = self.like.new_ones(1, 1, 1)
        return carried.same_elements(Scale("skip", ones, bias if by_token else bias[0, 0].clone()))


def _is_live(factor: Any, carried: Carried) -> bool:
    """Tell whether a factor shares the relevance of its product by the half rule, as in `Freezing`.

    An activation with f(0) != 0, such as a sigmoid, is frozen, and so is a factor of several channels.
    """
    return isinstance(factor, Node) and factor.rank < 2 and factor.value.numel() == carried.index.numel()


def _not_carried(value: Any) -> str:
    """Return why a factor, or a constant, is no value of the tokens, by the function that made it one."""
    if not isinstance(value, Node):
        return "a constant takes the place of values of the tokens"
    origin = value
    while origin.name not in FACTORS and (nodes := list(nodes_in((origin.args, origin.kwargs)))):
        # Of weights and values the values come last.
        origin = nodes[-1]
    if origin.name == "attribute":
        return (
            "its values come neither from its arguments nor from functions of torch, but from NumPy or an attribute, "
            "such as one that an earlier layer wrote; hand them on as an argument"
        )
    if origin.name == "argument":
        return "its values are an argument that is no stream of tokens"
    if origin.name in FACTORS:
        return f"its values pass {origin.name!r}, whose output is frozen"
    return f"the output of {value.name!r} takes the place of values of the tokens"


def is_carried(value: Any) -> bool:
    """Tell whether an argument is a tensor that is linear in the inputs once all factors are frozen."""
    return isinstance(value, Node) and value.kind == "carried"


def _broadcast(carried: Carried, factor: Tensor) -> Carried:
    """Return a tensor in the shape of its product with a factor, whose elements are all of a value's."""
    shape = torch.broadcast_shapes(factor.shape, carried.index.shape)
    carried = carried.moved(carried.index.expand(shape))
    return carried if carried.layout.is_whole else carried.in_place()
