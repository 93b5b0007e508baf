"""`Node`: a tensor of a recording, with the function that made it, and its rank by those before it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from unilinattn.rules.functions import (
    COMPARING,
    GATE,
    GATED_CONSTANT,
    GATED_FACTOR,
    HOMOGENEOUS,
    LIMITS,
    MOVING,
    PRODUCTS,
    SAME,
    SLOPES,
    SOLVING,
    rank_of_sum,
    sums_channels,
)

Position = tuple[tuple[object, int], ...]
"""The calls of a module's code that are active, each with the number of its instruction."""

Kind = Literal["carried", "factor"]
"""Whether a tensor may be linear in the inputs, or depends on them in another way and is frozen."""

LEVELS = ("sigmoid", "hardsigmoid", "log_sigmoid", "logsigmoid")
"""Activations with f(0) != 0."""

MASK = "mask"
"""The name of an argument that is a function of a padding mask."""

GATED = 0.5
"""The rank of a product of a value and a gate: between a linear value and an activation."""

SUMS = ("add", "sub", "subtract", "rsub")

OF_ONE_VALUE = SAME | MOVING | {*SUMS, "mul", "multiply", "div", "divide", "true_divide", "neg", "negative"}
"""Functions each number of whose result is one number of a tensor, perhaps times or plus a constant."""

ATTENTION = "scaled_dot_product_attention"
"""The name of torch's function of attention."""

TERMS: Mapping[str, Callable[..., Any]] = {
    "mul": lambda x, other: [(x, other)],
    "multiply": lambda x, other: [(x, other)],
    "addcmul": lambda x, first, other: [(x,), (first, other)],
    "lerp": lambda x, end, weight=None: [(x, weight), (end, weight)],
}
"""The factors of each term of a function's result."""


@dataclass(eq=False)
class Node:
    """A tensor that depends on a module's inputs: the function that made it, and its arguments.

    Attributes:
        name: the function's name; "input" for an input of the module, `MASK` for a mask among its arguments.
        func: the function, without its in-place form.
        args, kwargs: its arguments, with nodes in place of the tensors that have one.
        value: the tensor.
        kind: "factor" if the function's result is frozen.
        rank: 0 for a tensor that is linear in the inputs, `GATED` for a gated one, 1 after an activation, `GATE` after
            one with f(0) != 0, `GATED_CONSTANT` for a constant times such a gate, and `GATED_FACTOR` for a factor.
        item: the number of the tensor in the function's result, None if it is the result.
        port: name of the input.
        refusal: the reason for which a call of a mixing function has no stages, None if it has.
        position: where the module's code calls a product of several carried tensors, empty for other functions.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Tensor
    kind: Kind
    rank: int | float = 0
    item: int | None = None
    port: str = ""
    refusal: str | None = None
    position: Position = ()

    @cached_property
    def is_constant(self) -> bool:
        """Whether the tensor is made of padding masks and constants alone, so that it hides nothing of the tokens."""
        if self.kind == "carried" or self.name == MASK:
            return self.name == MASK
        nodes = list(nodes_in((self.args, self.kwargs)))
        return bool(nodes) and all(node.is_constant for node in nodes)

    def __repr__(self) -> str:
        """Show the function and the shape."""
        return f"{self.name}{tuple(self.value.shape)}"


def is_zero(tensor: Tensor) -> bool:
    """Tell whether all numbers are zero; those that are unknown, inside of `vmap` or without data, may be others."""
    is_unknown = tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not is_unknown and not bool(tensor.any())


def nodes_in(value: Any) -> Iterator[Node]:
    """Yield the nodes in nested arguments."""
    return (entry for entry in _entries(value) if isinstance(entry, Node))


def without_constants(value: Any) -> Any:
    """Return nested arguments with the values of constants (see `Node.is_constant`) in place of their nodes."""
    if isinstance(value, Node):
        return value.value.detach() if value.is_constant else value
    if type(value) in (tuple, list):
        return type(value)(map(without_constants, value))
    return {key: without_constants(item) for key, item in value.items()} if isinstance(value, dict) else value


def _entries(value: Any) -> Iterator[Any]:
    """Yield the objects in nested tuples, lists and mappings."""
    if isinstance(value, (tuple, list)):
        for entry in value:
            yield from _entries(entry)
    elif isinstance(value, Mapping):
        yield from _entries(list(value.values()))
    else:
        yield value


def kind_of(nodes: list[Node]) -> Kind:
    """Return the kind of a function's result, by the nodes among its arguments."""
    return "carried" if any(node.kind == "carried" for node in nodes) else "factor"


