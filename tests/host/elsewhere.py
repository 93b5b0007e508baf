"""Simulated devices: tensors that report a device and raise in operations with tensors of another one.

The data is in CPU memory. As in torch, copies between devices and operations with zero-dimensional CPU tensors are
allowed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HERE = torch.device("meta", 0)
THERE = torch.device("meta", 1)
MOVES = {"aten::_to_copy", "aten::copy_"}


class Resident(Tensor):
    """A tensor on a simulated device."""

    tensor: Tensor

    @staticmethod
    def __new__(cls, tensor: Tensor, device: torch.device) -> "Resident":
        self = Tensor._make_wrapper_subclass(
            cls,
            tensor.shape,
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=device,
            requires_grad=tensor.requires_grad,
        )
        self.data_in_memory = tensor.detach()
        return self

    def __repr__(self) -> str:
        return f"Resident({self.data_in_memory}, device={self.device})"

    def tolist(self) -> Any:
        return self.data_in_memory.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's signature
        return run(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        return run(func, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """Fill in lists of numbers, which torch does not copy to the meta device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        options = dict(kwargs or {})
        if func not in (torch.tensor, torch.as_tensor) or torch.device(options.get("device") or "cpu").type != "meta":
            return func(*args, **options)
        device = options.pop("device")
        return func(*args, **options).to(device)


@contextmanager
def devices() -> Iterator[None]:
    """Allow factory functions to create tensors on simulated devices."""
    with _Factories(), _Literals():
        yield


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.name().split(".")[0]
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    places = {t.device for t in tensors if t.ndim or len(tensors) == 1}
    if len(places) > 1 and name not in MOVES:
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, but found {sorted(map(str, places))}"
        )
    target = kwargs.get("device")
    if target is None and places:
        target = next(iter(places))
    if name == "aten::copy_":
        target = args[0].device
    plain = tree_map(lambda t: _plain(t) if isinstance(t, Resident) else t, args)
    options = {k: _plain(v) if isinstance(v, Resident) else v for k, v in kwargs.items() if k != "device"}
    if "device" in kwargs:
        options["device"] = "cpu"
    result = func(*plain, **options)
    if target is None or torch.device(target).type != HERE.type:
        return result
    for argument, data in zip(args, plain, strict=True):
        if isinstance(argument, Resident) and result is data:
            return argument
    return tree_map(lambda t: Resident(t, torch.device(target)) if isinstance(t, Tensor) else t, result)


def settle(module: nn.Module, device: torch.device) -> nn.Module:
    """Move the parameters and buffers of a module to a simulated device."""
    for inner in module.modules():
        for name, parameter in list(inner._parameters.items()):
            if parameter is not None:
                inner._parameters[name] = nn.Parameter(Resident(_plain(parameter), device), requires_grad=False)
        for name, buffer in list(inner._buffers.items()):
            if buffer is not None:
                inner._buffers[name] = Resident(_plain(buffer), device)
    return module


def _plain(tensor: Tensor) -> Tensor:
    return tensor.data_in_memory if isinstance(tensor, Resident) else tensor.detach()
