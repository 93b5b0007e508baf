"""Models side by side on texts without known answers: errors, statistics and similarity of maps, deletion curves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.analysis.own_results import DRAWS, RANDOM, ModelComparison, ModelMeasurements, worst
from unilinattn.analysis.similarity import LayerSimilarity, layer_similarity
from unilinattn.analysis.statistics import STATISTICS, LayerStatistics, map_statistics
from unilinattn.errors import InputError, OptionError, UncoveredError, nearest
from unilinattn.evaluation.masking import Masking
from unilinattn.evaluation.perturbation import TENTHS, PerturbationCurve, PerturbationTest
from unilinattn.memory import max_memory as limited_to
from unilinattn.methods.run import COMPOSED, COMPOSED_OPTIONS, explain
from unilinattn.progress import bars
from unilinattn.progress import progress as steps
from unilinattn.registry import list_methods
from unilinattn.registry import method as registered
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.text import encoded, token_text
from unilinattn.tracing.trace import Trace, trace

METHODS = ("logit", "raw", "rollout", "attribution", "latim", "alti")
"""Default methods of `compare_models`."""


def compare_models(
    models: Mapping[str, tuple[nn.Module, Any]],
    texts: str | Sequence[str],
    *,
    methods: Sequence[str] = METHODS,
    scope: str = "core",
    masking: Masking = "zero",
    seed: int = 0,
    max_memory: int | None = None,
    progress: bool = True,
) -> ModelComparison:
    """Measure models side by side on texts for which no answer is known.

    Each text is run by itself. Every method explains the model's own prediction after the last token; a method that
    keeps layers is averaged over them, and `alti` also has a row composed over layers. The tokens before the last one
    are then removed in the order of their scores (see `PerturbationTest.deletion`).

    All models are held at once, and the maps of one text at a time. Takes a run of each model for each text, method and
    fraction of the deletion curve in addition to the methods.

    Args:
        models: a causal language model and its tokenizer by name.
        texts: a text, or several, each of two tokens or more.
        methods: names of methods.
        scope: scope of the maps whose statistics and similarity are measured.
        masking: the values in place of a removed token's embedding: "zero" or "mean".
        seed: seed of the random orders.
        max_memory: as in `explain`.
        progress: as in `explain`.

    Raises `InputError`, with the text and the model, for a text of fewer than two tokens and for texts that do not fit
    a model, `OptionError` for an unknown method or scope, and the errors of `explain`. A method or a measurement that
    does not cover a model is reported in its place.
    """
    texts = (texts,) if isinstance(texts, str) else tuple(texts)
    _check(models, texts, methods)
    running = {name: _Running(name, *pair, masking, scope, seed) for name, pair in models.items()}
    similarity = _Similarity(scope)
    with limited_to(max_memory), bars(progress):
        for number, text in enumerate(steps(texts, "texts")):
            traces = {name: one.traced(number, text) for name, one in running.items()}
            for one in running.values():
                one.add(traces[one.name], methods)
            similarity.add({name: (found, running[name].labels(found)) for name, found in traces.items()})
    shown = {name: one.shown for name, one in running.items() if one.shown}
    measured = {name: one.measurements() for name, one in running.items()}
    return ModelComparison(
        texts=texts,
        models=measured,
        similarity=similarity.mean(measured),
        compared=similarity.counts,
        not_compared=similarity.refused,
        shown=Comparison(shown) if shown else None,
        scope=scope,
        masking=masking,
    )


def _check(models: Any, texts: tuple[Any, ...], methods: Any) -> None:
    if not isinstance(models, Mapping) or not models:
        raise InputError('models is empty or no mapping; give {"mamba": (model, tokenizer), ...}.')
    for name, pair in models.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"models[{name!r}] is a {type(pair).__name__}; give a pair (model, tokenizer).")
    if not texts:
        raise InputError("there are no texts; give one or more.")
    for number, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            got = "empty" if isinstance(text, str) else f"a {type(text).__name__}"
            raise InputError(f"text {number} is {got}; give a text of two tokens or more.")
    if isinstance(methods, str) or not methods:
        raise OptionError(f"methods={methods!r}; give a list of method names" + nearest(methods, list_methods()))
    for name in methods:
        registered(name)


@dataclass
class _Running:
    """One model and its measurements on the texts so far."""

    name: str
    host: nn.Module
    tokenizer: Any
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
    shown: dict[str, Attribution] = field(default_factory=dict)

    def traced(self, number: int, text: str) -> Trace:
        """Trace a text, and name it in errors."""
        try:
            count = encoded(text, self.tokenizer).arguments["input_ids"].shape[1]
            if count < 2:
                raise InputError("it has 1 token; two or more are needed, the last of which is explained.")
            return trace(self.host, text, tokenizer=self.tokenizer)
        except InputError as error:
            raise InputError(f"text {number} with {self.name!r}: {error}") from error

    def add(self, found: Trace, methods: Sequence[str]) -> None:
        """Add the measurements on one text."""
        self.first = self.first or found
        self.tokens.append(len(self.labels(found)))
        for name, layer in zip(unique(layer.name for layer in found.layers), found.layers, strict=True):
            self.errors[name] = worst([self.errors.get(name), _error(layer)])
        if self.unmeasured is None:
            try:
                self.statistics.append(map_statistics(found, scope=self.scope).models[found.model])
            except (UncoveredError, InputError) as reason:
                self.unmeasured = str(reason)
        for name in methods:
            self._explain(found, name, name, {})
            if name == COMPOSED:
                self._explain(found, f"{name} (composed)", name, COMPOSED_OPTIONS)
        for draw in range(DRAWS):
            # Equal scores are removed in a random order.
            self._delete(found, RANDOM, torch.zeros(1, self.tokens[-1]), self.seed + draw)

    def _explain(self, found: Trace, row: str, method: str, options: Mapping[str, Any]) -> None:
        if row in self.uncovered:
            return
        try:
            result = explain(found, method=method, target=-1, **options)
        except UncoveredError as reason:
            self.uncovered[row] = str(reason)
            return
        if found is self.first:
            self.shown[row] = result
        self._delete(found, row, result.scores.mean(0) if "layer" in result.dims else result.scores, self.seed)

    def _delete(self, found: Trace, row: str, scores: Tensor, seed: int) -> None:
        """Add the deletion curve of scores (batch, key) to a row."""
        assert found.text is not None
        candidates = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
        candidates[:, -1] = False
        try:
            test = PerturbationTest(
                self.host, found.text.arguments, scores, masking=self.masking, valid=candidates, seed=seed
            )
        except InputError as reason:
            self.uncovered[row] = str(reason)
            return
        self.curves.setdefault(row, []).append(test.deletion())

    def labels(self, found: Trace) -> tuple[str, ...]:
        """Return the texts of the tokens."""
        assert found.text is not None
        return tuple(token_text(self.tokenizer, token) for token in found.text.arguments["input_ids"][0].tolist())

    def measurements(self) -> ModelMeasurements:
        """Return the means over the texts."""
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
    """Sums of the similarities of layers over texts, for models that read a text as the same tokens."""

    scope: str
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    sums: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def add(self, traces: Mapping[str, tuple[Trace, tuple[str, ...]]]) -> None:
        """Add the similarities on one text."""
        groups: dict[tuple[str, ...], dict[str, Trace]] = {}
        for name, (found, tokens) in traces.items():
            if name not in self.refused:
                groups.setdefault(tokens, {})[name] = found
        for group in groups.values():
            if (similar := self._measured(group)) is None:
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

    def _measured(self, group: dict[str, Trace]) -> LayerSimilarity | None:
        """Return the similarities in a group, from which models without maps that fit are removed."""
        try:
            return layer_similarity(group, scope=self.scope)
        except (UncoveredError, InputError) as reason:
            if len(group) == 1:
                self.refused[group.popitem()[0]] = str(reason)
                return None
            covered = {name: found for name, found in group.items() if self._measured({name: found}) is not None}
            if len(covered) == len(group):
                raise
        for name in group.keys() - covered.keys():
            del group[name]
        return self._measured(group) if group else None

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
