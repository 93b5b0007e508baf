"""Products of tensors with one letter for each axis, so that `matmul` and `einsum` are the same thing."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from unilinattn.call.nested import tensors
from unilinattn.errors import UncoveredError
from unilinattn.rules.functions import GATE

Letters = tuple[int, ...]


def equation_letters(equation: str, shapes: Sequence[torch.Size]) -> tuple[list[Letters], Letters]:
    """Return the letters of the operands and of the result of an einsum."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        # The letters that occur once, in alphabetical order.
        names = inputs.replace(",", "").replace("...", "")
        output = "..." * ("..." in inputs) + "".join(sorted(x for x in names if names.count(x) == 1))
    dots = [len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes, strict=True)]
    return [_letters(term, dot) for term, dot in zip(terms, dots, strict=True)], _letters(output, max(dots))


def _letters(term: str, dots: int) -> Letters:
    """Return the letters of a term of an einsum, whose dots stand for some axes."""
    before, ellipsis, after = term.partition("...")
    # Axes behind the dots are aligned at their ends.
    batch = tuple(range(-dots, 0)) if ellipsis else ()
    letters = (*map(ord, before), *batch, *map(ord, after))
    if len(set(letters)) < len(letters):
        raise UncoveredError("einsum with a diagonal")
    return letters


def matmul_letters(first: int, second: int) -> tuple[Letters, Letters, Letters]:
    """Return the letters of `matmul` of operands with these numbers of axes, and of its result."""
    row, inner, column = 1, 2, 3
    left = (inner,) if first == 1 else (*range(2 - first, 0), row, inner)
    right = (inner,) if second == 1 else (*range(2 - second, 0), inner, column)
    batch = range(2 - max(first, second, 2), 0)
    return left, right, (*batch, *([] if first == 1 else [row]), *([] if second == 1 else [column]))


def wide_letters(func: Any, args: Sequence[Any]) -> list[frozenset[int]] | None:
    """Return the letters of each operand of a product, without those of a single row; None for other functions.

    Of weights (batch, length, 1, expert) times values (batch, length, expert, channel) the former lack channels. A
    product of two matrices has all letters, however many rows there are: one text may be compared with several images.
    """
    name, operands = func.__name__.strip("_"), list(tensors(args))
    if name == "einsum" and isinstance(args[0], str):
        # An equation with a diagonal has no such letters.
        with suppress(UncoveredError):
            return list(map(frozenset, equation_letters(args[0], [x.shape for x in operands])[0]))
    if name not in ("matmul", "mm", "bmm", "mv") or len(operands) != 2:
        return None
    left, right, _ = matmul_letters(*(x.ndim for x in operands))
    if operands[0].ndim > 2 and operands[0].shape[-2] == 1:
        left = (*left[:-2], left[-1])
    if operands[1].ndim > 2 and operands[1].shape[-1] == 1:
        right = right[:-1]
    return [frozenset(left), frozenset(right)]


def value_among(ranks: Sequence[int | float], letters: Sequence[frozenset[int]] | None, *, half: bool) -> int | None:
    """Return the number of the carried operand of a product that is its value, None if the operands share it.

    It is the one that has all axes of the other, if this is an activation: its numbers are then factors of channels, as
    the weights of experts are. Vectors that are compared with several others are no activations. Of two with the same
    axes the less activated one is the value; `half` shares them unless one is a gate with f(0) != 0.
    """
    if letters is None or not len(letters) == len(ranks) == 2:
        return None
    if letters[0] != letters[1]:
        larger = next((n for n in range(2) if letters[n] > letters[1 - n]), None)
        return None if larger is None or ranks[1 - larger] < max(1, ranks[larger]) else larger
    is_shared = ranks[0] == ranks[1] or (half and max(ranks) < GATE)
    return None if is_shared else int(ranks[0] > ranks[1])
