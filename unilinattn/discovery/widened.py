"""`widened`: runs of a model of low precision in float32, in which the smallest mixing of tokens is told from rounding.

No weight is cast beforehand: each function of torch gets its arguments in float32, so that the memory is that of the
largest weight.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from unilinattn.call.nested import mapped, tensors
from unilinattn.kernels.precision import full_precision
from unilinattn.rules.functions import MOVING, name_of

LOW = (torch.bfloat16, torch.float16)
"""Dtypes in which a change of a token by others may be as small as rounding."""

_CASTS = (Tensor.bfloat16, Tensor.half)


def is_low(model: nn.Module, values: Any) -> bool:
    """Tell whether a model computes in low precision: by its parameters, its inputs, or autocast."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    autocast = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    return autocast or any(t.dtype in LOW for t in (*model.parameters(), *tensors(values)))


@contextmanager
def widened() -> Iterator[None]:
    """Run every function of torch inside the block in float32 where it would compute in lower precision."""
    with full_precision(), _Widened():
        yield


def visible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose functions of torch a mode around sees, also where it is told to see none."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(mode, _Widened) for mode in _get_current_function_mode_stack()):
            return function(*args, **kwargs)
        with torch._C._EnableTorchFunction():
            return function(*args, **kwargs)

    return run


class _Widened(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, in_place = name_of(func, dict(kwargs))
        if func.__name__ == "__get__":
            result = func(*args, **kwargs)
            return _wide_dtype(result)
        if func in _CASTS:
            return args[0].float()
        in_place = in_place or name in ("setitem", "set")
        if in_place and isinstance(args[0], Tensor) and args[0].is_floating_point():
            # A function in place computes in the dtype of its target.
            target = args[0]
            args, kwargs = mapped((args, kwargs), lambda t: t.to(target.dtype) if t.is_floating_point() else t)
            return func(target, *args[1:], **kwargs)
        # Functions that move elements need no other dtype, and a lookup would cast its whole table.
        if name not in MOVING and name != "embedding":
            args, kwargs = mapped((args, kwargs), _wide)
        return func(*map(_wide_dtype, args), **{key: _wide_dtype(value) for key, value in kwargs.items()})


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in LOW else t


def _wide_dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in LOW else value