def _adds_zero(args: tuple[Any, ...]) -> bool:
    """Tell whether the constants among the arguments are zero, such as a first state."""
    return all(isinstance(x, Node) or (isinstance(x, Tensor) and is_zero(x)) for x in args)


def rank_of(name: str, nodes: list[Node], args: tuple[Any, ...]) -> int | float:
    """Return the rank of a function's result (see `Node.rank`)."""
    ranks = [node.rank for node in nodes if node.kind == "carried"]
    rank = rank_of_sum(ranks)
    if name in HOMOGENEOUS:
        return max(rank, 1)
    if name in SLOPES:
        return GATE if name in LEVELS else max(rank, int(name not in LIMITS))
    if name in ("add", "sub", "rsub") and len(nodes) == 1 and _is_activation(nodes[0]) and not _adds_zero(args):
        # An activation plus a constant, such as 1 + tanh, is one with f(0) != 0.
        return GATE
    if name in ("where", "masked_fill"):
        mask = args[name == "masked_fill"] if len(args) > 1 else None
        return max(rank, int(any(node.kind == "carried" and is_mask_of(mask, node.value) for node in nodes)))
    if name in TERMS:
        terms = [[x for x in factors if x is not None] for factors in TERMS[name](*args)]
        return rank_of_sum(map(rank_of_product, filter(_carries, terms)))
    if name == ATTENTION or name in SOLVING or (name in PRODUCTS and len(ranks) < len(nodes)):
        # A sum over tokens with weights that depend on them activates none of its values.
        return 0
    if name not in PRODUCTS:
        return rank
    if len(nodes) == 1:
        # A first state of zeros stays zero.
        return 0 if any(isinstance(x, Tensor) and is_zero(x) for x in _entries(args)) else rank
    return min(rank, GATED)


def is_mask_of(mask: Any, value: Tensor) -> bool:
    """Tell whether a factor is a mask that a comparison of values made for each entry of a tensor."""
    while isinstance(mask, Node) and mask.name in SAME:
        mask = next(nodes_in((mask.args, mask.kwargs)), None)
    return isinstance(mask, Node) and mask.name in COMPARING and mask.value.numel() == value.numel()


def _is_argument(node: Node) -> bool:
    """Tell whether a factor is an argument of the module, such as a state or the values of another layer."""
    while node.name in OF_ONE_VALUE:
        nodes = list(nodes_in((node.args, node.kwargs)))
        if len(nodes) != 1:
            return False
        (node,) = nodes
    return node.name == "argument"


def _carries(factors: list[Any]) -> bool:
    return any(isinstance(x, Node) and x.kind == "carried" for x in factors)


def rank_of_product(factors: list[Any]) -> int | float:
    """Return the rank of a product of one or two factors, 0 if none is carried."""
    carried = [x for x in factors if isinstance(x, Node) and x.kind == "carried"]
    ranks = [node.rank for node in carried]
    if not carried:
        return 0
    if len(carried) == 1:
        constants = [x for x in factors if isinstance(x, Tensor)]
        if any(map(is_zero, constants)):
            # A first state of zeros stays zero.
            return 0
        if ranks[0] < GATE:
            return max(ranks[0], int(any(is_mask_of(x, carried[0].value) for x in factors)))
        if any(isinstance(x, Node) and x.kind == "factor" and _is_argument(x) for x in factors):
            return GATED_FACTOR
        return GATED_CONSTANT if any(x.ndim for x in constants) else ranks[0]
    sizes = [node.value.numel() for node in carried]
    larger = ranks[sizes[0] < sizes[1]]
    if sizes[0] != sizes[1] and not larger >= GATE > min(ranks):
        # A factor for many channels, such as a rate of writing, is no activation of each.
        return larger
    # A product with a gate, such as x sigmoid(x), is zero at zero again.
    return GATE if min(ranks) >= GATE else min(max(ranks), GATED)


def _is_activation(node: Node) -> bool:
    """Tell whether a token has activations of one value each, perhaps times constants, and no sum over tokens."""
    while node.name not in SLOPES | HOMOGENEOUS:
        nodes = list(nodes_in((node.args, node.kwargs)))
        if len(nodes) != 1 or node.kind != "carried":
            return False
        if node.name not in OF_ONE_VALUE and not sums_channels(node.name, node.args, lambda x: isinstance(x, Node)):
            return False
        (node,) = nodes
    return node.name not in LIMITS
