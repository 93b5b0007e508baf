"""Indices are checked before a GPU reads them: a kernel that meets one out of range ends the process's use of the GPU.

On a CPU torch raises an error instead, which a trial of other inputs expects, and which names the fault of given ones.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

BY_AXIS = frozenset(
    {"gather", "index_select", "index_add", "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce"}
)
"""Functions whose first three arguments are a tensor, an axis and indices along it."""


@contextmanager
def checked_indices(model: nn.Module) -> Iterator[None]:
    """Raise `IndexError` inside a `with` block for indices out of range, if the model has weights on a GPU.

    Waits for the GPU at each lookup.
    """
    if not any(map(_on_gpu, model.parameters())):
        yield
        return
    with CheckedIndices():
        yield


def check_rows(module: nn.Module, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> None:
    """Raise `IndexError` for a call of an embedding on a GPU with an index out of range."""
    # A subclass, such as that of BART's positions, may compute its indices from other arguments.
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return
    if _on_gpu(module.weight):
        args, kwargs = inputs
        _check(kwargs["input"] if "input" in kwargs else args[0], module.num_embeddings)


class CheckedIndices(TorchFunctionMode):
    """Raises `IndexError` for indices out of range before torch reads them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the indices of a function, and call it."""
        name = getattr(func, "__name__", "")
        rule = RULES.get(name) or RULES.get(name.removesuffix("_"))
        if rule is not None:
            with torch._C.DisableTorchFunction():
                rule(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _on_gpu(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_cuda


def _along(tensor: Tensor, dim: Any = None, index: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(dim, int) and tensor.ndim:
        _check(index, tensor.shape[dim])


def _of_rows(*args: Any, **kwargs: Any) -> None:
    # `torch.embedding` takes the table first, `torch.nn.functional.embedding` the indices.
    both = [value for value in (*args, kwargs.get("input"), kwargs.get("weight")) if isinstance(value, Tensor)]
    # Of a table of integers, the indices cannot be told from it.
    tables = [tensor for tensor in both if tensor.is_floating_point()]
    for index in both if tables else ():
        _check(index, len(tables[0]))


def _of_elements(tensor: Tensor, index: Any = None, *_: Any, **__: Any) -> None:
    _check(index, tensor.numel(), least=-tensor.numel())


def _of_classes(index: Tensor, num_classes: int = -1, *_: Any, **__: Any) -> None:
    if num_classes > 0:
        _check(index, num_classes)


def _of_brackets(tensor: Any, index: Any, *_: Any, **__: Any) -> None:
    """Check `tensor[index]`; the axes after an ellipsis are counted from the last one."""
    entries = index if isinstance(index, tuple) else (index,)
    if not isinstance(tensor, Tensor) or not any(isinstance(entry, Tensor) for entry in entries):
        return
    # Comparing a tensor with an ellipsis would compare its elements.
    cut = next((k for k, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    after = entries[cut + 1 :]
    for first, part in ((0, entries[:cut]), (tensor.ndim - sum(map(_axes, after)), after)):
        axis = first
        for entry in part:
            if isinstance(entry, Tensor) and entry.dtype not in (torch.bool, torch.uint8):
                _check(entry, tensor.shape[axis], least=-tensor.shape[axis])
            axis += _axes(entry)


def _axes(entry: Any) -> int:
    if entry is None or isinstance(entry, bool):
        return 0
    return entry.ndim if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1


def _of_source(tensor: Tensor, mask: Any = None, source: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(mask, Tensor) and isinstance(source, Tensor):
        filled = int(mask.expand(torch.broadcast_shapes(mask.shape, tensor.shape)).sum())
        if filled > source.numel():
            raise IndexError(f"a mask of {filled} elements is filled from {source.numel()} values")


RULES: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(BY_AXIS, _along),
    "embedding": _of_rows,
    "take": _of_elements,
    "one_hot": _of_classes,
    "__getitem__": _of_brackets,
    "__setitem__": _of_brackets,
    "masked_scatter": _of_source,
}
"""The check of each function."""


def _check(index: Any, size: int, least: int = 0) -> None:
    if not isinstance(index, Tensor) or not index.numel() or index.is_floating_point() or index.dtype == torch.bool:
        return
    low, high = (int(x) for x in torch.aminmax(index))
    if low < least or high >= size:
        raise IndexError(f"indices reach from {low} to {high}; there are {size}")
