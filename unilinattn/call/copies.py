"""Copies of a host's modules."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


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
