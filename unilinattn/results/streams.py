"""The rows or columns of one stream of tokens in a result over several, such as an encoder's and a decoder's."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from unilinattn.errors import InputError, OptionError, nearest


def slots(streams: Mapping[str, int]) -> dict[str, slice]:
    """Return the positions of each stream's tokens along an axis."""
    ends = list(accumulate(streams.values()))
    return {name: slice(end - count, end) for (name, count), end in zip(streams.items(), ends, strict=True)}


def of_stream(values: Mapping[str, Any], axis: str, name: str) -> dict[str, Any]:
    """Return the fields of a result that change if an axis keeps the tokens of one stream.

    Raises `InputError` for a result of one stream or without the axis, and `OptionError` for an unknown stream.
    """
    dims, streams = values["dims"], values["streams"]
    if not streams or axis not in dims:
        what = f"no {axis} axis" if streams else "the tokens of one stream"
        raise InputError(f"this result has {what}, so no stream can be selected from it.")
    if name not in streams[axis]:
        raise OptionError(f"the {axis} axis of this result has no stream {name!r}" + nearest(name, streams[axis]))
    slot, shape = slots(streams[axis])[name], values["scores"].shape

    def cut(tensor: Tensor, axes: Sequence[str]) -> Tensor:
        return tensor[tuple(slot if each == axis else slice(None) for each in axes)]

    extras = {}
    for extra, tensor in values["extras"].items():
        axes = dims if tensor.shape == shape else tuple(each for each in dims if each != "key")
        if tensor.shape == tuple(size for each, size in zip(dims, shape, strict=True) if each in axes):
            extras[extra] = cut(tensor, axes) if axis in axes else tensor
    others = {each: counts for each, counts in streams.items() if each != axis}
    changed = {"scores": cut(values["scores"], dims), "extras": extras}
    if axis == "query":
        labels = values["query_tokens"]
        if labels is None and streams["query"] == streams["key"]:
            labels = values["tokens"]
        rows = None if labels is None else [row[slot] for row in labels]
        return {**changed, "query_tokens": rows, "streams": {"query": {name: slot.stop - slot.start}, **others}}
    for label in ("tokens", "word_ids", "offsets"):
        changed[label] = None if values[label] is None else [row[slot] for row in values[label]]
    if values["sinks"] is not None:
        inside = range(slot.start, slot.stop)
        changed["sinks"] = [[key - slot.start for key in row if key in inside] for row in values["sinks"]]
    if values["query_tokens"] is None and "query" in dims and streams["query"] == streams["key"]:
        changed["query_tokens"] = values["tokens"]
    changed["mask"] = None if values["mask"] is None else values["mask"][:, slot]
    return {
        **changed,
        "grid": None,
        "patches": None,
        "cls": None,
        "streams": {**others, "key": {name: slot.stop - slot.start}},
    }
