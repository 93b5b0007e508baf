"""The labels of a result: their types, and the checks that they fit the scores."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue, ValidationError
from torch import Tensor

from unilinattn.errors import InputError
from unilinattn.results.check import Check

AXES = ("layer", "batch", "head", "query", "key")


def encodable(text: str) -> str:
    """Return a text with lone surrogates, which UTF-8 does not have, as escapes; files, tables and pages take it."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _encodable_values(value: Any) -> Any:
    """Return a JSON value with all of its texts `encodable`."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_encodable_values(item) for item in value]
    if isinstance(value, dict):
        return {encodable(name): _encodable_values(item) for name, item in value.items()}
    return value


Text = Annotated[str, AfterValidator(encodable)]


class Header(BaseModel):
    """The labels of a result, validated: every field but the tensors, saved as JSON in the result's file."""

    # Infinity is a valid option (the p of a norm), and JSON has no number for it.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    dims: tuple[Literal["layer", "batch", "head", "query", "key"], ...]
    method: Text
    options: Annotated[dict[str, JsonValue], AfterValidator(_encodable_values)]
    scope: Text | None
    tokens: tuple[tuple[Text, ...], ...] | None
    query_tokens: tuple[tuple[Text, ...], ...] | None = None
    word_ids: tuple[tuple[int | None, ...], ...] | None = None
    offsets: tuple[tuple[tuple[int, int], ...], ...] | None = None
    sinks: tuple[tuple[int, ...], ...] | None = None
    streams: dict[Literal["query", "key"], dict[Text, int]] = {}
    logit_names: tuple[tuple[Text, ...], ...] | None = None
    logit_kind: Literal["class", "label", "output"] | None = None
    pooled: bool = False
    grid: tuple[int, int] | None
    patches: tuple[int, ...] | None = None
    cls: tuple[int, ...] | None = None
    layers: tuple[Text, ...]
    kinds: tuple[Text, ...]
    heads: tuple[int, ...] | None = None
    head_kind: Literal["head", "channel"] = "head"
    left_out: tuple[Text, ...] = ()
    model: Text
    versions: dict[Text, Text]
    reconstruction_error: dict[Text, float]
    warnings: tuple[Text, ...] = ()
    stream_error: dict[Text, float] = {}
    completeness_gap: float | None
    checks: tuple[Check, ...] | None = None


def validated(values: Mapping[str, Any]) -> Header:
    """Return the labels as a `Header`, with the options as plain JSON values, equal to those of a loaded file.

    Raises `InputError` if a label has a wrong type, and names it.
    """
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    try:
        plain["options"] = json.loads(json.dumps(plain["options"]))
    except (TypeError, ValueError) as error:
        raise InputError(
            "The options of a result must be plain JSON values (str, int, float, bool, None, lists and "
            f"dicts of them), so that it can be saved: {error}."
        ) from error
    try:
        return Header.model_validate(plain)
    except ValidationError as error:
        raise InputError(f"The labels of a result do not have the right types: {describe(error)}.") from error


def describe(error: ValidationError) -> str:
    """Return the first three messages of a validation error on one line."""
    messages = error.errors()[:3]
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'header'}: {item['msg']}" for item in messages)


def check_tensors(scores: Tensor, mask: Tensor | None, extras: Mapping[str, Tensor]) -> None:
    """Raise `InputError` unless all are tensors, the scores floating point and the mask boolean."""
    for name, tensor in {"scores": scores, **extras}.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} must be a tensor, not {type(tensor).__name__}.")
    if not scores.is_floating_point():
        raise InputError(f"scores must be floating point, not {scores.dtype}.")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool):
        raise InputError("mask must be a boolean tensor, True at real tokens.")


