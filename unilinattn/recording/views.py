"""`Views`: the tensors of a recording that share memory, so that a write into one of them changes the others."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

Key = tuple[int | slice, ...]
"""The slices and numbers by which a view reads its base."""


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


def _memory(tensor: Tensor) -> int | None:
    """Return the number of a tensor's storage, None without one and for complex numbers, whose parts are recorded."""
    if tensor.is_complex() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    with suppress(NotImplementedError, RuntimeError):
        return int(tensor.untyped_storage()._cdata)
    return None


def key_of(view: Tensor, base: Tensor) -> Key | None:
    """Return the key with `base[key]` equal to a view in its memory, None for other views than slices."""
    offset, axis, key = int(view.storage_offset()), 0, list[int | slice]()
    if 0 in base.stride():
        return None
    sizes, strides = list(view.shape), list(view.stride())
    for size, stride in zip(base.shape, base.stride(), strict=True):
        start, offset = divmod(offset, stride)
        step = strides[axis] // stride if axis < len(strides) and strides[axis] % stride == 0 else 0
        if axis < len(sizes) and step and start + (sizes[axis] - 1) * step < size:
            key.append(slice(start, start + (sizes[axis] - 1) * step + 1, step))
            axis += 1
        else:
            key.append(start)
    if not key or not same_elements(base[tuple(key)], view):
        return None
    return tuple(key)


def same_elements(view: Tensor, other: Any) -> bool:
    """Tell whether two tensors are the same elements of one memory."""
    if not isinstance(other, Tensor) or _memory(view) is None or _memory(view) != _memory(other):
        return False
    return all(read(view) == read(other) for read in (Tensor.size, Tensor.stride, Tensor.storage_offset))


def order_in(view: Tensor, base: Tensor) -> Tensor | None:
    """Return the number of the view's element at each element of its base, None unless it has all of them once."""
    if view.numel() != base.numel():
        return None
    elements = elements_of(view).flatten()
    order = elements.argsort()
    is_permutation = torch.equal(elements[order], torch.arange(base.numel(), device=view.device))
    return order.view(base.shape) if is_permutation else None


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
