"""`Scores`: the labelled, immutable data of a result, without its pictures."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.errors import InputError, OptionError, ResultFileError, nearest
from unilinattn.optional import import_extra
from unilinattn.results import file as resultfile
from unilinattn.results import labels
from unilinattn.results.check import Check
from unilinattn.results.labels import Header
from unilinattn.results.streams import of_stream

if TYPE_CHECKING:
    import pandas
    import xarray

SEQUENCE_LABELS = ("tokens", "query_tokens", "word_ids", "offsets", "sinks", "logit_names", "checks")
"""Labels with an entry for each sequence."""

LAYER_EXTRAS = ("decomposition_error",)
"""Extras with one number for each layer or step, the worst of all sequences."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Scores:
    """The data of an `Attribution`, which documents the fields.

    Raises `InputError` if a label does not fit the scores.
    """

    scores: Float[Tensor, "*axes"]
    dims: tuple[str, ...]
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scope: str | None = None
    tokens: Sequence[Sequence[str]] | None = None
    query_tokens: Sequence[Sequence[str]] | None = None
    word_ids: Sequence[Sequence[int | None]] | None = None
    offsets: Sequence[Sequence[tuple[int, int]]] | None = None
    sinks: Sequence[Sequence[int]] | None = None
    streams: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    logit_names: Sequence[Sequence[str]] | None = None
    logit_kind: Literal["class", "label", "output"] | None = None
    pooled: bool = False
    grid: tuple[int, int] | None = None
    patches: Sequence[int] | None = None
    cls: Sequence[int] | None = None
    mask: Bool[Tensor, "batch length"] | None = None
    layers: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    heads: tuple[int, ...] | None = None
    head_kind: str = "head"
    left_out: tuple[str, ...] = ()
    model: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    reconstruction_error: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    stream_error: Mapping[str, float] = field(default_factory=dict)
    completeness_gap: float | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    checks: Sequence[Check] | None = None
    checker: Callable[..., Check] | None = None

    def __post_init__(self) -> None:
        header = self._header()
        for name in Header.model_fields:
            value = getattr(header, name)
            object.__setattr__(self, name, MappingProxyType(value) if isinstance(value, dict) else value)
        labels.check_tensors(self.scores, self.mask, self.extras)
        labels.check_fit(header, tuple(self.scores.shape), None if self.mask is None else tuple(self.mask.shape))
        object.__setattr__(self, "scores", self.scores.detach())
        extras = {labels.encodable(name): tensor.detach() for name, tensor in self.extras.items()}
        object.__setattr__(self, "extras", MappingProxyType(extras))

    def _header(self) -> Header:
        return labels.validated({name: getattr(self, name) for name in Header.model_fields})

    def __reduce__(self) -> tuple[Any, ...]:
        # The checker refers to the model in this process.
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "checker"}
        plain = {name: dict(v) if isinstance(v, MappingProxyType) else v for name, v in values.items()}
        return _rebuild, (type(self), plain)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the scores for `np.asarray`, with the axes of `dims`; half precision becomes float32."""
        return np.array(score_array(self), dtype=dtype, copy=copy)

    @property
    def sizes(self) -> dict[str, int]:
        """The length of each axis by its name."""
        return dict(zip(self.dims, self.scores.shape, strict=True))

    @property
    def head_names(self) -> tuple[str, ...]:
        """The names of the heads, such as "head 3" or "channel 3"; none without a head axis or a selected head."""
        heads = range(self.sizes.get("head", 0)) if self.heads is None else self.heads
        return tuple(f"{self.head_kind} {head}" for head in heads)

    @property
    def worst_error(self) -> tuple[str, float] | None:
        """The layer with the largest reconstruction error and that error, or None if no error was recorded.

        A NaN counts as the largest.
        """
        return largest_error(self.reconstruction_error)

    def select(
        self,
        *,
        layer: int | str | None = None,
        batch: int | None = None,
        head: int | None = None,
        queries: str | None = None,
        keys: str | None = None,
    ) -> Self:
        """Return the result of one layer (by position or name), sequence or head, or several, without their axes.

        A head is selected by its index in the layer, one of `heads`. `queries` and `keys` name a stream of tokens,
        whose rows or columns the result keeps: `select(queries="decoder", keys="encoder")`. Extras with the axes of
        `dims` without key, or without head and key, are selected alike; other extras are dropped, because their part
        of the selection is unknown. A sequence keeps its target of several in `options`.

        Raises `InputError` if the axis is absent or the position out of range, and `OptionError` if the name is
        unknown.
        """
        selected = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        if batch is not None or queries is not None or keys is not None:
            # Sequences and keys are no longer those of the model's inputs.
            selected["checker"] = None
        if layer is not None:
            selected["layers"], selected["kinds"] = (), ()
            index = self._layer_index(layer)
            if self.layers:
                selected["layers"] = (self.layers[index],)
                for errors in ("reconstruction_error", "stream_error"):
                    by_layer = selected[errors].items()
                    selected[errors] = {name: error for name, error in by_layer if name == self.layers[index]}
            if self.kinds:
                selected["kinds"] = (self.kinds[index],)
            selected |= _select_axis(selected, "layer", index)
        if batch is not None:
            index = self._position("batch", batch)
            for name in SEQUENCE_LABELS:
                if selected[name] is not None:
                    selected[name] = (selected[name][index],)
            if self.mask is not None:
                selected["mask"] = self.mask[index : index + 1]
            if isinstance(targets := self.options.get("target"), list) and isinstance(targets[index], int):
                selected["options"] = {**self.options, "target": targets[index]}
            selected |= _select_axis(selected, "batch", index)
        if head is not None:
            index = self._head_index(head)
            selected["heads"] = (head,)
            selected |= _select_axis(selected, "head", index)
        for axis, stream in (("query", queries), ("key", keys)):
            if stream is not None:
                selected |= of_stream(selected, axis, stream)
        return type(self)(**selected)

    def _head_index(self, head: int) -> int:
        size = self.sizes.get("head", 0)
        heads = tuple(range(size)) if self.heads is None else self.heads
        if "head" in self.dims and head not in heads:
            accepted = f"0 to {size - 1}" if heads == tuple(range(size)) else ", ".join(map(str, heads))
            raise InputError(f"{self.head_kind} {head} is not in this result; it has {accepted}.")
        return self._position("head", heads.index(head) if head in heads else 0)

    def _layer_index(self, layer: int | str) -> int:
        if isinstance(layer, str):
            if layer not in self.layers:
                raise OptionError(f"This result has no layer {layer!r}{nearest(layer, self.layers)}")
            layer = self.layers.index(layer)
        return self._position("layer", layer)

    def _position(self, axis: str, index: int) -> int:
        if axis not in self.dims:
            raise InputError(f"This result has no {axis} axis to select from; its axes are {', '.join(self.dims)}.")
        size = self.sizes[axis]
        if not -size <= index < size:
            raise InputError(f"{axis} {index} is out of range: this result has {size}, so 0 to {size - 1}.")
        return index % size

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result as one safetensors file with a JSON header and return its path.

        The write is atomic and replaces an older file of that name.

        Raises `ResultFileError` if the folder does not exist, or if `path` is a folder.
        """
        tensors = {
            "scores": self.scores,
            **{f"extras/{name}": tensor for name, tensor in self.extras.items()},
        }
        if self.mask is not None:
            tensors["mask"] = self.mask
        return resultfile.write(path, self._header(), tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a result written by `save`; the tensors are on the CPU.

        Raises `ResultFileError` if the file does not exist, is damaged, has another format or version, or holds labels
        that contradict its tensors.
        """
        header, tensors = resultfile.read(path)
        extras = {name.removeprefix("extras/"): t for name, t in tensors.items() if name.startswith("extras/")}
        values = {name: getattr(header, name) for name in Header.model_fields}
        try:
            return cls(scores=tensors["scores"], mask=tensors.get("mask"), extras=extras, **values)
        except InputError as error:
            raise ResultFileError(f"The labels and the tensors of {path} contradict each other: {error}") from error

    def to_xarray(self) -> "xarray.DataArray":
        """Return the scores as a DataArray with named axes.

        Coordinates: layer names and kinds, indices of heads, token texts (`query_token`, `key_token`), `real` (False
        at padding) and `sink` (True at attention sinks). All other labels are attributes, with mappings as JSON.

        Raises `MissingExtraError` if xarray is missing.
        """
        package = import_extra("xarray", "xarray")
        coordinates: dict[str, Any] = {
            axis: np.arange(size) for axis, size in self.sizes.items() if axis != "layer" or not self.layers
        }
        if "head" in self.dims and self.heads is not None:
            coordinates["head"] = list(self.heads)
        if "layer" in self.dims and self.layers:
            coordinates["layer"] = list(self.layers)
            if self.kinds:
                coordinates["kind"] = ("layer", list(self.kinds))

        def by_sequence(axis: str, values: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
            return (("batch", axis), values) if "batch" in self.dims else ((axis,), values[0])

        if self.mask is not None:
            coordinates["real"] = by_sequence("key", self.mask.cpu().numpy())
        if any(self.sinks or ()):
            coordinates["sink"] = by_sequence("key", self._sink_array())
        for axis in ("query", "key"):
            if (tokens := self._axis_tokens(axis)) is not None:
                coordinates[f"{axis}_token"] = by_sequence(axis, np.array(tokens, dtype=object))
        attributes = {
            name: json.dumps(value) if isinstance(value, dict) else value
            for name, value in self._header().model_dump(mode="python").items()
            if name not in ("dims", *SEQUENCE_LABELS, "layers", "kinds", "heads") and value is not None
        }
        return package.DataArray(score_array(self), coords=coordinates, dims=self.dims, name="score", attrs=attributes)

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return the scores in long format, one row per score.

        Columns: those of `layer`, `kind`, `batch`, `head`, `query`, `query_token`, `key`, `key_token` and `sink` (True
        at attention sinks) that the result has, and `score`. Positions index the scores' axes, and heads are those of
        the layer; padded positions are omitted.

        Raises `MissingExtraError` if pandas is missing.
        """
        package = import_extra("pandas", "xarray")
        scores = score_array(self)
        positions = dict(zip(self.dims, (axis.ravel() for axis in np.indices(scores.shape)), strict=True))
        sequence = positions.get("batch", np.zeros(scores.size, dtype=int))
        columns: dict[str, Any] = {}
        for axis, position in positions.items():
            columns[axis] = position
            if axis == "layer" and self.layers:
                columns["layer"] = np.array(self.layers, dtype=object)[position]
                if self.kinds:
                    columns["kind"] = np.array(self.kinds, dtype=object)[position]
            if axis == "head" and self.heads is not None:
                columns["head"] = np.array(self.heads)[position]
            if (tokens := self._axis_tokens(axis)) is not None:
                columns[f"{axis}_token"] = np.array(tokens, dtype=object)[sequence, position]
        if any(self.sinks or ()):
            columns["sink"] = self._sink_array()[sequence, positions["key"]]
        columns["score"] = scores.ravel()
        frame = package.DataFrame(columns)
        if self.mask is None:
            return frame
        real = self.mask.cpu().numpy()
        both_real = real[sequence, positions["key"]]
        if self.queries_are_keys:
            both_real &= real[sequence, positions["query"]]
        return frame[both_real].reset_index(drop=True)

    @property
    def queries_are_keys(self) -> bool:
        """Whether the tokens of the query axis are those of the key axis, in the same order."""
        if "query" not in self.dims or self.sizes["query"] != self.sizes["key"]:
            return False
        return not self.streams or self.streams["query"] == self.streams["key"]

    def _sink_array(self) -> Bool[np.ndarray, "batch key"]:
        keys = np.arange(self.sizes["key"])
        return np.stack([np.isin(keys, row) for row in self.sinks or ()])

    def _axis_tokens(self, axis: str) -> Sequence[Sequence[str]] | None:
        if axis == "query" and self.query_tokens is not None:
            return self.query_tokens
        return self.tokens if axis == "key" or (axis == "query" and self.queries_are_keys) else None


def count_kinds(kinds: Sequence[str]) -> str:
    """Return the kinds of mixers with their number of layers: 'softmax attention x2, diagonal decay'."""
    return ", ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in Counter(kinds).items())


def score_array(result: Scores) -> np.ndarray:
    """Return the scores as a NumPy array; float16 and bfloat16 (which NumPy lacks) become float32."""
    scores = result.scores.cpu()
    return (scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores).numpy()


def largest_error(errors: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the layer with the largest error and that error, None without any; a NaN counts as the largest."""
    return max(errors.items(), key=lambda entry: float("inf") if entry[1] != entry[1] else entry[1], default=None)


def _rebuild(kind: type[Scores], values: dict[str, Any]) -> Scores:
    return kind(**values)


def axes_text(result: Scores) -> str:
    """Return the axes of the scores with their sizes: 'layer 2, batch 1, key 48'."""
    notes = {"head": " (channels)" if result.head_kind == "channel" else ""}
    for axis, counts in result.streams.items():
        if len(counts) > 1:
            notes[axis] = f" ({', '.join(f'{stream} {count}' for stream, count in counts.items())})"
    return ", ".join(f"{name} {size}{notes.get(name, '')}" for name, size in result.sizes.items())


def extra_dims(name: str, dims: tuple[str, ...], shape: Sequence[int], extra: Sequence[int]) -> tuple[str, ...] | None:
    """Return the axes of an extra of shape `extra`: `dims`, those without key, or without head and key; else None.

    `shape` is that of the scores, with the axes `dims`. Composed layers have extras with an axis of steps, which is
    none of `dims`.
    """
    if name in LAYER_EXTRAS:
        return None
    sizes = dict(zip(dims, shape, strict=True))
    for left_out in ((), ("key",), ("head", "key")):
        axes = tuple(axis for axis in dims if axis not in left_out)
        if tuple(extra) == tuple(sizes[axis] for axis in axes):
            return axes
    return None


def _select_axis(values: Mapping[str, Any], axis: str, index: int) -> dict[str, Any]:
    dims: tuple[str, ...] = values["dims"]
    extras = {}
    for name, tensor in values["extras"].items():
        axes = extra_dims(name, dims, values["scores"].shape, tensor.shape)
        if axes is not None:
            extras[name] = tensor.select(axes.index(axis), index) if axis in axes else tensor
    return {
        "dims": tuple(name for name in dims if name != axis),
        "scores": values["scores"].select(dims.index(axis), index),
        "extras": extras,
    }
