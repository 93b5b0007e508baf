"""Copies of a host's modules."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

EMPTY = torch.device("meta")
"""Device of tensors that have a shape and a memory layout, and no numbers."""


def copied(module: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a module that calls the hooks of the original; `memo` holds replacements by id.

    Hooks may be methods of other objects, such as a run of the model, of which a deep copy would copy everything.
    """
    attributes = (attribute for inner in module.modules() for attribute in vars(inner).items())
    hooks = {id(value): copy.copy(value) for name, value in attributes if name.endswith("_hooks")}
    with torch._C.DisableTorchFunction():
        return copy.deepcopy(module, {**hooks, **(memo or {})})


def without_hooks(module: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a module without hooks and replaced forwards; `memo` holds replacements by id."""
    result = copied(module, memo)
    for inner in result.modules():
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks):
            hooks.clear()
        inner.__dict__.pop("forward", None)
    return result


def without_numbers(module: nn.Module, copies: dict[int, nn.Module] | None = None) -> nn.Module:
    """Return a module whose parameters and buffers are on the meta device, without hooks and replaced forwards.

    It shares its other attributes with the original but for dicts, lists and sets, into which a run may write.
    `copies` are those of submodules by the id of the original.
    """
    copies = {} if copies is None else copies
    if id(module) in copies:
        return copies[id(module)]
    result: nn.Module = object.__new__(type(module))
    copies[id(module)] = result
    attributes = {name: copy.copy(x) if type(x) in (dict, list, set) else x for name, x in vars(module).items()}
    vars(result).update(attributes)
    vars(result).update({name: type(value)() for name, value in vars(module).items() if name.endswith("_hooks")})
    vars(result).pop("forward", None)
    tensors = (module._parameters, module._buffers)
    result._parameters, result._buffers = ({name: empty(x) for name, x in each.items()} for each in tensors)
    submodules = module._modules.items()
    result._modules = {name: None if x is None else without_numbers(x, copies) for name, x in submodules}
    return result


def empty(value: Any) -> Any:
    """Return an argument with tensors without numbers in place of its tensors."""
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().to(EMPTY), requires_grad=False)
    if isinstance(value, Tensor):
        return value.detach().to(EMPTY)
    if type(value) in (tuple, list):
        return type(value)(empty(item) for item in value)
    if type(value) is dict:
        return {name: empty(item) for name, item in value.items()}
    return value
