"""Models side by side by `evaluate`: on texts or images without known answers, and on the tasks of the examples."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from unilinattn import examples
from unilinattn.analysis.comparison import RANDOM, ImageResults, ModelComparison, ModelMeasurements, worst
from unilinattn.analysis.inputs import image_read, model_pairs, named_images, named_texts, prediction, samples_of
from unilinattn.analysis.similarity import SampleSimilarity, unique
from unilinattn.analysis.statistics import STATISTICS, LayerStatistics, map_statistics
from unilinattn.errors import InputError, OptionError, UncoveredError, UnilinattnError, nearest
from unilinattn.evaluation.evaluate import run
from unilinattn.evaluation.masking import Masking
from unilinattn.evaluation.measures import deletion_curve
from unilinattn.evaluation.observer import Observer
from unilinattn.evaluation.plan import Plan
from unilinattn.evaluation.table import PARTS, Table
from unilinattn.evaluation.trained import CORRELATION, INTERVENTION, Counts, Intervention, known_samples
from unilinattn.examples.tasks import HELD_OUT_SEED
from unilinattn.memory import max_memory as limited_to
from unilinattn.methods.default import COMPOSED
from unilinattn.progress import bars
from unilinattn.progress import progress as steps
from unilinattn.registry import list_methods
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace, trace

METHODS = ("logit", "raw", "rollout", "attribution", "latim", "alti")
"""Default methods of `compare_models`."""

RANKINGS = ("hit_at_1", "ap", "auc")
"""Metrics of scores on sequences with known answers, beside the rank correlation."""

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
    are then removed in the order of their scores (the metric `deletion` of `unilinattn.evaluate`). For an image the
    predicted class is explained, at the class token for methods without a logit, and patches of the image are removed.

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
        seed: seed of the random scores.
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
    pairs = model_pairs(models, "tokenizer" if images is None else "processor", processor)
    names, sources = named_texts(texts) if images is None else named_images(images)
    unit, most = ("text", 1) if images is None else ("image", SHOWN_IMAGES)
    rows, metrics = method_rows(methods), {"deletion": ("deletion", {"masking": masking})}
    settings: dict[str, Any] = {"baselines": (RANDOM,), "seed": seed, "max_memory": max_memory}
    with limited_to(max_memory), bars(progress):
        recorders, samples = {}, {}
        for name, (host, reader) in steps(pairs.items(), "models"):
            samples[name] = samples_of(name, host, reader, names, sources, unit)
            recorders[name] = _Recorder(unit, scope, most, reader)
            plan = Plan.of({name: host}, samples[name], rows, metrics, tokenizer=reader, **settings)
            recorders[name].table = run(plan, observer=recorders[name], progress=progress)
        similarity = SampleSimilarity(scope)
        similarity.add({name: recorder.first for name, recorder in recorders.items()})
        for number in range(1, len(names)):
            traces = {}
            for name, (host, reader) in pairs.items():
                tokenizer = reader if unit == "text" else None
                traces[name] = trace(host, samples[name][number].inputs, tokenizer=tokenizer, progress=False)
            similarity.add(traces)

    def shown(number: int) -> Comparison | None:
        by_model = {name: recorder.shown[number] for name, recorder in recorders.items() if recorder.shown[number]}
        return Comparison(by_model) if by_model else None

    inputs: dict[str, Any] = {f"{unit}s": names}
    if unit == "image":
        inputs["on_images"] = tuple(
            ImageResults(
                image,
                shown(number),
                {name: recorder.read[number] for name, recorder in recorders.items()},
                {name: recorder.predicted[number] for name, recorder in recorders.items()},
            )
            for number, image in enumerate(names[:most])
        )
    return _comparison(recorders, similarity, shown=shown(0), masking=masking, **inputs)


def compare_trained(
    task: str, models: Sequence[str], methods: Sequence[str] = METHODS, counts: Counts | None = None
) -> ModelComparison:
    """Measure the trained examples of a task side by side on sequences whose answers are known.

    The command `evaluate` has the same numbers. Rows: the baselines, the methods, and the ground truth by intervention.
    A method that keeps layers is scored at the layer that is best on other sequences.
    """
    counts = counts or Counts()
    problem, truth, samples = examples.TASKS[task], Intervention(task, counts.scored), known_samples(task, counts)
    metrics = {**{name: name for name in RANKINGS}, CORRELATION: truth.correlation}
    rows = {**method_rows(methods), INTERVENTION: truth.row}
    batch = problem.sample(counts.scored, HELD_OUT_SEED)
    separator = getattr(problem, "separator", None)
    texts = ["sep" if token == separator else str(token) for token in batch.input_ids[0].tolist()]
    similarity, recorders, shown = SampleSimilarity("core"), {}, {}
    for name in steps(models, task):
        host, recorder = examples.load(task, name), _Recorder("sequence", "core")
        recorder.accuracy = examples.accuracy(host, problem.sample(counts.accuracy, HELD_OUT_SEED))
        recorder.table = run(Plan.of({name: host}, methods=rows, metrics=metrics, **samples), observer=recorder)
        effects = truth.effects(host, samples["data"][0])
        recorder.shown[0][INTERVENTION] = Attribution(scores=effects, dims=("query", "key"), method=INTERVENTION)
        recorders[name] = recorder
        shown[name] = {
            label: replace(
                result,
                # A query's own key is no candidate.
                scores=result.scores.masked_fill(torch.eye(problem.length, dtype=torch.bool, device="cpu"), torch.nan),
                model=f"{task}/{name}",
                tokens=[texts],
            )
            for label, result in recorder.shown[0].items()
        }
    similarity.add({name: recorder.first for name, recorder in recorders.items()})
    return _comparison(
        recorders, similarity, shown=Comparison(shown), task=task, counts=counts, expected=batch.relevant[0]
    )


def method_rows(methods: Sequence[str]) -> dict[str, Any]:
    """Return the rows of methods by label: each with its default options, `alti` also composed over layers.

    Raises `OptionError` for no methods.
    """
    if isinstance(methods, str) or not methods:
        raise OptionError(f"methods={methods!r}; give a list of method names" + nearest(methods, list_methods()))
    rows: dict[str, Any] = {}
    for name in methods:
        rows[name] = name
        if name == COMPOSED.name:
            rows[f"{name} (composed)"] = COMPOSED
    return rows


def _comparison(recorders: Mapping[str, "_Recorder"], similarity: SampleSimilarity, **others: Any) -> ModelComparison:
    return ModelComparison(
        models={name: recorder.measurements() for name, recorder in recorders.items()},
        table=Table([row for recorder in recorders.values() for row in recorder.rows()]),
        similarity=similarity.mean({name: recorder.layers for name, recorder in recorders.items()}),
        compared=similarity.counts,
        not_compared=similarity.refused,
        scope=similarity.scope,
        **others,
    )


class _Recorder(Observer):
    """Measures the layers of one model in an evaluation, and keeps its results on the first `most` samples.

    On texts and images each method is averaged over its layers. A `reader` is the model's tokenizer or processor.
    """

    first: Trace
    table: Table
    accuracy: float | None = None

    def __init__(self, unit: str, scope: str, most: int = 1, reader: Any = None) -> None:
        self._unit, self._scope, self._most, self._reader = unit, scope, most, reader
        self.layers: tuple[str, ...] = ()
        self.shown: list[dict[str, Attribution]] = []
        self.read: list[np.ndarray] = []
        self.predicted: list[str] = []
        self._batches: list[tuple[int, int]] = []
        self._errors: dict[str, float | None] = {}
        self._statistics: list[tuple[LayerStatistics, ...]] = []
        self._unmeasured: str | None = None
        self._uncovered: dict[str, str] = {}
        self._selection: dict[str, Sequence[float]] = {}

    def traced(self, trace: Trace) -> None:
        batch, length = trace.layers[-1].output.shape[:2]
        if self._unit == "text" and length < 2:
            raise InputError("it has 1 token; two or more are needed, the last of which is explained.")
        is_image = self._unit == "image"
        if is_image and not (trace.explained_logit.exists and trace.explained_logit.logits.ndim == 2):
            raise InputError(f"{trace.model} returns no logits of classes, whose prediction could be explained.")
        if not self._batches:
            self.first, self.layers = trace, unique(layer.name for layer in trace.layers)
        self._batches.append((batch, length))
        if len(self.shown) < self._most:
            self.shown.append({})
            if is_image:
                self.read.append(image_read(trace, self._reader))
                self.predicted.append(prediction(trace))
        for name, layer in zip(self.layers, trace.layers, strict=True):
            self._errors[name] = worst([self._errors.get(name), _error(layer)])
        if self._unmeasured is None:
            try:
                self._statistics.append(map_statistics(trace, scope=self._scope).models[trace.model])
            except (UncoveredError, InputError) as reason:
                self._unmeasured = str(reason)

    def scored(self, trace: Trace, label: str, result: Attribution) -> Attribution:
        if self._unit == "image" and trace.image_tokens is None:
            raise UncoveredError(
                f"the patches of {trace.model} are unknown; register them by `registry.register_image_tokens`."
            )
        if self._unit != "sequence" and "query" in result.dims:
            raise UncoveredError(f"the class logits of {trace.model} read several tokens, so no row is explained.")
        if len(self._batches) == len(self.shown):
            self.shown[-1][label] = result.select(batch=0) if self._unit == "sequence" else result
        if self._unit == "sequence" or "layer" not in result.dims:
            return result
        return replace(result, scores=result.scores.mean(0), dims=result.dims[1:], extras={})

    def chosen(self, label: str, by_layer: Sequence[float]) -> None:
        self._selection[label] = by_layer

    def refused(self, label: str, error: UnilinattnError) -> None:
        if self._unit == "sequence":
            raise error
        # The cause has the message without the place in the evaluation, which is the first sample.
        self._uncovered[label] = str(error.__cause__ or error)

    def rows(self) -> list[Mapping[str, Any]]:
        """Return the rows of the table, without those of methods that do not cover every sample."""
        return [row for row in self.table if row["method"] not in self._uncovered]

    def measurements(self) -> ModelMeasurements:
        """Return the measurements of the model."""
        areas: dict[str, list[Any]] = {}
        for row in sorted(self.rows(), key=lambda row: row["method"] == RANDOM):
            if row["metric"] == "deletion":
                areas.setdefault(row["method"], []).append(row[PARTS])
        tokens = self.first.image_tokens if self._unit == "image" else None
        return ModelMeasurements(
            host=self.first.model,
            layers=self.layers,
            kinds=tuple(layer.kind for layer in self.first.layers),
            tokens=tuple(length for batch, length in self._batches for _ in range(batch)),
            patches="" if tokens is None else _grid_text(tokens.grid, len(tokens.cls)),
            reconstruction_error=self._errors,
            statistics=self._unmeasured or tuple(map(_over_samples, zip(*self._statistics, strict=True))),
            deletion={**{label: deletion_curve(rows) for label, rows in areas.items()}, **self._uncovered},
            versions=self.first.versions,
            accuracy=self.accuracy,
            selection={label: dict(zip(self.layers, each, strict=True)) for label, each in self._selection.items()},
        )


def _grid_text(grid: tuple[int, int], count: int) -> str:
    """Return the grid of patches and the number of class tokens as a text."""
    return f"{grid[0]} x {grid[1]} patches, {count} class token{'s' if count != 1 else ''}"


def _over_samples(samples: Sequence[LayerStatistics]) -> LayerStatistics:
    """Return the statistics of a layer, averaged over the rows of all samples."""
    rows = sum(each.rows for each in samples)
    means = (sum(getattr(each, name) * each.rows for each in samples) / rows for name in STATISTICS)
    return LayerStatistics(samples[0].layer, rows, *means)


def _error(layer: Layer) -> float | None:
    try:
        return layer.reconstruction_error()
    except UncoveredError:
        return None
