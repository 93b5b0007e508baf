"""Inputs that a model takes as dictionaries, such as a text's ids and mask: each field is an argument by itself."""

from collections import UserDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

SEPARATOR = "."
"""Stands between the name of an argument and that of a field of its dictionary; no argument of Python has it."""


class Fields(dict[str, Any]):
    """A dictionary whose entries are attributes too, as those of a tokenizer's encoding are."""

    def __getattr__(self, name: str) -> Any:
        """Return an entry."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def by_field(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with an entry for each field of a dictionary of tensors, such as "first.input_ids"."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        is_fields = isinstance(value, UserDict) or type(value) in (dict, Fields)
        if (
            is_fields
            and all(isinstance(key, str) for key in value)
            and any(isinstance(x, Tensor) for x in value.values())
        ):
            flat |= {f"{name}{SEPARATOR}{key}": field for key, field in value.items()}
        else:
            flat[name] = value
    return flat


def as_called(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, with the fields of each dictionary in it."""
    call: dict[str, Any] = {}
    for name, value in arguments.items():
        argument, separator, field = name.partition(SEPARATOR)
        if separator:
            call.setdefault(argument, Fields())[field] = value
        else:
            call[name] = value
    return call
