"""The labelled, frozen results that every method returns, and their file format."""

import importlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn import labels, resultfile
from unilinattn.errors import InputError, OptionError, ResultFileError, UnilinattnError, nearest
from unilinattn.labels import Header

if TYPE_CHECKING:
    import pandas
    import xarray
    from matplotlib.figure import Figure

Value = TypeVar("Value")


class MissingExtraError(UnilinattnError, ImportError):
    """A feature needs a package that only an optional extra installs; the message names the extra."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say which extra brings it.

    Errors: `MissingExtraError` if the package is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"This needs {package}, which is not installed: pip install 'unilinattn[{extra}]'"
        ) from error


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Attribution:
    """The scores of one method on one input, frozen and labelled with all that is needed to read them.

    `scores` has the axes that `dims` names, out of layer, batch, query, key in this order; without a layer
    axis `layers` names the layers that were composed, without a batch axis the result is one sequence.
    `tokens` and `mask` (True at real tokens) follow the key axis, padding included. `grid` is the (rows,
    columns) of an image's patches. `kinds` names each layer's kind of mixer, `left_out` the opaque layers that no
    adapter knows. `reconstruction_error` maps a
    layer's name to ||op(x) - y|| / ||y|| against what the host computed. `completeness_gap` is the method's
    own. `extras` holds further tensors such as the bias's share; they follow the axes of `dims` without key.

    Errors: `InputError` if a label does not fit the scores.
    """

    scores: Float[Tensor, "*axes"]
    dims: tuple[str, ...]
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scope: str | None = None
    tokens: Sequence[Sequence[str]] | None = None
    grid: tuple[int, int] | None = None
    mask: Bool[Tensor, "batch length"] | None = None
    layers: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    model: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    reconstruction_error: Mapping[str, float] = field(default_factory=dict)
    completeness_gap: float | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        header = self._header()
        for name in Header.model_fields:
            value = getattr(header, name)
            object.__setattr__(self, name, MappingProxyType(value) if isinstance(value, dict) else value)
        labels.check_tensors(self.scores, self.mask, self.extras)
        labels.check_fit(header, tuple(self.scores.shape), None if self.mask is None else tuple(self.mask.shape))
        object.__setattr__(self, "scores", self.scores.detach())
        extras = {name: tensor.detach() for name, tensor in self.extras.items()}
        object.__setattr__(self, "extras", MappingProxyType(extras))

    def _header(self) -> Header:
        return labels.validated({name: getattr(self, name) for name in Header.model_fields})

    def __reduce__(self) -> tuple[Any, ...]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        plain = {name: dict(v) if isinstance(v, MappingProxyType) else v for name, v in values.items()}
        return _rebuild, (plain,)

    @property
    def sizes(self) -> dict[str, int]:
        """The length of each axis by its name."""
        return dict(zip(self.dims, self.scores.shape, strict=True))

    @property
    def worst_error(self) -> tuple[str, float] | None:
        """The layer with the largest reconstruction error and that error, or None if no error was recorded.

        A NaN counts as the largest.
        """
        return max(self.reconstruction_error.items(), key=_error_order, default=None)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        scope = f", scope {self.scope}" if self.scope else ""
        lines = [f"Attribution: {self.method}{f' of {self.model}' if self.model else ''}{scope}"]
        lines.append(f"  scores: {axes} ({str(self.scores.dtype).removeprefix('torch.')})")
        if self.layers:
            lines.append(f"  layers: {len(self.layers)} ({count_kinds(self.kinds) or 'kinds not recorded'})")
        if self.left_out:
            lines.append(f"  LEFT OUT, no adapter knows them: {', '.join(self.left_out)}")
        if self.options:
            lines.append("  options: " + ", ".join(f"{name}={value!r}" for name, value in self.options.items()))
        if (worst := self.worst_error) is not None:
            lines.append(f"  reconstruction error: {worst[1]:.1e} at worst ({worst[0]})")
        if self.completeness_gap is not None:
            lines.append(f"  completeness gap: {self.completeness_gap:.1e}")
        return "\n".join(lines)

    def select(self, *, layer: int | str | None = None, batch: int | None = None) -> "Attribution":
        """Return the result of one layer (by position or name), of one sequence, or both, without that axis.

        Extras that follow the axes of `dims` without key are selected alike; any other extra is left out,
        because nothing says which part of it belongs to the selection.

        Errors: `InputError` if the axis is absent or the position out of range; `OptionError` for an
        unknown name.
        """
        kept = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        if layer is not None:
            kept["layers"], kept["kinds"] = (), ()
            index = self._layer_index(layer)
            if self.layers:
                kept["layers"] = (self.layers[index],)
                kept["reconstruction_error"] = {
                    name: error for name, error in self.reconstruction_error.items() if name == self.layers[index]
                }
            if self.kinds:
                kept["kinds"] = (self.kinds[index],)
            kept |= _select_axis(kept, "layer", index)
        if batch is not None:
            index = self._position("batch", batch)
            if self.tokens is not None:
                kept["tokens"] = (self.tokens[index],)
            if self.mask is not None:
                kept["mask"] = self.mask[index : index + 1]
            kept |= _select_axis(kept, "batch", index)
        return Attribution(**kept)

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

        The file appears whole or not at all; an older file of that name is replaced.

        Errors: `ResultFileError` if the folder does not exist.
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
        """Read a result that `save` wrote; the tensors are on the CPU.

        Errors: `ResultFileError` if there is no such file, or it is truncated, not ours, or of another
        version.
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

        Coordinates: layer names and kinds, token texts (`query_token`, `key_token`) and `real` (False at
        padding); all other labels are attributes, mappings among them as JSON.

        Errors: `MissingExtraError` without xarray.
        """
        package = import_extra("xarray", "xarray")
        coordinates: dict[str, Any] = {
            axis: np.arange(size) for axis, size in self.sizes.items() if axis != "layer" or not self.layers
        }
        if "layer" in self.dims and self.layers:
            coordinates["layer"] = list(self.layers)
            if self.kinds:
                coordinates["kind"] = ("layer", list(self.kinds))
        sequence = ("batch",) if "batch" in self.dims else ()
        if self.mask is not None:
            real = self.mask.cpu().numpy()
            coordinates["real"] = ((*sequence, "key"), real if sequence else real[0])
        for axis in ("query", "key"):
            if (tokens := self._axis_tokens(axis)) is not None:
                texts = np.array(tokens, dtype=object)
                coordinates[f"{axis}_token"] = ((*sequence, axis), texts if sequence else texts[0])
        attributes = {
            name: json.dumps(value) if isinstance(value, dict) else value
            for name, value in self._header().model_dump(mode="python").items()
            if name not in ("dims", "tokens", "layers", "kinds") and value is not None
        }
        return package.DataArray(score_array(self), coords=coordinates, dims=self.dims, name="score", attrs=attributes)

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return the scores in long format, one row a score.

        Columns: `layer` and `kind`, `batch`, `query`, `query_token`, `key`, `key_token` as far as the result
        has them, and `score`. Positions count along the scores' axes; padded ones are left out.

        Errors: `MissingExtraError` without pandas.
        """
        package = import_extra("pandas", "xarray")
        scores = score_array(self)
        places = dict(zip(self.dims, (axis.ravel() for axis in np.indices(scores.shape)), strict=True))
        sequence = places.get("batch", np.zeros(scores.size, dtype=int))
        columns: dict[str, Any] = {}
        for axis, place in places.items():
            columns[axis] = place
            if axis == "layer" and self.layers:
                columns["layer"] = np.array(self.layers, dtype=object)[place]
                if self.kinds:
                    columns["kind"] = np.array(self.kinds, dtype=object)[place]
            if (tokens := self._axis_tokens(axis)) is not None:
                columns[f"{axis}_token"] = np.array(tokens, dtype=object)[sequence, place]
        columns["score"] = scores.ravel()
        frame = package.DataFrame(columns)
        if self.mask is None:
            return frame
        real = self.mask.cpu().numpy()
        kept = real[sequence, places["key"]]
        if self._square():
            kept &= real[sequence, places["query"]]
        return frame[kept].reset_index(drop=True)

    def _square(self) -> bool:
        return "query" in self.dims and self.sizes["query"] == self.sizes["key"]

    def _axis_tokens(self, axis: str) -> Sequence[Sequence[str]] | None:
        return self.tokens if axis == "key" or (axis == "query" and self._square()) else None

    def plot(self, *, batch: int = 0, expected: Bool[Tensor, "..."] | None = None) -> "Figure":
        """Draw one sequence of the result: a heat map a layer, or strips of tokens or patches for a target.

        `expected`: a pattern to outline, (batch, query, key), or (batch, key) where there is no query axis.

        Errors: `MissingExtraError` without matplotlib; `InputError` if `batch` or `expected` do not fit.
        """
        from unilinattn.viz import figures

        return figures.attribution(self, batch=batch, expected=expected)

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        batch: int | Sequence[int] = 0,
        expected: Bool[Tensor, "..."] | None = None,
    ) -> str:
        """Return the result as one self-contained HTML page, and write it to `path` if there is one.

        `batch`: the sequence or sequences to show. `expected`: a pattern to outline, as in `plot`.

        Errors: `InputError` if `batch` or `expected` do not fit.
        """
        from unilinattn.viz import html

        return _written(path, html.attribution_page(self, batch=batch, expected=expected))

    def _repr_html_(self) -> str:
        from unilinattn.viz import html

        return html.fragment(html.attribution(self))


