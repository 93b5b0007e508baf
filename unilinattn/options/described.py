"""Texts about the options of methods: names, accepted values, defaults and meanings."""

import collections.abc
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class OptionText(NamedTuple):
    """An option of a method: its name, accepted values, default and meaning."""

    name: str
    accepted: str
    default: str
    meaning: str


def option_texts(options: type[BaseModel] | None) -> list[OptionText]:
    """Return the texts of a method's options, in the order in which they apply; none for a plugin without a model."""
    fields = {} if options is None else options.model_fields
    return [
        OptionText(name, accepted(info.annotation, info.metadata), repr(info.default), info.description or "")
        for name, info in fields.items()
    ]


def accepted(annotation: Any, limits: Iterable[Any] = ()) -> str:
    """Describe the accepted values of an option."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [
            limit
            for argument in arguments[1:]
            for limit in (argument.metadata if isinstance(argument, FieldInfo) else [argument])
        ]
        return accepted(arguments[0], [*inner, *limits])
    if origin is Literal:
        return ", ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(accepted(argument, limits) for argument in arguments)
    if annotation is type(None):
        return "None"
    if origin is collections.abc.Callable:
        return "a function"
    if origin is collections.abc.Sequence:
        return f"a list of {accepted(arguments[0])}"
    if origin is tuple:
        return f"a pair of {accepted(arguments[0])}"
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(limit, name)}" for limit in limits for name, sign in signs.items() if hasattr(limit, name)
    ]
    return " ".join([annotation.__name__, ", ".join(bounds)]).strip()


def signature_text(name: str, summary: str, options: type[BaseModel] | None) -> str:
    """Return a line for a method, and one for each of its options: its name, accepted values and default."""
    texts = [f"    {text.name} = {text.default}: {text.accepted}" for text in option_texts(options)]
    return "\n".join([f"{name}: {summary}", *texts])