def check_fit(header: Header, shape: tuple[int, ...], mask_shape: tuple[int, ...] | None) -> None:
    """Raise `InputError` unless every label fits scores of shape `shape`."""
    dims = header.dims
    if dims != tuple(axis for axis in AXES if axis in dims) or "key" not in dims:
        raise InputError(f"dims must be some of {AXES} in this order, key among them; got {dims}.")
    if len(dims) != len(shape):
        raise InputError(f"dims {dims} name {len(dims)} axes, but scores have shape {shape}.")
    sizes = dict(zip(dims, shape, strict=True))
    _check_tokens(header, sizes, mask_shape)
    _check_heads(header, sizes.get("head"))
    for axis, counts in header.streams.items():
        if axis in sizes and sum(counts.values()) != sizes[axis]:
            raise InputError(f"the {axis} axis has {sizes[axis]} tokens; got streams {counts}.")
    _check_patches(header, sizes["key"])
    if len(set(header.layers)) != len(header.layers):
        raise InputError(
            f"Layer names must be unique, because errors are kept by name; got {header.layers}. "
            "Name the calls of a shared module apart."
        )
    if header.kinds and len(header.kinds) != len(header.layers):
        raise InputError(f"kinds needs one name for each of {len(header.layers)} layers; got {header.kinds}.")
    if "layer" in dims and header.layers and len(header.layers) != sizes["layer"]:
        raise InputError(f"The layer axis has {sizes['layer']} entries, but layers {len(header.layers)} names.")


def _check_tokens(header: Header, sizes: Mapping[Any, int], mask_shape: tuple[int, ...] | None) -> None:
    sequences, length = sizes.get("batch", 1), sizes["key"]
    if mask_shape not in (None, (sequences, length)):
        raise InputError(f"mask must have shape {(sequences, length)} (batch, key), not {mask_shape}.")
    lengths = None if header.tokens is None else [len(row) for row in header.tokens]
    if lengths not in (None, [length] * sequences):
        raise InputError(
            f"tokens must be {sequences} lists of {length} texts (one for each key, padding included); "
            f"got lengths {lengths}."
        )
    queries = sizes.get("query", 0)
    for name, count, entries in (
        ("word_ids", length, "word indices, one for each key"),
        ("offsets", length, "pairs of characters, one for each key"),
        ("query_tokens", queries, "texts, one for each query"),
    ):
        rows = getattr(header, name)
        if rows is not None and [len(row) for row in rows] != [count] * sequences:
            raise InputError(f"{name} must be {sequences} lists of {count} {entries}.")
    if header.sinks is not None and (
        len(header.sinks) != sequences or any(not 0 <= position < length for row in header.sinks for position in row)
    ):
        raise InputError(f"sinks must be {sequences} lists of positions of the {length} keys; got {header.sinks}.")
    if header.logit_names is not None and len(header.logit_names) != sequences:
        raise InputError(f"logit_names must be {sequences} lists, one for each sequence.")
    if header.checks is not None and len(header.checks) != sequences:
        raise InputError(f"checks must be {sequences} records, one for each sequence; got {len(header.checks)}.")


def _check_heads(header: Header, count: int | None) -> None:
    if header.heads is None:
        return
    if len(header.heads) != (1 if count is None else count):
        entries = "no head axis, so that heads names one at most" if count is None else f"{count} heads"
        raise InputError(f"The scores have {entries}; got heads={header.heads}.")
    if len(set(header.heads)) < len(header.heads) or min(header.heads) < 0:
        raise InputError(f"heads must be different indices from 0; got {header.heads}.")


def _check_patches(header: Header, length: int) -> None:
    if header.grid is not None and (min(header.grid) < 1 or header.grid[0] * header.grid[1] > length):
        raise InputError(f"The patches of grid {header.grid} are more than the {length} keys, or none.")
    patches, classes = header.patches, header.cls or ()
    if patches is not None and (header.grid is None or len(patches) != header.grid[0] * header.grid[1]):
        raise InputError(f"{len(patches)} patches do not fill the grid {header.grid}; give one position for each.")
    positions = (*(patches or ()), *classes)
    if len(set(positions)) < len(positions) or any(not 0 <= position < length for position in positions):
        raise InputError(f"The positions of patches and of CLS are different ones of the {length} keys.")
