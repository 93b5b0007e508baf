"""Checks of the heads, rows and tensors that a user passes to an operator."""

from collections.abc import Callable, Mapping, Sequence
from operator import index as as_int
from typing import Any, Literal, SupportsIndex

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.kernels.exponents import scaled_product, signed_root, times_power_of_two

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda m: m.mean(1),
    "max": lambda m: m.amax(1),
    "min": lambda m: m.amin(1),
    "abs-mean": lambda m: m.abs().mean(1),
    "product": lambda m: times_power_of_two(*scaled_product(m)),
    "geometric-mean": lambda m: signed_root(scaled_product(m), m.shape[1]),
}
"""Reductions over heads (HMA ACL Tables 5 and 9).

The geometric mean is the root of the product's size, with the product's sign; unlike the product it stays in range.
"""

PRODUCTS = ("product", "geometric-mean")
"""Reductions that multiply heads, by fractions and exponents."""

JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "abs-mean": torch.add,
}
"""The reduction over two sets of heads, from that of each; means are weighted by the number of heads beforehand."""

Reduction = Literal["mean", "max", "min", "abs-mean", "product", "geometric-mean"]

Heads = Reduction | SupportsIndex | slice | Sequence[SupportsIndex] | None
"""A reduction over heads, one head, or several heads; None for all."""

CheckedHeads = str | int | slice | list[int] | None
"""The result of `checked_heads`."""

Rows = int | Sequence[int] | Int[Tensor, "..."]
"""A position, several of them, or (batch, row) positions of each sequence."""


def checked_heads(heads: Any, total: int) -> CheckedHeads:
    """Return `heads` with Python integers; raise `OptionError` for an unknown reduction or heads out of range."""
    if heads is None or isinstance(heads, slice):
        return heads
    if isinstance(heads, str):
        if heads not in REDUCTIONS:
            raise OptionError(f"unknown reduction over heads {heads!r}" + nearest(heads, REDUCTIONS))
        return heads
    several = heads.ndim > 0 if isinstance(heads, Tensor | np.ndarray) else isinstance(heads, Sequence)
    try:
        indices = [as_int(head) for head in (heads if several else (heads,)) if not _is_bool(head)]
    except TypeError:
        indices = []
    if not indices or len(indices) != (len(heads) if several else 1):
        raise OptionError(
            f"heads={heads!r} names no heads; give an int, a list of ints, a slice, None for all, or a reduction: "
            f"{', '.join(REDUCTIONS)}."
        )
    if any(not -total <= head < total for head in indices):
        raise OptionError(f"heads {indices} are out of range: this scope has {total} heads, 0 to {total - 1}.")
    return indices if several else indices[0]


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) or (isinstance(value, Tensor) and value.dtype == torch.bool)


def chosen_heads(heads: int | slice | Sequence[int] | None, total: int) -> list[int]:
    """Return the selected heads as non-negative integers."""
    if heads is None or isinstance(heads, slice):
        return list(range(total)[slice(None) if heads is None else heads])
    return [head % total for head in ([heads] if isinstance(heads, int) else heads)]


def head_axis(heads: CheckedHeads, total: int) -> tuple[int, ...]:
    """Return the shape of the head axis: (count,) for several heads, () for one head or a reduction."""
    return () if isinstance(heads, str | int) else (len(chosen_heads(heads, total)),)


def checked_rows(index: Rows, like: Tensor, name: str) -> tuple[Int[Tensor, "batch row"], bool]:
    """Return positions per sequence as non-negative integers, and whether `index` is a single position.

    `like` is the output (batch, query, channel) of the operator `name`. Raises `InputError` if `index` has other values
    than integers in range.
    """
    batch, length = like.shape[:2]
    try:
        positions = torch.as_tensor(list(index) if isinstance(index, range) else index, device=like.device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"positions are integers or (batch, row) integers, got {index!r}.") from None
    if positions.is_floating_point() or positions.dtype == torch.bool or positions.ndim > 2:
        raise InputError(
            f"positions are integers or (batch, row) integers, got {positions.dtype} of {tuple(positions.shape)}."
        )
    if positions.numel() and not (-length <= int(positions.min()) and int(positions.max()) < length):
        raise InputError(f"position {positions.tolist()} is out of range: {name} has {length} output positions.")
    positions = positions % length
    if positions.ndim == 2 and positions.shape[0] != batch:
        raise InputError(f"(batch, row) positions need one row a sequence: got {positions.shape[0]}, batch is {batch}.")
    by_sequence = positions if positions.ndim == 2 else positions.reshape(1, -1)
    return by_sequence.expand(batch, -1), positions.ndim == 0


def as_slice(index: Int[Tensor, "batch row"]) -> slice | None:
    """Return the positions as a slice if they are consecutive and equal for all sequences; a block is cheaper."""
    first, count = int(index[0, 0]), index.shape[1]
    consecutive = torch.arange(first, first + count, device=index.device)
    return slice(first, first + count) if count > 1 and bool((index == consecutive).all()) else None


def checked_inputs(name: str, x: Tensor | Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the input of each port; a tensor is the input of the only port.

    Raises `InputError` if the ports, shapes or devices of `expected`, the frozen inputs of the operator `name`, differ.
    """
    inputs = dict(x) if isinstance(x, Mapping) else {next(iter(expected)): x}
    if inputs.keys() != expected.keys():
        raise InputError(f"{name} reads the ports {list(expected)}, got {list(inputs)}; give each one once.")
    for port, tensor in inputs.items():
        check_input(name, f"port {port!r}", tensor, expected[port])
    return inputs


def check_input(name: str, subject: str, tensor: Tensor, expected: Tensor) -> None:
    """Raise `InputError` unless `tensor`, an input of the operator `name`, has the type, shape and device expected."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} takes a tensor for {subject}, got {type(tensor).__name__}.")
    if tensor.shape != expected.shape:
        raise InputError(
            f"{name} was frozen on shape {tuple(expected.shape)} for {subject}, got {tuple(tensor.shape)}; "
            "an operator applies to that shape only. Trace again for other inputs."
        )
    if tensor.device != expected.device:
        raise InputError(f"{name} is on {expected.device}, got {subject} on {tensor.device}; move it there.")
