"""Rules of functions that move elements, and of those that act on each element."""

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch.nn import functional

from unilinattn.errors import UncoveredError
from unilinattn.recording.compilation import Compilation, is_carried, rule
from unilinattn.recording.convolutions import windows
from unilinattn.recording.layout import Carried
from unilinattn.recording.nodes import Node, rank_of_product
from unilinattn.recording.regrouping import summed
from unilinattn.recording.values import depends_on_mixed, factor_values, is_weight
from unilinattn.rules.functions import GATE, GATED_CONSTANT, GATED_FACTOR, HOMOGENEOUS, MOVING, SAME, SLOPES
from unilinattn.rules.slopes import frozen_slope


@rule(*SAME)
def same(run: Compilation, node: Node, x: Any, *_: Any, **__: Any) -> Carried:
    """Return the argument: a cast, a copy, inactive dropout."""
    return run.value(x)


@rule(*MOVING)
def moved(run: Compilation, node: Node, x: Any, *args: Any, **kwargs: Any) -> Carried:
    """Apply a function that moves elements to their index."""
    carried = run.value(x)
    if node.name in ("view", "view_as", "reshape_as"):
        # The index may lie in memory in another order than the tensor.
        return carried.moved(carried.index.reshape(node.value.shape))
    if node.name == "as_strided" and not x.value.is_contiguous():
        raise UncoveredError(f"{node.name!r} reads windows of values that depend on the tokens")
    if node.func is functional.unfold:
        return windows(carried, *args, **kwargs)
    arguments = tuple(run.number(value) for value in args)
    index = node.func(carried.index, *arguments, **{name: run.number(value) for name, value in kwargs.items()})
    return carried.moved(index if node.item is None else index[node.item])


@rule("tril", "triu")
def triangle(run: Compilation, node: Node, x: Any, *args: Any, **kwargs: Any) -> Carried:
    """Multiply by the triangle of ones."""
    return run.scaled(run.value(x), node.func(torch.ones_like(x.value), *args, **kwargs), "gate")


@rule(*HOMOGENEOUS, *SLOPES)
def slope(run: Compilation, node: Node, x: Any, *args: Any, **kwargs: Any) -> Carried:
    """Multiply by the frozen slope of a function of one value, and add f(0)."""
    arguments = tuple(run.number(value) for value in args)
    named = {name: run.number(value) for name, value in kwargs.items()}
    factor, level = frozen_slope(node.name, lambda p: node.func(p, *arguments, **named), x.value.detach())
    return run.shifted(run.scaled(run.value(x), factor, "act"), level)


@rule("pow", "square")
def power(run: Compilation, node: Node, x: Any, exponent: Any = 2) -> Carried:
    """Multiply by the frozen power that is one lower."""
    if not isinstance(exponent, (int, float)) or exponent < 1 or not is_carried(x):
        raise UncoveredError(f"values that depend on the tokens are raised to {exponent!r}")
    return run.scaled(run.value(x), x.value.detach() ** (exponent - 1), "act")


@rule("neg", "negative")
def negative(run: Compilation, node: Node, x: Any) -> Carried:
    """Multiply by -1."""
    return run.scaled(run.value(x), -1.0, "skip")


@rule("add")
def add(run: Compilation, node: Node, x: Any, other: Any, *, alpha: int | float = 1) -> Carried:
    """Add two carried tensors, or a constant."""
    return _sum(run, node, (x, 1), (other, alpha))


@rule("sub", "subtract")
def subtract(run: Compilation, node: Node, x: Any, other: Any, *, alpha: int | float = 1) -> Carried:
    """Subtract a carried tensor or a constant."""
    return _sum(run, node, (x, 1), (other, -alpha))


@rule("rsub")
def subtract_from(run: Compilation, node: Node, x: Any, other: Any, *, alpha: int | float = 1) -> Carried:
    """Subtract from a carried tensor or a constant."""
    return _sum(run, node, (other, 1), (x, -alpha))


@rule("lerp")
def interpolate(run: Compilation, node: Node, x: Any, end: Any, weight: Any) -> Carried:
    """Add two tensors with frozen weights, of which one may be constant."""
    weight = run.exact(weight)
    terms = [(x, 1 - weight), (end, weight)]
    carried = [run.scaled(run.value(value), factor, "gate") for value, factor in terms if is_carried(value)]
    if not carried:
        return run.value(x)
    total = carried[0] if len(carried) == 1 else summed(*carried)
    for value, factor in terms:
        if not is_carried(value):
            total = run.shifted(total, value if isinstance(value, Node) else run.exact(value) * factor)
    return total


