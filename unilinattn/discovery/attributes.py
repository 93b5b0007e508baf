"""Attributes that a call of a module writes, such as keys that a later layer reads."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from unilinattn.call.nested import mapped, tensors

TABLES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

Attributes = Mapping[int, Mapping[str, Any]]
"""The attributes of some modules by the number of the module, containers copied."""

Left = list[tuple[dict[str, Any], str, Any]]
"""The attributes that a call wrote: the dictionary of them, a name and the value."""


def attributes_of(model: nn.Module) -> Attributes:
    """Return the attributes of all modules of a model."""
    return {id(part): {name: _copy(x) for name, x in _items(part)} for part in model.modules()}


def written(module: nn.Module, before: Attributes) -> Left:
    """Return the attributes with tensors of a module, and of those inside it, that differ from those of before."""
    return [
        (vars(part), name, _copy(value))
        for part in module.modules()
        for name, value in _items(part)
        if _is_changed(value, before.get(id(part), {}).get(name)) and next(tensors(value), None) is not None
    ]


def leave(left: Left, change: Callable[[Tensor], Tensor]) -> None:
    """Write attributes as a call would, with changed tensors."""
    for attributes, name, value in left:
        current, changed = attributes.get(name), mapped(value, change)
        if type(current) is type(value) is dict:
            current.update(changed)
        elif type(current) is type(value) is list:
            current[:] = changed
        else:
            attributes[name] = changed


def _items(part: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(part).items() if name not in TABLES]


def _copy(value: Any) -> Any:
    return type(value)(value) if type(value) in (dict, list) else value


def _is_changed(value: Any, before: Any) -> bool:
    """Tell whether an attribute, or an entry of it, is another object than before."""
    if value is before or type(value) not in (dict, list) or type(before) is not type(value):
        return value is not before
    if len(value) != len(before):
        return True
    pairs = ((value[key], before.get(key)) for key in value) if type(value) is dict else zip(value, before, strict=True)
    return any(a is not b for a, b in pairs)
