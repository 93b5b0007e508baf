"""`ModelComparison`: the measurements of models side by side on texts without known answers, with their tables."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch

from unilinattn.analysis.pictures import text_table
from unilinattn.analysis.similarity import LayerSimilarity
from unilinattn.analysis.statistics import STATISTICS, LayerStatistics
from unilinattn.errors import OptionError, nearest
from unilinattn.evaluation.perturbation import PerturbationCurve
from unilinattn.results.comparison import Comparison
from unilinattn.results.scores import count_kinds
from unilinattn.viz.blocks import cell_text

RANDOM = "random"
"""Row of the deletion curve of random orders, to compare with."""

DRAWS = 4
"""Random orders of a text, over which the row `RANDOM` is averaged."""


WIDTH = 118

Row = tuple[object, ...]


@dataclass(frozen=True)
class ModelMeasurements:
    """The measurements of one model on all texts.

    Attributes:
        host: class of the model.
        layers: names of its layers.
        kinds: kind of mixer of each layer.
        tokens: number of tokens of each text.
        reconstruction_error: ||op(x) - y|| / ||y|| by layer, the worst text; None for a layer whose adapter covers only
            its core.
        statistics: statistics of each layer's maps, averaged over heads and over the rows of all texts; or a message on
            why the model has none.
        deletion: the deletion curve of each method, with an axis of texts; or a message on why the model has none.
        versions: package versions by name.
    """

    host: str
    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    tokens: tuple[int, ...]
    reconstruction_error: Mapping[str, float | None]
    statistics: tuple[LayerStatistics, ...] | str
    deletion: Mapping[str, PerturbationCurve | str]
    versions: Mapping[str, str]

    @property
    def worst_error(self) -> float | None:
        """The largest reconstruction error of a layer, None if no layer has one; a NaN counts as the largest."""
        return worst(self.reconstruction_error.values())


@dataclass(frozen=True, repr=False)
class ModelComparison:
    """Models side by side on texts.

    Attributes:
        texts: the texts.
        models: the measurements of each model.
        similarity: similarity of the maps of every two layers, averaged over the rows of a text and then over the texts
            that `compared` counts; NaN for layers of models that were never compared. None if no model has maps.
        compared: number of texts on which the maps of two models were compared: those that both models read as the same
            tokens, at the same positions.
        not_compared: a message for each model without maps that can be compared.
        shown: the results on the first text, by model and method; None if no method covers any of the models.
        scope: scope of the maps.
        masking: the values in place of a removed token.
    """

    texts: tuple[str, ...]
    models: Mapping[str, ModelMeasurements]
    similarity: LayerSimilarity | None
    compared: Mapping[tuple[str, str], int]
    not_compared: Mapping[str, str]
    shown: Comparison | None
    scope: str
    masking: str

    def __repr__(self) -> str:
        """Show the tables, and what was not measured."""
        tables = [_text(rows(self)) for rows in (model_rows, layer_rows, similarity_rows, area_rows)]
        return "\n\n".join([*tables, *(textwrap.fill(remark, WIDTH) for remark in remarks(self))])

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
        pairs = torch.tensor([(a, b) for a in rows for b in columns if a != b]).view(-1, 2).T
        if not pairs.numel():
            return None
        found = self.similarity
        return float(found.rank_correlation[tuple(pairs)].mean()), float(found.divergence[tuple(pairs)].mean())

    def _keys(self, name: str) -> list[str]:
        assert self.similarity is not None
        own = [f"{name}: {layer}" for layer in self.models[name].layers]
        return [key for key in self.similarity.names if key in own]


def worst(errors: Iterable[float | None]) -> float | None:
    """Return the largest error, a NaN if there is one; None without errors."""
    measured = [error for error in errors if error is not None]
    return max(measured, key=lambda error: float("inf") if error != error else error, default=None)


def _text(rows: Iterable[Row]) -> str:
    head, *lines = rows
    # Names come before the numbers.
    texts = next((place for place, cell in enumerate(lines[0]) if not isinstance(cell, str)), len(head))
    return text_table([str(name) for name in head], [[cell_text(cell) for cell in row] for row in lines], texts=texts)


def model_rows(found: ModelComparison) -> Iterator[Row]:
    """Yield the head and a row for each model."""
    yield "model", "class", "mixers", "tokens", "worst error"
    for name, one in found.models.items():
        yield name, one.host, count_kinds(one.kinds), sum(one.tokens), _or_dash(one.worst_error)


def layer_rows(found: ModelComparison) -> Iterator[Row]:
    """Yield the head and a row for each layer, its statistics averaged over heads."""
    yield "model", "layer", "mixer", "error", *STATISTICS
    for name, one in found.models.items():
        measured = {} if isinstance(one.statistics, str) else {each.layer: each for each in one.statistics}
        for layer, kind in zip(one.layers, one.kinds, strict=True):
            each = measured.get(layer)
            values = ("-" if each is None else float(getattr(each, key).mean()) for key in STATISTICS)
            yield name, layer, kind, _or_dash(one.reconstruction_error[layer]), *values


def similarity_rows(found: ModelComparison) -> Iterator[Row]:
    """Yield the head and a row for each pair of models."""
    yield "maps of", "and of", "texts", "rank correlation", "divergence"
    for first, second in combinations_with_replacement(found.models, 2):
        values = found.between(first, second) or ("-", "-")
        yield first, "its other layers" if first == second else second, found.compared.get((first, second), 0), *values


def area_rows(found: ModelComparison) -> Iterator[Row]:
    """Yield the head and a row for each method, with the areas of its deletion curves."""
    yield "area of deletion", *found.models
    rows = dict.fromkeys(row for one in found.models.values() for row in one.deletion)
    for row in sorted(rows, key=lambda row: row != RANDOM):
        curves = (one.deletion.get(row) for one in found.models.values())
        yield row, *(each.area if isinstance(each, PerturbationCurve) else "-" for each in curves)


def remarks(found: ModelComparison) -> Iterator[str]:
    """Yield what was not measured, and why."""
    for name, one in found.models.items():
        if isinstance(one.statistics, str):
            yield f"No statistics of {name}: {one.statistics}"
        for row, reason in one.deletion.items():
            if isinstance(reason, str):
                yield f"No {row} of {name}: {reason}"
    for name, reason in found.not_compared.items():
        yield f"No similarity of {name}: {reason}"
    for first, second in combinations_with_replacement(found.models, 2):
        count, most = found.compared.get((first, second), 0), len(found.texts)
        if count < most and not {first, second} & found.not_compared.keys():
            yield (
                f"The maps of {first} and {second} are compared on {count} of {most} texts, those that both tokenizers "
                "divide into the same tokens: elsewhere a position is not the same token."
            )


def _or_dash(value: float | None) -> float | str:
    return "-" if value is None else value