@rule("mul", "multiply")
def multiply(run: Compilation, node: Node, x: Any, other: Any) -> Carried:
    """Multiply by a frozen factor: of two carried operands one that is no value, or by halves (see `factor_values`)."""
    if x is other:
        return run.scaled(run.value(x), x.value.detach(), "gate")
    if not (is_carried(x) and is_carried(other)):
        value, factor = (x, other) if is_carried(x) else (other, x)
        # Frozen results, such as those of a softmax, depend on tokens too.
        of_value = isinstance(factor, Node) and depends_on_mixed(factor, value)
        return run.scaled(run.value(value), factor, "gate", of_value=of_value, weighs=is_weight(factor, value))
    nodes = (x, other)
    numbers, operands = run.values(node, dict(enumerate(nodes)), ((), ()), factor_values)
    if len(numbers) > 1:
        halves = (run.scaled(run.value(nodes[n]), nodes[1 - n].value.detach() / 2, "gate") for n in numbers)
        return reduce(summed, halves)
    value, gate = nodes[numbers[0]], nodes[1 - numbers[0]]
    # A key is no gate that shares the relevance of its value.
    factor = gate.value.detach() if operands[1 - numbers[0]].is_key else gate
    of_mixed, weighs = depends_on_mixed(gate, value), is_weight(gate, value)
    return run.scaled(run.value(value), factor, "gate", of_value=of_mixed, weighs=weighs)


@rule("addcmul")
def add_product(run: Compilation, node: Node, x: Any, one: Any, two: Any, *, value: int | float = 1) -> Carried:
    """Add a product to a carried tensor or a constant."""
    is_constant = not is_carried(one) and not is_carried(two)
    rank = rank_of_product([one, two])
    if not is_constant and _is_value(x) and rank == GATED_FACTOR:
        raise UncoveredError("a gate times a factor that depends on the tokens is added to their values")
    if is_constant or (_is_value(x) and rank == GATED_CONSTANT):
        return _sum(run, node, (x, 1), (run.number(one) * run.number(two), value))
    total = multiply(run, node, one, two)
    total = total if value == 1 else run.scaled(total, float(value), "skip")
    if not is_carried(x):
        return run.shifted(total, x)
    term = run.value(x)
    return summed(total.moved(total.index.expand(node.value.shape)), term.moved(term.index.expand(node.value.shape)))


@rule("div", "divide", "true_divide")
def divide(run: Compilation, node: Node, x: Any, other: Any, *, rounding_mode: str | None = None) -> Carried:
    """Divide by a frozen number."""
    if rounding_mode is not None:
        raise UncoveredError("a quotient of values that depend on the tokens is rounded")
    of_value = isinstance(other, Node) and depends_on_mixed(other, x)
    return run.scaled(run.value(x), 1 / run.exact(other), "gate", of_value=of_value, weighs=is_weight(other, x))


@rule("masked_fill")
def masked_fill(run: Compilation, node: Node, x: Any, mask: Any, value: Any) -> Carried:
    """Multiply by the frozen mask; the masked elements become a constant."""
    mask = run.number(mask)
    carried = run.scaled(run.value(x), ~mask, "gate")
    return run.shifted(carried, value if isinstance(value, Node) else mask * run.exact(value))


@rule("where")
def where(run: Compilation, node: Node, mask: Any, x: Any, other: Any) -> Carried:
    """Add both choices, each times the frozen mask of its elements."""
    mask = run.number(mask)
    terms: list[Carried] = []
    constants: list[Any] = []
    for value, selected in ((x, mask), (other, ~mask)):
        if _is_gated_constant(value, (x, other)):
            constants.append(value if value.rank == GATED_FACTOR else selected * run.number(value))
        elif is_carried(value):
            term = run.value(value)
            terms.append(run.scaled(term.moved(term.index.expand(node.value.shape)), selected, "gate"))
        else:
            constants.append(value if isinstance(value, Node) else selected * run.exact(value))
    total = terms[0] if len(terms) == 1 else summed(*terms)
    return run.shifted(total, constants[0]) if constants else total


@rule("glu")
def glu(run: Compilation, node: Node, x: Any, dim: int = -1) -> Carried:
    """Multiply one half by the frozen gate of the other."""
    carried = run.value(x)
    gate = torch.sigmoid(x.value.detach().chunk(2, dim)[1])
    return run.scaled(carried.moved(carried.index.chunk(2, dim)[0]), gate, "gate")


def _sum(run: Compilation, node: Node, *terms: tuple[Any, int | float]) -> Carried:
    """Add carried tensors and constants, each times a number."""
    carried: list[Carried] = []
    constants: list[Any] = []
    for value, factor in terms:
        if _is_gated_constant(value, [value for value, _ in terms]):
            constants.append(value if value.rank == GATED_FACTOR else run.number(value) * factor)
        elif is_carried(value):
            term = run.value(value) if factor == 1 else run.scaled(run.value(value), float(factor), "skip")
            carried.append(term.moved(term.index.expand(node.value.shape)))
        else:
            constants.append(value if isinstance(value, Node) else value * factor)
    total = carried[0] if len(carried) == 1 else summed(*carried)
    return run.shifted(total, constants[0]) if constants else total


def _is_value(x: Any) -> bool:
    """Tell whether an argument is carried, and no gate."""
    return is_carried(x) and x.rank < GATE


def _is_gated_constant(x: Any, terms: Iterable[Any]) -> bool:
    """Tell whether a term is a gate times a constant beside values, as a decay times a learned first state is.

    It is the constant that the frozen gate leaves, or a factor, which may not be added. Alone, the activation is the
    only path of its tokens.
    """
    return is_carried(x) and x.rank >= GATED_CONSTANT and any(map(_is_value, terms))
