"""Tensors inside the tuples, lists, mappings, dataclasses and objects with logits that modules take and return."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

PLAIN = frozenset({type(None), bool, int, float, complex, str, slice, torch.dtype, torch.device, torch.Size})
"""Types of values that hold no tensor, most of a call's arguments; other values take longer to tell."""


def tensors(value: Any) -> Iterator[Tensor]:
    """Return every tensor of nested tuples, lists, mappings, dataclasses and objects with logits, in order."""
    result: list[Tensor] = []
    _collect(value, result)
    return iter(result)


def _collect(value: Any, into: list[Tensor]) -> None:
    kind = type(value)
    if kind in PLAIN:
        return
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, into)
    elif kind is dict or isinstance(value, Mapping):
        for item in value.values():
            _collect(item, into)
    elif is_dataclass(value) and not isinstance(value, type):
        _collect(_parts(value), into)
    elif _has_logits(value):
        _collect(vars(value), into)


def unlisted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name, of lists their tensors, such as the feature maps "maps[0]" and "maps[1]"."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        is_list = type(value) in (tuple, list) and any(isinstance(item, Tensor) for item in value)
        flat |= {f"{name}[{index}]": item for index, item in enumerate(value)} if is_list else {name: value}
    return flat


def exchanged(arguments: Mapping[str, Any], old: Tensor | None, new: Tensor) -> dict[str, Any]:
    """Return arguments by name with another tensor in place of one of them, or of one in a list."""

    def exchange(value: Any) -> Any:
        return new if value is old else value

    lists = {
        name: type(value)(map(exchange, value)) for name, value in arguments.items() if type(value) in (tuple, list)
    }
    return {name: lists[name] if name in lists else exchange(value) for name, value in arguments.items()}


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nesting with `function` applied to every tensor."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: mapped(item, function) for key, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, (tuple, list)):
        results = [mapped(item, function) for item in value]
        return type(value)(*results) if hasattr(value, "_fields") else type(value)(results)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **mapped(_parts(value), function))
    if _has_logits(value):
        result = copy.copy(value)
        vars(result).update(mapped(vars(value), function))
        return result
    return value


def _has_logits(value: Any) -> bool:
    """Whether an object of a class of the model's own holds logits, as outputs do."""
    return hasattr(value, "__dict__") and isinstance(vars(value).get("logits"), Tensor)


def _parts(value: Any) -> dict[str, Any]:
    return {entry.name: getattr(value, entry.name) for entry in fields(value)}