class _Unknown(OptionError, KeyError):
    """A name that a mapping of results lacks; also a KeyError, so that `in` and `get` work."""

    __str__ = Exception.__str__


class _Named(Mapping[str, Value], Generic[Value]):
    """A read-only mapping whose error for an unknown name shows the nearest one."""

    _noun = "method"

    def __init__(self, entries: Mapping[str, Value]) -> None:
        self._entries = MappingProxyType(dict(entries))

    def __getitem__(self, name: str) -> Value:
        if name not in self._entries:
            raise _Unknown(f"There is no {self._noun} {name!r} here{nearest(name, self._entries)}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __repr__(self) -> str:
        return f"<{self._noun}s: {', '.join(self)}>"


class Comparison(_Named[Mapping[str, Attribution]]):
    """Results of several models and methods on one input; `comparison[model][method]` is an `Attribution`.

    Errors: `InputError` if it is empty or an entry is no `Attribution`.
    """

    _noun = "model"

    def __init__(self, results: Mapping[str, Mapping[str, Attribution]]) -> None:
        super().__init__({model: _Named(methods) for model, methods in results.items()})
        if not any(self.values()):
            raise InputError("A comparison needs at least one model with at least one result; it was given none.")
        for model, method, result in self.results():
            if not isinstance(result, Attribution):
                raise InputError(f"{model}, {method}: a comparison holds Attribution, not {type(result).__name__}.")

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of all methods, in the order in which the models list them."""
        return tuple(dict.fromkeys(method for methods in self.values() for method in methods))

    def results(self) -> Iterator[tuple[str, str, Attribution]]:
        """Yield (model, method, result) for every result."""
        for model, methods in self.items():
            for method, result in methods.items():
                yield model, method, result

    def table(self) -> str:
        """Return an aligned text table: a line a result, with its axes and worst reconstruction error."""
        rows = [("model", "mixers", "method", "scope", "scores", "reconstruction error")]
        for model, method, result in self.results():
            axes = ", ".join(f"{name} {size}" for name, size in result.sizes.items())
            error = f"{worst[1]:.1e}" if (worst := result.worst_error) is not None else "-"
            rows.append((model, count_kinds(result.kinds) or "-", method, result.scope or "-", axes, error))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        return f"Comparison of {len(self)} models, {len(self.methods)} methods\n{self.table()}"

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return every result's long format in one table, with the columns `model` and `method` in front.

        Errors: `MissingExtraError` without pandas.
        """
        package = import_extra("pandas", "xarray")
        frames = []
        for model, method, result in self.results():
            frame = result.to_dataframe()
            frame.insert(0, "model", model)
            frame.insert(1, "method", method)
            frames.append(frame)
        return package.concat(frames, ignore_index=True)

    def plot(self, *, batch: int = 0, expected: Bool[Tensor, "..."] | None = None) -> "Figure":
        """Draw one sequence as a grid: a column a model, a row a method and layer.

        `expected`: a pattern to outline, (batch, query, key); results without a query axis go without it.

        Errors: `MissingExtraError` without matplotlib; `InputError` if `batch` or `expected` do not fit.
        """
        from unilinattn.viz import figures

        return figures.comparison(self, batch=batch, expected=expected)

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        batch: int | Sequence[int] = 0,
        expected: Bool[Tensor, "..."] | None = None,
    ) -> str:
        """Return the comparison as one self-contained HTML page, and write it to `path` if there is one.

        `batch`: the sequence or sequences to show. `expected`: a pattern to outline, as in `plot`.

        Errors: `InputError` if `batch` or `expected` do not fit.
        """
        from unilinattn.viz import html

        return _written(path, html.comparison_page(self, batch=batch, expected=expected))

    def _repr_html_(self) -> str:
        from unilinattn.viz import html

        return html.fragment(html.comparison(self))


