"""`Views`: the tensors of a recording that share memory, so that a write into one of them changes the others."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Key = tuple[int | slice, ...]
"""The slices and numbers by which a view reads a tensor."""


class Views:
    """Tensors by the memory that they share, and the number of writes into it that each of them has followed.

    The base of a memory is a contiguous tensor of all of it.
    """

    def __init__(self) -> None:
        # The tensors are kept, so that the number of a storage names no other one.
        self._tensors: dict[int, dict[int, Tensor]] = {}
        self._writes: dict[int, int] = {}
        self._followed: dict[int, int] = {}

    def enter(self, tensor: Tensor) -> None:
        """Add a tensor, which is up to date."""
        if (memory := _memory(tensor)) is not None:
            self._tensors.setdefault(memory, {})[id(tensor)] = tensor
            self._followed[id(tensor)] = self._writes.get(memory, 0)

    def sharing(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of its memory, itself included."""
        memory = _memory(tensor)
        return [tensor] if memory is None else list({**self._tensors.get(memory, {}), id(tensor): tensor}.values())

    def write(self, tensor: Tensor) -> None:
        """Count a write by a tensor into the memory of several; the others have not followed it."""
        memory = _memory(tensor)
        if memory is not None and len(self._tensors.get(memory, ())) > 1:
            self._writes[memory] = self._writes.get(memory, 0) + 1
            self.enter(tensor)

    def is_stale(self, tensor: Tensor) -> bool:
        """Tell whether another tensor has written into the memory of a tensor since it was last up to date."""
        if not self._writes or id(tensor) not in self._followed:
            return False
        memory = _memory(tensor)
        return memory is not None and self._followed[id(tensor)] < self._writes.get(memory, 0)

    def base(self, tensor: Tensor) -> Tensor | None:
        """Return the base of a tensor's memory, the first of several; None if it is unknown."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        for other in self.sharing(tensor):
            if other.dtype == tensor.dtype and other.is_contiguous() and other.numel() == size:
                return other
        return None

    def dense(self, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
        """Return a tensor of all of a memory and the order of its axes in which it is the base; None without one."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        for other in self.sharing(tensor):
            order = tuple(sorted(range(other.ndim), key=lambda axis: -other.stride()[axis]))
            if other.dtype == tensor.dtype and other.numel() == size and other.permute(order).is_contiguous():
                return other, order
        return None


def _memory(tensor: Tensor) -> int | None:
    """Return the number of a tensor's storage, None without one and for complex numbers, whose parts are recorded."""
    if tensor.is_complex() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    with suppress(NotImplementedError, RuntimeError):
        return int(tensor.untyped_storage()._cdata)
    return None


@dataclass(frozen=True)
class Slice:
    """A view as slices of its base: `base.reshape(shape)[key]` has its elements, with its axes in another order.

    Attributes:
        shape: that of the base with some of its axes split.
        key: slices and numbers, an entry for each axis of `shape`.
        order: the axes of the view in the order of the slices; those of one element come last.
    """

    shape: tuple[int, ...]
    key: Key
    order: tuple[int, ...]

    def read(self, base: Tensor) -> Tensor:
        """Return the elements of the view in the order of the base."""
        return base.reshape(self.shape)[self.key]


def slice_of(view: Tensor, base: Tensor) -> Slice | None:
    """Return a view as slices of its base, None for one that has other elements, such as a diagonal.

    In rows of 6 numbers, a view of 3 columns with stride 2 is a slice of (row, 3, 2): a stride of the view that divides
    one of the base, and is divided by the next, splits an axis.
    """
    if 0 in base.shape or 0 in view.shape:
        return None
    strides = {1, *torch.empty(base.shape, device="meta").stride()}
    for stride, size in zip(view.stride(), view.shape, strict=True):
        if size > 1 and stride and _is_chain(strides | {stride}):
            strides.add(stride)
    ordered = sorted(strides, reverse=True)
    shape = tuple(above // stride for above, stride in zip((base.numel(), *ordered), ordered, strict=False))
    order = tuple(sorted(range(view.ndim), key=lambda axis: (view.shape[axis] == 1, -view.stride()[axis])))
    key: list[int | slice] = []
    offset, axes = int(view.storage_offset()), [axis for axis in order if view.shape[axis] > 1]
    for size, stride in zip(shape, ordered, strict=True):
        start, offset = divmod(offset, stride)
        last = (view.shape[axes[0]] - 1) * view.stride(axes[0]) if axes else 0
        if axes and last and view.stride(axes[0]) % stride == 0 and start + last // stride < size:
            key.append(slice(start, start + last // stride + 1, view.stride(axes.pop(0)) // stride))
        else:
            key.append(start)
    part = Slice(shape, tuple(key), order)
    return part if same_elements(part.read(base), view.permute(order).squeeze()) else None


def _is_chain(strides: Collection[int]) -> bool:
    """Tell whether each stride is a multiple of the next smaller one."""
    ordered = sorted(strides)
    return all(above % stride == 0 for stride, above in pairwise(ordered))


def same_elements(view: Tensor, other: Any) -> bool:
    """Tell whether two tensors are the same elements of one memory."""
    if not isinstance(other, Tensor) or _memory(view) is None or _memory(view) != _memory(other):
        return False
    return all(read(view) == read(other) for read in (Tensor.size, Tensor.stride, Tensor.storage_offset))


def elements_of(view: Tensor) -> Tensor:
    """Return the number in its base of each element of a view."""
    elements = torch.full((), int(view.storage_offset()), device=view.device)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        elements = elements[..., None] + torch.arange(size, device=view.device) * stride
    return elements


def constants_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments of a node."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from constants_in(entry)
    elif isinstance(value, dict):
        yield from constants_in(list(value.values()))


def with_copy(value: Any, tensor: Tensor, copy: Tensor) -> Any:
    """Return nested arguments of a node with a copy in place of a tensor."""
    if isinstance(value, Tensor):
        return copy if value is tensor else value
    if isinstance(value, dict):
        return {name: with_copy(entry, tensor, copy) for name, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(with_copy(entry, tensor, copy) for entry in value)
    return value
