"""Values of arguments: lists of names, and names with options."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from unilinattn.errors import OptionError


def names(texts: Sequence[str] | None) -> list[str]:
    """Return the names of a list separated by spaces or commas, without repetitions."""
    return list(dict.fromkeys(name for text in texts or () for name in text.split(",") if name))


def entry(text: str) -> str | tuple[str, Mapping[str, Any]]:
    """Return a name, or the name and the options of NAME:OPTION=VALUE:OPTION=VALUE.

    Raises `OptionError` for an option without a value.
    """
    name, *pairs = text.split(":")
    return (name, dict(option(text, pair) for pair in pairs)) if pairs else name


def option(where: str, pair: str) -> tuple[str, Any]:
    """Return the name and the value, as JSON or text, of NAME=VALUE.

    Raises `OptionError`, which begins with `where`, for another text.
    """
    name, equals, value = pair.partition("=")
    if not equals:
        raise OptionError(f"{where} {pair!r} is not NAME=VALUE, such as p=1.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
