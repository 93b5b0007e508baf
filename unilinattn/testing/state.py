"""Snapshots of a model and of the process, to compare before and after a run."""

import signal
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from unilinattn.kernels.precision import OPERATIONS

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types that are compared by value; other types, except containers of these, are compared by identity."""

State = Mapping[str, dict[str, Any]]


class Same:
    """A reference that equals only references to the same object, and keeps it alive so that its id stays unique."""

    def __init__(self, value: Any) -> None:
        """Refer to `value`."""
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x}"


def model_state(model: nn.Module) -> State:
    """Return the state of a model by aspect: tensors, hooks, attributes, classes and configurations.

    Tensors are copied. Attributes are compared by value if they are plain, else by identity; containers by both.
    """
    modules = dict(model.named_modules())
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    plain = {f"{name}.{key}": value for name, key, value in _attributes(modules) if isinstance(value, Tensor)}
    tensors = {**named, **plain}
    classes = {ancestor for module in modules.values() for ancestor in type(module).__mro__ if ancestor is not object}
    configs = {name: getattr(module, "config", None) for name, module in modules.items()}
    return {
        "tensors": {name: t.detach().clone() for name, t in tensors.items()},
        "identity": {name: Same(t) for name, t in tensors.items()},
        "requires_grad": {name: t.requires_grad for name, t in tensors.items()},
        "gradients": {name: None if t.grad is None else t.grad.clone() for name, t in named.items()},
        "training flags": {name: module.training for name, module in modules.items()},
        "hooks": {f"{name}.{key}": _mark(value) for name, key, value in _attributes(modules) if "_hooks" in key},
        "forward methods": {name: _mark(vars(module).get("forward")) for name, module in modules.items()},
        "attention implementation": {n: getattr(c, "_attn_implementation", None) for n, c in configs.items()},
        "attributes": {f"{name}.{key}": _mark(value) for name, key, value in _attributes(modules)},
        "classes": {f"{c.__qualname__}.{key}": Same(value) for c in classes for key, value in vars(c).items()},
        "configuration": {
            f"{name}.{key}": _mark(value)
            for name, config in configs.items()
            for key, value in getattr(config, "__dict__", {}).items()
        },
    }


def process_state() -> State:
    """Return the process state that a run may change: modes, global hooks, random generators, tables and warnings."""
    return {
        "modes": {
            "gradients": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "functions": [Same(mode) for mode in _get_current_function_mode_stack()],
            "dispatch": [Same(mode) for mode in _get_current_dispatch_mode_stack()],
            "default dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
            "products": [operation.fp32_precision for operation in OPERATIONS],
            "interrupts": Same(signal.getsignal(signal.SIGINT)),
        },
        "global hooks": {
            name: _mark(value) for name, value in vars(torch_module).items() if name.startswith("_global_")
        },
        "random generators": {
            "torch": torch.get_rng_state(),
            "numpy": [
                entry if isinstance(entry, (str, int, float)) else entry.tobytes() for entry in np.random.get_state()
            ],
        },
        "warnings": {"filters": list(warnings.filters)},
        "tables of transformers": _tables(),
    }


def differences(before: State, after: State) -> dict[str, list[str]]:
    """Return the names of the entries that differ between two states, by aspect; equal aspects are omitted."""
    changed = {
        aspect: [
            name
            for name in {**old, **after[aspect]}
            if not _equal(old.get(name, _ABSENT), after[aspect].get(name, _ABSENT))
        ]
        for aspect, old in before.items()
    }
    return {aspect: names for aspect, names in changed.items() if names}


_ABSENT = object()


def _attributes(modules: Mapping[str, nn.Module]) -> list[tuple[str, str, Any]]:
    return [(name, key, value) for name, module in modules.items() for key, value in vars(module).items()]


def _mark(value: Any) -> Any:
    """Return a marker of a value; markers of the same value are equal as long as the value is unchanged."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Mapping):
        return Same(value), [(_mark(key), _mark(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return Same(value), [_mark(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return Same(value), {_mark(item) for item in value}
    return Same(value)


def _tables() -> dict[str, Any]:
    """Return transformers' process-wide tables of attention functions, masks and collectable outputs."""
    if "transformers" not in sys.modules:
        return {}
    from transformers import masking_utils, modeling_utils
    from transformers.utils import output_capturing

    tables: dict[str, Any] = {}
    for table in (modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS):
        for scope in ("_global_mapping", "_local_mapping"):
            tables[f"{type(table).__name__}.{scope}"] = _mark(getattr(table, scope))
    tables["outputs by class"] = _mark(output_capturing._CAN_RECORD_REGISTRY)
    tables["active collector"] = _mark(output_capturing._active_collector.get())
    return tables


def _equal(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        alike = before.dtype == after.dtype and before.shape == after.shape and before.device == after.device
        # Offloaded weights have no numbers to compare.
        return alike and (before.is_meta or torch.equal(before, after))
    return type(before) is type(after) and bool(before == after)
