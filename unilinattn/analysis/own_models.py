"""Models side by side on texts or images without known answers: errors, maps, deletion curves."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unilinattn.analysis.own_inputs import Images, Samples, Texts, patch_text, picture_read, predicted
from unilinattn.analysis.own_results import DRAWS, RANDOM, ImageResults, ModelComparison, ModelMeasurements, worst
from unilinattn.analysis.similarity import LayerSimilarity, layer_similarity
from unilinattn.analysis.statistics import STATISTICS, LayerStatistics, map_statistics
from unilinattn.errors import InputError, OptionError, UncoveredError, nearest
from unilinattn.evaluation.masking import Masking
from unilinattn.evaluation.perturbation import TENTHS, PerturbationCurve, PerturbationTest
from unilinattn.memory import max_memory as limited_to
from unilinattn.methods.run import COMPOSED, explain
from unilinattn.progress import bars
from unilinattn.progress import progress as steps
from unilinattn.registry import list_methods
from unilinattn.registry import method as registered
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

METHODS = ("logit", "raw", "rollout", "attribution", "latim", "alti")
"""Default methods of `compare_models`."""

SHOWN_IMAGES = 6
"""Largest number of images whose results are kept for the page."""


def compare_models(
    models: Mapping[str, nn.Module | tuple[nn.Module, Any]],
    texts: str | Sequence[str] | None = None,
    *,
    images: Any = None,
    processor: Any = None,
    methods: Sequence[str] = METHODS,
    scope: str = "core",
    masking: Masking = "zero",
    seed: int = 0,
    max_memory: int | None = None,
    progress: bool = True,
) -> ModelComparison:
    """Measure models side by side on texts or images for which no answer is known.

    Each text is run by itself. Every method explains the model's own prediction after the last token; a method that
    keeps layers is averaged over them, and `alti` also has a row composed over layers. The tokens before the last one
    are then removed in the order of their scores (see `PerturbationTest.deletion`). For an image the predicted class is
    explained, at the class token for methods without a logit, and patches of the image are removed.

    All models are held at once, and the maps of one text at a time. Takes a run of each model for each text, method and
    fraction of the deletion curve in addition to the methods.

    Args:
        models: by name a causal language model and its tokenizer, or for images a model with logits of classes and its
            processor; a model by itself has the `processor` of all.
        texts: a text, or several, each of two tokens or more.
        images: the path of a folder of images, or an image or several, as in `trace`.
        processor: the processor of images for models that are given without one.
        methods: names of methods.
        scope: scope of the maps whose statistics and similarity are measured.
        masking: the values in place of a removed token's embedding, "zero" or "mean", or in place of the pixels of a
            removed patch, as the model reads them: "zero", "mean" or "blur".
        seed: seed of the random orders.
        max_memory: as in `explain`.
        progress: as in `explain`.

    Raises `InputError`, with the text or image and the model, for a text of fewer than two tokens, for inputs that do
    not fit a model and for files that are no images, `OptionError` for an unknown method or scope and for both texts
    and images, and the errors of `explain`. A method or a measurement that does not cover a model is reported in its
    place.
    """
    if (texts is None) == (images is None):
        got = "neither" if texts is None else "both"
        raise OptionError(f"models are compared on texts or on images, and {got} came; give texts=... or images=...")
    pairs = _pairs(models, "tokenizer" if images is None else "processor", processor)
    _check(methods)
    samples: Samples
    if images is not None:
        samples = Images.of(images)
    else:
        assert texts is not None
        samples = Texts((texts,) if isinstance(texts, str) else tuple(texts))
    running = {name: _Running(name, *pair, samples, masking, scope, seed) for name, pair in pairs.items()}
    similarity = _Similarity(scope)
    with limited_to(max_memory), bars(progress):
        for number, _ in enumerate(steps(samples.names, f"{samples.unit}s")):
            traces = {name: one.traced(number) for name, one in running.items()}
            for one in running.values():
                one.add(traces[one.name], methods)
            aligned = {name: samples.alignment(found, name, running[name].reader) for name, found in traces.items()}
            similarity.add({name: (found, *aligned[name]) for name, found in traces.items()})
    measured = {name: one.measurements() for name, one in running.items()}
    count = min(len(samples.names), SHOWN_IMAGES if isinstance(samples, Images) else 1)
    shown = [{name: one.shown[at] for name, one in running.items() if one.shown[at]} for at in range(count)]
    return ModelComparison(
        texts=samples.names if isinstance(samples, Texts) else (),
        images=samples.names if isinstance(samples, Images) else (),
        models=measured,
        similarity=similarity.mean(measured),
        compared=similarity.counts,
        not_compared=similarity.refused,
        shown=Comparison(shown[0]) if shown[0] else None,
        on_images=tuple(
            ImageResults(
                name,
                Comparison(results) if results else None,
                {model: one.read[at] for model, one in running.items()},
                {model: one.predicted[at] for model, one in running.items()},
            )
            for at, (name, results) in enumerate(zip(samples.names, shown, strict=False))
            if isinstance(samples, Images)
        ),
        scope=scope,
        masking=masking,
    )


def _pairs(models: Any, reader: str, shared: Any) -> dict[str, tuple[nn.Module, Any]]:
    """Return the models with their readers, tokenizers or processors."""
    if not isinstance(models, Mapping) or not models:
        raise InputError(f'models is empty or no mapping; give {{"mamba": (model, {reader}), ...}}.')
    pairs = {}
    for name, given in models.items():
        pair = (given, shared) if isinstance(given, nn.Module) and shared is not None else given
        if not isinstance(pair, tuple) or len(pair) != 2:
            more = ", or also processor=..." if reader == "processor" else ""
            raise InputError(f"models[{name!r}] is a {type(given).__name__}; give a pair (model, {reader}){more}.")
        pairs[name] = pair
    if shared is not None and reader == "tokenizer":
        raise OptionError("processor is for images; texts have the tokenizers of `models`. Leave it out.")
    return pairs


def _check(methods: Any) -> None:
    if isinstance(methods, str) or not methods:
        raise OptionError(f"methods={methods!r}; give a list of method names" + nearest(methods, list_methods()))
    for name in methods:
        registered(name)


@dataclass
class _Running:
    """One model and its measurements on the texts or images so far."""

    name: str
    host: nn.Module
    reader: Any
    samples: Samples
    masking: Masking
    scope: str
    seed: int
    first: Trace | None = None
    tokens: list[int] = field(default_factory=list)
    errors: dict[str, float | None] = field(default_factory=dict)
    statistics: list[tuple[LayerStatistics, ...]] = field(default_factory=list)
    unmeasured: str | None = None
    curves: dict[str, list[PerturbationCurve]] = field(default_factory=dict)
    uncovered: dict[str, str] = field(default_factory=dict)
    shown: list[dict[str, Attribution]] = field(default_factory=list)
    read: list[np.ndarray] = field(default_factory=list)
    predicted: list[str] = field(default_factory=list)

    def traced(self, number: int) -> Trace:
        """Trace a text or an image, which is named in errors."""
        return self.samples.traced(number, self.name, self.host, self.reader)

    def add(self, found: Trace, methods: Sequence[str]) -> None:
        """Add the measurements on one text or image."""
        self.first = self.first or found
        self.tokens.append(found.layers[-1].output.shape[1])
        is_image = isinstance(self.samples, Images)
        if len(self.shown) < (SHOWN_IMAGES if is_image else 1):
            self.shown.append({})
            if is_image:
                self.read.append(picture_read(found, self.reader))
                self.predicted.append(predicted(found))
        target = self.samples.target(found)
        for name, layer in zip(unique(layer.name for layer in found.layers), found.layers, strict=True):
            self.errors[name] = worst([self.errors.get(name), _error(layer)])
        if self.unmeasured is None:
            try:
                self.statistics.append(map_statistics(found, scope=self.scope).models[found.model])
            except (UncoveredError, InputError) as reason:
                self.unmeasured = str(reason)
        for name in methods:
            self._explain(found, name, name, target, {})
            if name == COMPOSED.name:
                self._explain(found, f"{name} (composed)", name, target, COMPOSED.given)
        for draw in range(DRAWS):
            # Equal scores are removed in a random order.
            self._delete(found, RANDOM, torch.zeros(1, self.tokens[-1]), self.seed + draw)

    def _explain(self, found: Trace, row: str, method: str, target: Target | None, options: Mapping[str, Any]) -> None:
        if row in self.uncovered:
            return
        try:
            result = explain(found, method=method, target=target, **options)
            if "query" in result.dims:
                raise UncoveredError(f"the class logits of {found.model} read several tokens, so no row is explained.")
        except UncoveredError as reason:
            self.uncovered[row] = str(reason)
            return
        if len(self.tokens) == len(self.shown):
            self.shown[-1][row] = result
        self._delete(found, row, result.scores.mean(0) if "layer" in result.dims else result.scores, self.seed)

    def _delete(self, found: Trace, row: str, scores: Tensor, seed: int) -> None:
        """Add the deletion curve of scores (batch, key) to a row."""
        try:
            units, candidates = self.samples.units(found, scores)
            test = PerturbationTest(
                self.host,
                found.arguments,
                units,
                masking=self.masking,
                labels=found.explained_logit.prediction(-1),
                valid=candidates,
                seed=seed,
            )
        except (InputError, UncoveredError) as reason:
            self.uncovered[row] = str(reason)
            return
        self.curves.setdefault(row, []).append(test.deletion())

    def measurements(self) -> ModelMeasurements:
        """Return the means over the texts or images."""
        assert self.first is not None
        rows: dict[str, PerturbationCurve | str] = {}
        for row, curves in self.curves.items():
            values = torch.cat([curve.values for curve in curves])
            if row == RANDOM:
                # The draws of a text follow each other.
                values = values.view(-1, DRAWS, values.shape[-1]).mean(1)
            rows[row] = PerturbationCurve(TENTHS, values)
        layers = self.first.layers
        return ModelMeasurements(
            host=self.first.model,
            layers=unique(layer.name for layer in layers),
            kinds=tuple(layer.kind for layer in layers),
            tokens=tuple(self.tokens),
            patches=patch_text(self.first),
            reconstruction_error=self.errors,
            statistics=self.unmeasured or tuple(map(_over_texts, zip(*self.statistics, strict=True))),
            deletion={**rows, **self.uncovered},
            versions=self.first.versions,
        )


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return names with the number of a repetition behind it: a module that is called twice makes two layers."""
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name} (call {seen[name]})")
    return tuple(out)