def count_kinds(kinds: Sequence[str]) -> str:
    """Return kinds of mixers with how many layers each has: 'softmax attention x2, diagonal decay'."""
    return ", ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in Counter(kinds).items())


def score_array(result: Attribution) -> np.ndarray:
    """Return the scores as a NumPy array; half precision, which NumPy lacks in part, becomes float32."""
    scores = result.scores.cpu()
    return (scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores).numpy()


def _error_order(entry: tuple[str, float]) -> float:
    return float("inf") if entry[1] != entry[1] else entry[1]


def _rebuild(values: dict[str, Any]) -> Attribution:
    return Attribution(**values)


def _written(path: str | os.PathLike[str] | None, page: str) -> str:
    if path is not None:
        Path(path).write_text(page, encoding="utf-8")
    return page


def _select_axis(kept: Mapping[str, Any], axis: str, index: int) -> dict[str, Any]:
    dims: tuple[str, ...] = kept["dims"]
    place = dims.index(axis)
    leading = kept["scores"].shape[:-1]
    return {
        "dims": tuple(name for name in dims if name != axis),
        "scores": kept["scores"].select(place, index),
        "extras": {
            name: tensor.select(place, index)
            for name, tensor in kept["extras"].items()
            if tensor.shape[: len(leading)] == leading
        },
    }
