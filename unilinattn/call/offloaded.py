"""Weights that accelerate keeps in the memory of the CPU or in files, and loads for the calls of their modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def offloaded(module: nn.Module) -> dict[int, Any]:
    """Return the stored tensors of the modules whose weights accelerate loads for each call, by the module's id."""
    return {id(inner): hook.weights_map for inner in module.modules() for hook in _hooks(inner) if hook.offload}


def device_of(module: nn.Module, otherwise: torch.device | None = None) -> torch.device:
    """Return the device of a module's first weight that is in memory; else `otherwise`, or where accelerate runs it."""
    devices = (parameter.device for parameter in module.parameters() if not parameter.is_meta)
    runs_on = (hook.execution_device for inner in module.modules() for hook in _hooks(inner))
    executed = (torch.device(device) for device in runs_on if device is not None)
    return next(devices, None) or otherwise or next(executed, torch.device("cpu"))


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Give a module its offloaded weights inside the block, without accelerate's hooks, which would unload them.

    The weights are where they are stored: in the memory of the CPU, or mapped from files, which takes no memory.
    """
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for inner in list(module.modules()):
            if not (hooks := list(_hooks(inner))):
                continue
            before += [
                (attributes, dict(attributes)) for attributes in (vars(inner), inner._parameters, inner._buffers)
            ]
            if getattr(getattr(inner, "_old_forward", None), "__func__", None) is type(inner).forward:
                vars(inner).pop("forward", None)
            for hook in hooks:
                if hook.offload:
                    _load(inner, hook.weights_map)
        yield
    finally:
        for table, values in reversed(before):
            table.clear()
            table.update(values)


def _load(module: nn.Module, stored: Any) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            module._parameters[name] = nn.Parameter(_read(stored, name), requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = _read(stored, name)


def _read(stored: Any, name: str) -> Tensor:
    """Return a stored tensor, mapped from its file where accelerate would read a copy of it."""
    mapping = stored
    while hasattr(mapping, "prefix"):
        mapping, name = mapping.dataset, f"{mapping.prefix}{name}"
    info = getattr(mapping, "index", {}).get(name)
    if info is None or name in mapping.state_dict or "shape" not in info or info.get("safetensors_file"):
        tensor: Tensor = mapping[name]
        return tensor
    shape, dtype = torch.Size(info["shape"]), getattr(torch, info["dtype"])
    file = Path(mapping.save_folder) / f"{name}.dat"
    return torch.from_file(str(file), shared=False, size=shape.numel(), dtype=dtype).view(shape)


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of accelerate that move weights."""
    hook: Any = vars(module).get("_hf_hook")
    hooks = [] if hook is None else getattr(hook, "hooks", [hook])
    return (hook for hook in hooks if hasattr(hook, "weights_map"))
