"""`promoted`: run a host in float64 throughout, also where it forces float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDER: dict[Any, Any] = {
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.FloatTensor: torch.DoubleTensor,
    "torch.FloatTensor": "torch.DoubleTensor",
    "torch.cuda.FloatTensor": "torch.cuda.DoubleTensor",
}


_NAMES = frozenset({torch.dtype, type(torch.FloatTensor), str})


class _Promote(TorchFunctionMode):
    # This runs at every operation of the host, and a type check of its arguments would take longer than most of them.
    @no_type_check
    def __torch_function__(self, func, types, args=(), kwargs=None):
        function, named = Tensor.double if func is Tensor.float else func, kwargs or {}
        if _NAMES.isdisjoint(map(type, args)) and _NAMES.isdisjoint(map(type, named.values())):
            return function(*args, **named)
        # Only strings and types are looked up, because a tensor would be compared elementwise.
        wide = [_WIDER.get(value, value) if type(value) in _NAMES else value for value in args]
        return function(*wide, **{k: _WIDER.get(v, v) if type(v) in _NAMES else v for k, v in named.items()})


@contextmanager
def promoted() -> Iterator[None]:
    """Replace float32 by float64 in every operation of a host inside the block, for tests of exactness.

    `Tensor.float`, any `torch.float32` argument (positional, `dtype=`, or as a type string) and the default dtype of
    new tensors become float64; complex64 becomes complex128. Cast the model with `.double()` first. Tensors that a host
    computed in float32 before, such as a rotary table, keep their values.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Promote():
            yield
    finally:
        torch.set_default_dtype(default)