def _error(layer: Layer) -> float | None:
    try:
        return layer.reconstruction_error()
    except UncoveredError:
        return None


def _over_texts(texts: Sequence[LayerStatistics]) -> LayerStatistics:
    """Return the statistics of a layer, averaged over the rows of all texts."""
    rows = sum(each.rows for each in texts)
    means = (sum(getattr(each, name) * each.rows for each in texts) / rows for name in STATISTICS)
    return LayerStatistics(texts[0].layer, rows, *means)


@dataclass
class _Similarity:
    """Sums of the similarities of layers over texts or images, for models that read one as the same tokens."""

    scope: str
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    sums: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def add(self, traces: Mapping[str, tuple[Trace, Hashable, Sequence[int] | None]]) -> None:
        """Add the similarities on one text or image, given each model's trace and `alignment`."""
        groups: dict[Hashable, dict[str, Trace]] = {}
        for name, (found, alignment, _) in traces.items():
            if name not in self.refused:
                groups.setdefault(alignment, {})[name] = found
        orders = {name: order for name, (_, _, order) in traces.items() if order is not None}
        for group in groups.values():
            if (similar := self._measured(group, orders)) is None:
                continue
            # The names of a single model's layers have no model in front.
            (only, *others) = group
            names = unique(similar.names if others else [f"{only}: {name}" for name in similar.names])
            for i, a in enumerate(names):
                for j, b in enumerate(names):
                    pair = torch.stack((similar.rank_correlation[i, j], similar.divergence[i, j]))
                    self.sums[a, b] = self.sums.get((a, b), torch.zeros_like(pair)) + pair
            for first, second in product(group, group):
                self.counts[first, second] = self.counts.get((first, second), 0) + 1

    def _measured(self, group: dict[str, Trace], orders: Mapping[str, Sequence[int]]) -> LayerSimilarity | None:
        """Return the similarities in a group, from which models without maps that fit are removed."""
        try:
            return layer_similarity(group, scope=self.scope, orders=orders)
        except (UncoveredError, InputError) as reason:
            if len(group) == 1:
                self.refused[group.popitem()[0]] = str(reason)
                return None
            covered = {
                name: found for name, found in group.items() if self._measured({name: found}, orders) is not None
            }
            if len(covered) == len(group):
                raise
        for name in group.keys() - covered.keys():
            del group[name]
        return self._measured(group, orders) if group else None

    def mean(self, models: Mapping[str, ModelMeasurements]) -> LayerSimilarity | None:
        """Return the means over the texts on which two models were compared."""
        keys = {
            f"{name}: {layer}": name
            for name, one in models.items()
            for layer in one.layers
            if name not in self.refused and any(f"{name}: {layer}" in pair for pair in self.sums)
        }
        if not keys:
            return None
        values = torch.full((2, len(keys), len(keys)), torch.nan, dtype=torch.float64)
        for i, (a, first) in enumerate(keys.items()):
            for j, (b, second) in enumerate(keys.items()):
                if (a, b) in self.sums:
                    values[:, i, j] = self.sums[a, b] / self.counts[first, second]
        return LayerSimilarity(tuple(keys), *values)
