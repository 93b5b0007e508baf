"""`evaluate`: models x methods x samples x metrics as one table, resumable and spread over processes."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from unilinattn.errors import InputError, OptionError, UncoveredError, UnilinattnError
from unilinattn.evaluation.case import Case
from unilinattn.evaluation.measures import Measurement, Metric, Part, summed
from unilinattn.evaluation.observer import Observer
from unilinattn.evaluation.plan import Entry, Model, Plan, batches, described
from unilinattn.evaluation.processes import Processes
from unilinattn.evaluation.readers import OnError, samples_of
from unilinattn.evaluation.samples import Sample
from unilinattn.evaluation.scorers import BASELINES, Scorer
from unilinattn.evaluation.store import Store
from unilinattn.evaluation.table import PARTS, Table, pool
from unilinattn.frozen.token_pass import latest_run
from unilinattn.host.isolation import seed_generators
from unilinattn.options import Options
from unilinattn.progress import bars
from unilinattn.progress import progress as steps
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.gradients import one_gradient
from unilinattn.tracing.trace import Trace, trace
from unilinattn.tracing.trust import Trust

Choice = dict[str, list[Any] | None]
"""Parts of the metric that chooses a layer, by method and layer; None for a method that keeps no layer axis."""

Row = dict[str, Any]

FEW_TOKENS = 4
"""Tokens of a sample whose scores have the axes of all."""


def evaluate(
    models: Mapping[str, Model],
    data: Any,
    methods: Sequence[str | Options | Scorer | tuple[str, Mapping[str, Any]]] | Mapping[str, Entry | Options | Scorer],
    metrics: Sequence[str | tuple[str, Mapping[str, Any]] | Metric] | Mapping[str, Entry],
    *,
    selection: Any = None,
    select_by: str | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    on_error: OnError = "stop",
    baselines: Sequence[str] = BASELINES,
    out: str | os.PathLike[str] | None = None,
    save_results: bool = False,
    seed: int = 0,
    trust: Trust = "require",
    max_memory: int | None = None,
    progress: bool = True,
    batch_size: int = 1,
) -> Table:
    """Measure methods on models and samples, and return a row for each model, method, sample and metric.

    By default each sample is traced and scored by itself, with its own seed. Neither an interruption nor the number of
    processes changes a number (with the same number of threads). A program that `accelerate launch` or `torchrun`
    starts in several processes shares the samples among them; each process makes the same call and returns the whole
    table.

    A method that keeps a layer axis is scored at one layer: the best by `select_by` on the samples of `selection`, none
    of which may be in `data`.

    Args:
        models: models by name, or functions that load them: one is loaded at a time, in processes with work for it.
        data: the samples, with different names if they have any; or a file of texts, a folder of images or a data set,
            which `evaluation.read_samples` reads. Images get the patches of the model if there is one model, given as a
            module.
        methods: methods such as `methods.Latim(p=1)`, names, (name, options), or a mapping from labels to one of them
            or to a function `f(trace, sample)` that returns scores (key,) or (query, key), or an `Attribution`.
        metrics: names of metrics (`evaluation.measures.METRICS`), (name, options), `Metric` objects, or a mapping from
            labels to these or to functions of a `Case`. `completeness_gap` has rows for methods that decompose a logit.
        selection: other samples, on which layers are chosen.
        select_by: label of the metric by which layers are chosen, by default the first, or the name of another metric.
        tokenizer, processor, on_error: as in `evaluation.read_samples`, for data that are read.
        baselines: rows that ignore the model: random (the mean of 4 draws a sample), recency (a key's position) and
            primacy (its negative).
        out: folder in which every number is stored when it is computed, and `table.csv` and `table.json`. The same call
            continues after an interruption: functions are compared by name, models by up to 4096 values of a weight.
        save_results: whether to store the `Attribution` of every method and sample in the folder `results` of `out`.
        seed: seed of all random choices.
        trust, max_memory, progress: as in `unilinattn.explain`.
        batch_size: largest number of samples of ids, of one length, in one batch; functions take one.

    Raises `OptionError` for an unknown name or option, for functions with a `batch_size` above 1, and for a layer axis
    without `selection`; `InputError` for data that lack a field that a metric needs, for a metric that is undefined
    (with model, sample, method and metric), and for a sample in both data and selection; `ResultFileError` for an `out`
    of another evaluation, naming the differences; and the errors of `explain`.
    """
    if save_results and out is None:
        raise OptionError("save_results stores files; name their folder in `out`.")
    read = partial(samples_of, models=models, tokenizer=tokenizer, processor=processor, on_error=on_error)
    data, selection = read(data), None if selection is None else read(selection)
    plan = Plan.of(
        models,
        data,
        methods,
        metrics,
        selection=selection,
        select_by=select_by,
        baselines=baselines,
        seed=seed,
        trust=trust,
        max_memory=max_memory,
        save_results=save_results,
        batch_size=batch_size,
        tokenizer=tokenizer,
    )
    return run(plan, out=out, progress=progress)


def run(
    plan: Plan,
    *,
    out: str | os.PathLike[str] | None = None,
    observer: Observer | None = None,
    progress: bool = True,
) -> Table:
    """Return the table of a checked request; see `evaluate`."""
    processes = Processes()
    store = Store(out, plan.configuration())
    rows, layered = list[Row](), dict[str, bool]()
    with bars(progress and processes.rank == 0):
        for number, name in enumerate(plan.models):
            work = _Work(plan, name, number, store, processes, observer or Observer())
            rows.extend(work.measure(work.choose_layers(layered)))
    table = Table(rows)
    if store.folder is not None and processes.rank == 0:
        for ending in ("csv", "json"):
            table.save(store.folder / f"table.{ending}")
    return table


class _Work:
    """The samples of one model, in batches that are stored and spread over the processes."""

    def __init__(
        self, plan: Plan, name: str, number: int, store: Store, processes: Processes, observer: Observer
    ) -> None:
        self._plan, self._name, self._at, self._store, self._processes = plan, name, number, store, processes
        self._observer, self._refused = observer, set[str]()
        # Values that the cases of the latest batch share.
        self._shared = dict[Any, Any]()
        self._few: Trace | None = None
        if isinstance(model := plan.models[name], nn.Module):
            # The model is checked even if nothing is left to compute.
            self._require_same(model)

    @cached_property
    def _host(self) -> nn.Module:
        model = self._plan.models[self._name]
        host = model if isinstance(model, nn.Module) else model()
        if not isinstance(host, nn.Module):
            raise InputError(f"the function of model {self._name!r} returned a {type(host).__name__}, no model.")
        self._require_same(host)
        return host

    def _require_same(self, host: nn.Module) -> None:
        """Store the description of the model, or require that it is the stored one."""
        if self._store.folder is not None:
            self._store.agree(f"models/{self._at}", {self._name: described(host)})

    def choose_layers(self, layered: dict[str, bool]) -> dict[str, int]:
        """Return the best layer, by the samples of `selection`, of the methods that keep layers, those in `layered`."""
        plan = self._plan
        if plan.selection is None:
            return {}
        units = self._spread("selection", plan.selection, partial(self._precisions, layered))
        best = max if plan.chooser.larger_is_better else min
        layers = {}
        for scorer in plan.scorers:
            if all(unit[scorer.label] is not None for unit in units):
                pooled = [pool(terms) for terms in zip(*(unit[scorer.label] for unit in units), strict=True)]
                layers[scorer.label] = pooled.index(best(pooled))
                self._observer.chosen(scorer.label, pooled)
        return layers

    def measure(self, layers: Mapping[str, int]) -> list[Row]:
        """Return the rows of each sample, in the order of the data."""
        plan = self._plan
        units = self._spread("samples", plan.samples, partial(self._rows, layers))
        order = {plan.name_of(index): index for index in range(len(plan.samples))} if plan.batch_size > 1 else {}
        return sorted((row for unit in units for row in unit), key=lambda row: order.get(row["sample"], 0))

    def _spread(
        self, kind: str, samples: Sequence[Sample], compute: Callable[[Mapping[int, Sample]], Any]
    ) -> list[Any]:
        units = batches(samples, self._plan.batch_size)

        def run(missing: Sequence[int]) -> dict[int, Any]:
            done = {}
            for unit in steps(missing, f"{self._name}: {kind}"):
                # In the form that the store returns, so that a stored number equals a computed one.
                done[unit] = json.loads(json.dumps(compute({index: samples[index] for index in units[unit]})))
                self._store.write(key(unit), done[unit])
            return done

        def key(unit: int) -> str:
            return f"{kind}/{self._at}-{units[unit][0]:06d}"

        done = self._processes.spread(range(len(units)), lambda unit: self._store.read(key(unit)), run)
        return [done[unit] for unit in range(len(units))]

    def _precisions(self, layered: dict[str, bool], batch: Mapping[int, Sample]) -> Choice:
        """Return the metric that chooses a layer, for each layer; `layered` as in `choose_layers`."""
        plan = self._plan
        precisions: Choice = {}
        where = f"selection sample {next(iter(batch.values())).name or next(iter(batch))}"
        traced = self._trace(batch, where)
        for scorer in plan.scorers:
            precisions[scorer.label] = None
            with self._located(f"{where}, {scorer.label}"):
                if len(batch) > 1 and scorer.reads_model and scorer.label not in layered:
                    layered[scorer.label] = self._keeps_layers(scorer, batch, where)
                if not scorer.reads_model or not layered.get(scorer.label, True):
                    continue
                results = [draws[0] for draws in self._results(scorer, traced, batch, "selection")]
                layered[scorer.label] = "layer" in results[0].dims
                if _has_layers(results[0]):
                    precisions[scorer.label] = [
                        self._precision(traced, batch, [result.select(layer=layer) for result in results])
                        for layer in range(results[0].sizes["layer"])
                    ]
        return precisions

    def _keeps_layers(self, scorer: Scorer, batch: Mapping[int, Sample], where: str) -> bool:
        """Return whether a method keeps a layer axis, by its scores of a few tokens of the first sample."""
        index, sample = next(iter(batch.items()))
        few = {index: Sample(inputs=sample.inputs[:, :FEW_TOKENS], target=-1)}
        if self._few is None:
            self._few = self._trace(few, where)
        return "layer" in self._run(scorer, self._few, "axes", few)[0].dims

    def _precision(self, traced: Trace, batch: Mapping[int, Sample], results: Sequence[Attribution]) -> list[Part]:
        """Return the parts of the metric that chooses a layer, summed over the batch."""
        cases = [case for (case,) in self._cases(traced, batch, [[result] for result in results])]
        terms = [measured.parts for measured in self._plan.chooser.of_cases(cases) if measured is not None]
        if len(terms) < len(cases):
            raise OptionError(f"select_by={self._plan.select_by!r} is not defined for its scores; name another.")
        return summed(terms)

    def _rows(self, layers: Mapping[str, int], batch: Mapping[int, Sample]) -> list[Row]:
        """Return the rows of the samples of a batch."""
        plan = self._plan
        first = plan.name_of(next(iter(batch)))
        rows: dict[int, list[Row]] = {index: [] for index in batch}
        traced = self._trace(batch, f"sample {first}")
        with self._located(f"sample {first}"):
            self._observer.traced(traced)
        with one_gradient(traced), latest_run(traced):
            for scorer in plan.scorers:
                if scorer.label in self._refused:
                    continue
                try:
                    for index, measured in self._measured(scorer, traced, batch, layers).items():
                        rows[index] += measured
                except (InputError, UncoveredError) as error:
                    self._observer.refused(scorer.label, error)
                    self._refused.add(scorer.label)
        for label in plan.metrics:
            if not self._refused and all(row["metric"] != label for sample in rows.values() for row in sample):
                raise InputError(
                    f"no method has a {label}: it is defined for methods that decompose a logit, such as 'logit'."
                )
        return [row for sample in rows.values() for row in sample]

    def _measured(
        self, scorer: Scorer, traced: Trace, batch: Mapping[int, Sample], layers: Mapping[str, int]
    ) -> dict[int, list[Row]]:
        """Return the rows of one method on each sample of a batch."""
        plan = self._plan
        with self._located(f"sample {plan.name_of(next(iter(batch)))}, {scorer.label}"):
            results = [
                [self._one_layer(scorer, result, layers) for result in draws]
                for draws in self._results(scorer, traced, batch, "data")
            ]
        by_metric = self._measurements(scorer.label, batch, self._cases(traced, batch, results))
        rows: dict[int, list[Row]] = {}
        for number, (index, draws) in enumerate(zip(batch, results, strict=True)):
            if plan.save_results and len(draws) == 1:
                self._save(draws[0], index, scorer.label)
            name, scored = plan.name_of(index), draws[0].layers
            layer = scored[0] if len(scored) == 1 else "all" if scored else ""
            rows[index] = []
            for label, measurements in by_metric.items():
                if measured := [measurement for measurement in measurements[number] if measurement is not None]:
                    row = {"model": self._name, "method": scorer.label, "layer": layer, "sample": name, "metric": label}
                    value = sum(m.value for m in measured) / len(measured)
                    rows[index].append({**row, "value": value, PARTS: summed([m.parts for m in measured])})
        return rows

    def _measurements(
        self, method: str, batch: Mapping[int, Sample], cases: Sequence[Sequence[Case]]
    ) -> dict[str, list[Sequence[Measurement | None]]]:
        """Return, by metric, the measurements of each sample of a batch, one for each of its cases."""
        names = [self._plan.name_of(index) for index in batch]
        by_metric: dict[str, list[Sequence[Measurement | None]]] = {}
        for label, metric in self._plan.metrics.items():
            draws = [(names[0], of_draw) for of_draw in zip(*cases, strict=True)]
            measured: list[Sequence[Measurement | None]] = []
            for name, group in draws if metric.of_batch else zip(names, cases, strict=True):
                try:
                    with self._located(f"sample {name}, {method}, {label}"):
                        measured.append(metric.of_cases(group))
                except UnilinattnError:
                    # Of a batch the first sample without a value is named.
                    for sample, case in zip(names, group, strict=True) if metric.of_batch else ():
                        with self._located(f"sample {sample}, {method}, {label}"):
                            metric.of_cases([case])
                    raise
            by_metric[label] = list(zip(*measured, strict=True)) if metric.of_batch else measured
        return by_metric

    def _save(self, result: Attribution, index: int, label: str) -> None:
        assert self._store.folder is not None
        number = [scorer.label for scorer in self._plan.scorers].index(label)
        name = f"{self._at}-{index:06d}-{number}-{re.sub(r'[^A-Za-z0-9_=.-]+', '_', label)}.safetensors"
        (self._store.folder / "results").mkdir(parents=True, exist_ok=True)
        result.save(self._store.folder / "results" / name)

    def _trace(self, batch: Mapping[int, Sample], where: str) -> Trace:
        inputs = [sample.inputs for sample in batch.values()]
        with self._located(where):
            joined = torch.cat(inputs) if len(inputs) > 1 else inputs[0]
            tokenizer = self._plan.tokenizer if isinstance(joined, str) else None
            traced = trace(self._host, joined, tokenizer=tokenizer, progress=False)
            if (size := traced.layers[-1].output.shape[0]) != len(batch):
                raise InputError(f"a sample is one sequence or image; its inputs hold {size}.")
        self._shared = {}
        return traced

    def _results(
        self, scorer: Scorer, traced: Trace, batch: Mapping[int, Sample], kind: str
    ) -> list[list[Attribution]]:
        """Return the results of each sample of a batch, several for random draws."""
        if not scorer.reads_model:
            return [self._run(scorer, traced, kind, {index: sample}) for index, sample in batch.items()]
        result = self._run(scorer, traced, kind, batch)[0]
        if kind == "data":
            result = self._observer.scored(traced, scorer.label, result)
        return [[result]] if len(batch) == 1 else [[result.select(batch=row)] for row in range(len(batch))]

    def _run(self, scorer: Scorer, traced: Trace, kind: str, batch: Mapping[int, Sample]) -> list[Attribution]:
        devices = {weight.device.index for weight in self._host.parameters() if weight.is_cuda}
        # The seed depends on the first sample and the row; the caller's generators are restored.
        with torch.random.fork_rng(devices=sorted(devices)):
            seed_generators(self._plan.seed_of(kind, next(iter(batch)), scorer.label), self._host)
            return scorer.function(traced, [*batch.values()], trust=self._plan.trust, max_memory=self._plan.max_memory)

    def _cases(
        self, traced: Trace, batch: Mapping[int, Sample], results: Sequence[Sequence[Attribution]]
    ) -> list[list[Case]]:
        """Return a case for each result of each sample. Metrics share the values that a case caches."""
        return [
            [
                Case(
                    self._host,
                    sample,
                    traced,
                    result.select(layer=0) if "layer" in result.dims else result,
                    self._plan.seed_of("metric", index),
                    row,
                    self._shared,
                )
                for result in draws
            ]
            for row, ((index, sample), draws) in enumerate(zip(batch.items(), results, strict=True))
        ]

    def _one_layer(self, scorer: Scorer, result: Attribution, layers: Mapping[str, int]) -> Attribution:
        if not _has_layers(result):
            return result
        if scorer.label not in layers:
            raise OptionError(
                f"its scores have {result.sizes['layer']} layers; give `selection`, other samples on which the layer "
                "is chosen, or name one layer or the mean: ('latim', {'layers': [1]}), ('latim', {'layers': 'mean'})."
            )
        return result.select(layer=layers[scorer.label])

    @contextmanager
    def _located(self, where: str) -> Iterator[None]:
        """Name the model and `where` in the library's errors."""
        try:
            yield
        except UnilinattnError as error:
            raise type(error)(f"model {self._name}, {where}: {error}") from error


def _has_layers(result: Attribution) -> bool:
    return "layer" in result.dims and result.sizes["layer"] > 1
