"""Selection of heads and of rows: what users may name, as Python's own integers or one tensor of positions."""

from collections.abc import Callable, Sequence
from operator import index as as_int
from typing import Any, Literal, SupportsIndex

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from unilinattn.errors import InputError, OptionError, nearest

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda m: m.mean(1),
    "max": lambda m: m.amax(1),
    "min": lambda m: m.amin(1),
    "abs-mean": lambda m: m.abs().mean(1),
    "product": lambda m: m.prod(1),
}
"""Ways to put the heads of one row into one number (HMA ACL Tables 5 and 9)."""

JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "abs-mean": torch.add,
    "product": torch.mul,
}
"""From the reductions of two sets of heads to that of both; means are weighted by their shares of the heads first."""

Reduction = Literal["mean", "max", "min", "abs-mean", "product"]

Heads = Reduction | SupportsIndex | slice | Sequence[SupportsIndex] | None
"""A reduction over heads, one head, or several of them; None for all."""

Checked = str | int | slice | Sequence[int] | None
"""The same as `checked_heads` returns it."""

Rows = int | Sequence[int] | Int[Tensor, "..."]
"""A position, several of them, or (batch, row) positions of each sequence."""


def is_mean(heads: object) -> bool:
    """Tell whether heads are reduced to their mean, for which structures have forms of their own."""
    return isinstance(heads, str) and heads == "mean"


def count_heads(heads: Any, total: int) -> int:
    """Return how many of the heads are selected."""
    return len(chosen_heads(heads, total))


def checked_heads(heads: Any, total: int) -> Checked:
    """Return heads as ints of Python; refuse an unknown reduction and heads that do not exist."""
    if heads is None or isinstance(heads, slice):
        return heads
    if isinstance(heads, str):
        if heads not in REDUCTIONS:
            raise OptionError(f"unknown reduction over heads {heads!r}" + nearest(heads, REDUCTIONS))
        return heads
    several = heads.ndim > 0 if isinstance(heads, Tensor | np.ndarray) else isinstance(heads, Sequence)
    try:
        wanted = [as_int(head) for head in (heads if several else (heads,)) if not _is_bool(head)]
    except TypeError:
        wanted = []
    if not wanted or len(wanted) != (len(heads) if several else 1):
        raise OptionError(
            f"heads={heads!r} names no heads; give an int, a list of ints, a slice, None for all, or a reduction: "
            f"{', '.join(REDUCTIONS)}."
        )
    if any(not -total <= head < total for head in wanted):
        raise OptionError(f"heads {wanted} are out of range: this scope has {total} heads, 0 to {total - 1}.")
    return wanted if several else wanted[0]


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) or (isinstance(value, Tensor) and value.dtype == torch.bool)


def chosen_heads(heads: int | slice | Sequence[int] | None, total: int) -> list[int]:
    """Return the selected heads, counted from the first."""
    if heads is None or isinstance(heads, slice):
        return list(range(total)[slice(None) if heads is None else heads])
    return [head % total for head in ([heads] if isinstance(heads, int) else heads)]


def checked_rows(index: Rows, like: Tensor, name: str) -> tuple[Int[Tensor, "batch row"], bool]:
    """Return positions of each sequence, counted from the first, and whether one position was given.

    `like` is the output (batch, query, channel) of the operator `name`. Raises `InputError` for anything else than
    integers in range.
    """
    batch, length = like.shape[:2]
    try:
        chosen = torch.as_tensor(list(index) if isinstance(index, range) else index, device=like.device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"positions are integers or (batch, row) integers, got {index!r}.") from None
    if chosen.is_floating_point() or chosen.dtype == torch.bool or chosen.ndim > 2:
        raise InputError(
            f"positions are integers or (batch, row) integers, got {chosen.dtype} of {tuple(chosen.shape)}."
        )
    if chosen.numel() and not (-length <= int(chosen.min()) and int(chosen.max()) < length):
        raise InputError(f"position {chosen.tolist()} is out of range: {name} has {length} output positions.")
    chosen = chosen % length
    single = chosen.ndim == 0
    if chosen.ndim == 2 and chosen.shape[0] != batch:
        raise InputError(f"(batch, row) positions need one row a sequence: got {chosen.shape[0]}, batch is {batch}.")
    return (chosen if chosen.ndim == 2 else chosen.reshape(1, -1)).expand(batch, -1), single


def as_slice(index: Int[Tensor, "batch row"]) -> slice | None:
    """Return the rows as a slice if they are consecutive and the same in every sequence: a block costs less."""
    first, count = int(index[0, 0]), index.shape[1]
    wanted = torch.arange(first, first + count, device=index.device)
    return slice(first, first + count) if count > 1 and bool((index == wanted).all()) else None
