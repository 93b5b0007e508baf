"""`ModelComparison`: the measurements of models on the same samples, with their tables."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from unilinattn.aligned import aligned
from unilinattn.analysis.pictures import curve_lines, draw
from unilinattn.analysis.similarity import LayerSimilarity
from unilinattn.analysis.statistics import STATISTICS, LayerStatistics
from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.evaluation.perturbation import PerturbationCurve
from unilinattn.evaluation.table import Table
from unilinattn.evaluation.trained import Counts
from unilinattn.results.comparison import Comparison
from unilinattn.results.scores import count_kinds
from unilinattn.viz.blocks import cell_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANDOM = "random"
"""Row of the deletion curve of random scores, to compare with."""

AXES = {
    "text": ("tokens removed, %", "probability of the predicted token"),
    "image": ("patches removed, %", "probability of the predicted class"),
}
"""Names of the axes of deletion curves on texts and on images, with units."""

WIDTH = 118

Row = tuple[object, ...]


@dataclass(frozen=True)
class ModelMeasurements:
    """The measurements of one model on all samples.

    Attributes:
        host: class of the model.
        layers: names of its layers.
        kinds: kind of mixer of each layer.
        tokens: number of tokens of each sample.
        patches: grid of patches and number of class tokens of an image, as a text; empty for other samples and if
            unknown.
        reconstruction_error: ||op(x) - y|| / ||y|| by layer, the worst sample; None for a layer whose adapter covers
            only its core.
        statistics: statistics of each layer's maps, averaged over heads and over the rows of all samples; or a message
            on why the model has none.
        deletion: the deletion curve of each method, with an axis of samples, or a message on why the model has none;
            empty for samples with known answers.
        versions: package versions by name.
        accuracy: share of right answers, from 0 to 1; None without known answers.
        selection: the metric that chose the layer of each method by layer, on other samples.
    """

    host: str
    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    tokens: tuple[int, ...]
    patches: str
    reconstruction_error: Mapping[str, float | None]
    statistics: tuple[LayerStatistics, ...] | str
    deletion: Mapping[str, PerturbationCurve | str]
    versions: Mapping[str, str]
    accuracy: float | None = None
    selection: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def worst_error(self) -> float | None:
        """The largest reconstruction error of a layer, None if no layer has one; a NaN counts as the largest."""
        return worst(self.reconstruction_error.values())

    @property
    def curves(self) -> dict[str, PerturbationCurve]:
        """The deletion curve of each method that has one."""
        return {row: curve for row, curve in self.deletion.items() if isinstance(curve, PerturbationCurve)}


@dataclass(frozen=True, eq=False)
class ImageResults:
    """The results of all models on one image.

    Attributes:
        name: the image's file name.
        results: the results by model and method; None if no method covers any of the models.
        read: the image as each model read it, resized and cropped by its processor, uint8 (height, width, channel).
        predicted: label and probability of the class that each model predicts.
    """

    name: str
    results: Comparison | None
    read: Mapping[str, UInt8[np.ndarray, "height width channel"]]
    predicted: Mapping[str, str]


@dataclass(frozen=True, repr=False)
class ModelComparison:
    """Models side by side on texts, images or the sequences of a task.

    Attributes:
        models: the measurements of each model.
        table: the metrics of each model, method and sample, as `unilinattn.evaluate` returns them.
        similarity: similarity of the maps of every two layers, averaged over the rows of a sample and then over those
            that `compared` counts; NaN for layers of models that were never compared. None if no model has maps.
        compared: number of samples on which the maps of two models were compared: those that both models read as the
            same tokens, or images of which both have the same grid of patches and number of class tokens.
        not_compared: a message for each model without maps that can be compared.
        shown: the results on the first sample, by model and method; None if no method covers any model.
        scope: scope of the maps.
        texts: the texts, empty for other samples.
        images: the names of the images, empty for other samples.
        on_images: the results on the first images.
        masking: the values in place of a removed token.
        task: name of the task; empty for texts and images.
        counts: numbers of a task's sequences.
        expected: the known answer of a task's first sequence.
    """

    models: Mapping[str, ModelMeasurements]
    table: Table
    similarity: LayerSimilarity | None
    compared: Mapping[tuple[str, str], int]
    not_compared: Mapping[str, str]
    shown: Comparison | None
    scope: str
    texts: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    on_images: tuple[ImageResults, ...] = ()
    masking: str = "zero"
    task: str = ""
    counts: Counts | None = None
    expected: Bool[Tensor, "query key"] | None = None

    @property
    def unit(self) -> str:
        """The kind of the samples: "text", "image" or "sequence"."""
        return "sequence" if self.task else "image" if self.images else "text"

    @property
    def samples(self) -> tuple[str, ...]:
        """The texts, or the names of the images or sequences."""
        return self.images or self.texts or tuple(dict.fromkeys(row["sample"] for row in self.table))

    def __repr__(self) -> str:
        """Show the tables and the missing measurements."""
        tables = [_text(rows(self)) for rows in (model_rows, layer_rows, similarity_rows)]
        return "\n\n".join([*tables, str(self.table), *(textwrap.fill(remark, WIDTH) for remark in remarks(self))])

    def between(self, first: str, second: str) -> tuple[float, float] | None:
        """Return the rank correlation and the divergence of two models, or of the layers of one.

        They are averaged over all pairs of a layer of each model; within one model, over pairs of different layers.
        None if the models were never compared, or if one model has a single layer.

        Raises `OptionError` for an unknown model.
        """
        for name in (first, second):
            if name not in self.models:
                raise OptionError(f"no model {name!r} was compared{nearest(name, self.models)}")
        if self.similarity is None or not self.compared.get((first, second)):
            return None
        names = list(self.similarity.names)
        rows, columns = ([names.index(key) for key in self._keys(name)] for name in (first, second))
        pairs = torch.tensor([(a, b) for a in rows for b in columns if a != b], device="cpu").view(-1, 2).T
        if not pairs.numel():
            return None
        correlation, divergence = self.similarity.rank_correlation, self.similarity.divergence
        return float(correlation[tuple(pairs)].mean()), float(divergence[tuple(pairs)].mean())

    def plot(self, *, model: str | None = None, ax: "Axes | None" = None) -> "Figure":
        """Draw the deletion curve of each method, the models side by side, with the random orders in the same axes.

        `model`: name of the only model to draw. `ax`: axes to draw one model into, whose figure is returned.

        Raises `MissingExtraError` if matplotlib is missing, `InputError` for one `ax` and several models, and
        `OptionError` for an unknown model.
        """
        if model is not None and model not in self.models:
            raise OptionError(f"no model {model!r} was compared{nearest(model, self.models)}")
        names = list(self.models) if model is None else [model]
        if ax is not None and len(names) > 1:
            raise InputError(f"`ax` holds one picture, but {len(names)} models were compared; choose one by `model`.")
        across, upwards = AXES[self.unit]
        panels = []
        for name in names:
            series = {row: (curve.fractions, curve.mean.tolist()) for row, curve in self.models[name].curves.items()}
            panels.append(curve_lines(series, name, across=across, upwards=upwards, baseline=RANDOM))
        return draw(ax, panels, columns=3, size=(3.6, 3.0))

    def _keys(self, name: str) -> list[str]:
        assert self.similarity is not None
        keys = [f"{name}: {layer}" for layer in self.models[name].layers]
        return [key for key in self.similarity.names if key in keys]


def worst(errors: Iterable[float | None]) -> float | None:
    """Return the largest error, a NaN if there is one; None without errors."""
    measured = [error for error in errors if error is not None]
    return max(measured, key=lambda error: float("inf") if error != error else error, default=None)


def _text(rows: Iterable[Row]) -> str:
    head, *lines = rows
    # Names come before the numbers.
    names = next((column for column, cell in enumerate(lines[0]) if not isinstance(cell, str)), len(head))
    return aligned([[cell_text(cell) for cell in row] for row in (head, *lines)], right=range(names, len(head)))


def model_rows(comparison: ModelComparison) -> Iterator[Row]:
    """Yield the head and a row for each model."""
    more = "patches" if comparison.images else "accuracy" if comparison.task else ""
    yield "model", "class", "mixers", *([more] if more else []), "tokens", "worst error"
    for name, model in comparison.models.items():
        value = model.patches or "unknown" if comparison.images else f"{model.accuracy or 0:.1%}"
        values = [value] if more else []
        yield name, model.host, count_kinds(model.kinds), *values, sum(model.tokens), _or_dash(model.worst_error)


def layer_rows(comparison: ModelComparison) -> Iterator[Row]:
    """Yield the head and a row for each layer, its statistics averaged over heads."""
    yield "model", "layer", "mixer", "error", *STATISTICS
    for name, model in comparison.models.items():
        measured = {} if isinstance(model.statistics, str) else {each.layer: each for each in model.statistics}
        for layer, kind in zip(model.layers, model.kinds, strict=True):
            each = measured.get(layer)
            values = ("-" if each is None else float(getattr(each, key).mean()) for key in STATISTICS)
            yield name, layer, kind, _or_dash(model.reconstruction_error[layer]), *values


def similarity_rows(comparison: ModelComparison) -> Iterator[Row]:
    """Yield the head and a row for each pair of models."""
    yield "maps of", "and of", f"{comparison.unit}s", "rank correlation", "divergence"
    for first, second in combinations_with_replacement(comparison.models, 2):
        other = "its other layers" if first == second else second
        values = comparison.between(first, second) or ("-", "-")
        yield first, other, comparison.compared.get((first, second), 0), *values


def remarks(comparison: ModelComparison) -> Iterator[str]:
    """Yield the missing measurements with their reasons."""
    for name, model in comparison.models.items():
        if isinstance(model.statistics, str):
            yield f"No statistics of {name}: {model.statistics}"
        for row, reason in model.deletion.items():
            if isinstance(reason, str):
                yield f"No {row} of {name}: {reason}"
    for name, reason in comparison.not_compared.items():
        yield f"No similarity of {name}: {reason}"
    for first, second in combinations_with_replacement(comparison.models, 2):
        count, most = comparison.compared.get((first, second), 0), len(comparison.samples)
        if count == most or {first, second} & comparison.not_compared.keys():
            continue
        if comparison.images:
            ours, theirs = (comparison.models[name].patches or "unknown patches" for name in (first, second))
            yield (
                f"The maps of {first} ({ours}) and {second} ({theirs}) are not compared: a position is not the same "
                "part of the image. Their errors, statistics and deletion curves are their own."
            )
        else:
            yield (
                f"The maps of {first} and {second} are compared on {count} of {most} texts, those that both tokenizers "
                "divide into the same tokens: elsewhere a position is not the same token."
            )


def _or_dash(value: float | None) -> float | str:
    return "-" if value is None else value
