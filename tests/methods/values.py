"""Values of a method's options, generated from their declared types."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Chosen:
    """A value that the run decides: a layer's name (`str`), a function, or an instance of a class.

    Attributes:
        kind: the type of the value.
        index: which of the values of this type.
    """

    kind: Any
    index: int = 0


def option_values(field: FieldInfo) -> list[Any]:
    """Return a few values of an option's type, among them the edges of its range, without the option's default.

    Values that the type allows and the method refuses are among them.
    """
    values: list[Any] = []
    for value in _values(field.annotation, field.metadata):
        if not any(type(value) is type(other) and value == other for other in (*values, field.default)):
            values.append(value)
    return values


def _values(annotation: Any, limits: Sequence[Any] = ()) -> list[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [limit for entry in arguments[1:] for limit in getattr(entry, "metadata", None) or [entry]]
        return _values(arguments[0], [*limits, *inner])
    if origin in (Union, UnionType):
        return [value for part in arguments for value in _values(part, limits)]
    if origin is Literal:
        return list(arguments)
    if annotation is NoneType:
        return [None]
    if annotation is bool:
        return [False, True]
    if annotation is int:
        return _integers(limits)
    if annotation is float:
        return _floats(limits)
    if annotation is str:
        return [Chosen(str, 0), Chosen(str, 1)]
    if origin is tuple and len(arguments) == 2 and arguments[0] == arguments[1]:
        pairs = list(pairwise(_values(arguments[0])))
        return [*pairs, pairs[-1][::-1]]
    if isinstance(origin, type) and issubclass(origin, Sequence) and origin is not tuple:
        return _lists(arguments[0])
    if Callable in (annotation, origin):
        return [Chosen(Callable)]
    if isinstance(annotation, type):
        return [Chosen(annotation)]
    raise NotImplementedError(f"no values are known for {annotation}")


def _lists(element: Any) -> list[Any]:
    """Return lists of one and of two values, of one type each."""
    parts = get_args(element) if get_origin(element) in (Union, UnionType) else (element,)
    lists: list[Any] = []
    for part in parts:
        values = _values(part)
        lists += [[values[-1]], *([one, other] for one, other in pairwise(values))]
    return lists


def _integers(limits: Sequence[Any]) -> list[int]:
    low, high = _bounds(limits, 1)
    numbers = (-1, 0, 1) if low is None else (low, low + 1, low + 6)
    return [number for number in numbers if high is None or number <= high]


def _floats(limits: Sequence[Any]) -> list[float]:
    low, high = _bounds(limits, 0)
    edges = [float(edge) for edge in (low, high) if edge is not None]
    if low is None or high is None:
        start = 0.0 if low is None else low
        return [*edges, start + 0.25, start + 1.0, math.inf]
    return [*edges, low + (high - low) / 3, low + (high - low) / 2]


def _bounds(limits: Sequence[Any], step: int) -> tuple[Any, Any]:
    """Return the smallest and the largest number that the limits allow; `step` is added to an open limit."""
    low = high = None
    for limit in limits:
        for name, offset in (("ge", 0), ("gt", step)):
            low = getattr(limit, name) + offset if getattr(limit, name, None) is not None else low
        for name, offset in (("le", 0), ("lt", step)):
            high = getattr(limit, name) - offset if getattr(limit, name, None) is not None else high
    return low, high
