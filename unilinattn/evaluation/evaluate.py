"""`evaluate`: models x methods x samples x metrics as one table, resumable and spread over processes."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.errors import InputError, OptionError, UnilinattnError
from unilinattn.evaluation.measures import Case, Measurement
from unilinattn.evaluation.plan import Entry, Model, Plan
from unilinattn.evaluation.processes import Processes
from unilinattn.evaluation.readers import OnError, read_samples
from unilinattn.evaluation.samples import Sample, fingerprint
from unilinattn.evaluation.scorers import BASELINES, Scorer
from unilinattn.evaluation.store import Store
from unilinattn.evaluation.table import PARTS, Table, pool
from unilinattn.options import Options
from unilinattn.progress import bars
from unilinattn.progress import progress as steps
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace, trace
from unilinattn.tracing.trust import Trust

VALUES = 4096
"""Number of values of each weight that the hash of a model reads."""

Choice = dict[str, list[Any] | None]
"""Parts of the metric that chooses a layer, by method and layer; None for a method that keeps no layer axis."""


def evaluate(
    models: Mapping[str, Model],
    data: Any,
    methods: Sequence[str | Options | tuple[str, Mapping[str, Any]]] | Mapping[str, Entry | Options],
    metrics: Sequence[str | tuple[str, Mapping[str, Any]]] | Mapping[str, Entry],
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
) -> Table:
    """Measure methods on models and samples, and return a row for each model, method, sample and metric.

    Each sample is traced and scored by itself, with its own seed, so that neither an interruption nor the number of
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
        metrics: names of metrics (`evaluation.measures.METRICS`), (name, options), or a mapping from labels to either
            or to a function from a `Case` to a number. `completeness_gap` has rows for methods that decompose a logit.
        selection: other samples, on which layers are chosen.
        select_by: label of the metric by which layers are chosen, by default the first, or the name of another metric.
        tokenizer, processor, on_error: as in `evaluation.read_samples`, for data that are read.
        baselines: rows that ignore the model: random (the mean of 4 draws a sample), recency (a key's position) and
            primacy (its negative).
        out: folder in which every number is stored when it is computed, with `table.csv` and `table.json` at the end.
            The same call continues after an interruption. Functions are compared by their names, and a model by its
            class and by up to 4096 values of each weight.
        save_results: whether to store the `Attribution` of every method and sample in the folder `results` of `out`.
        seed: seed of all random choices.
        trust, max_memory, progress: as in `unilinattn.explain`.

    Raises `OptionError` for an unknown name or option, and for a layer axis without `selection`; `InputError` for data
    that lack a field that a metric needs, for a metric that is undefined (with model, sample, method and metric), and
    for a sample in both data and selection; `ResultFileError` for an `out` of another evaluation, naming the
    differences; and the errors of `explain`.
    """
    if save_results and out is None:
        raise OptionError("save_results stores files; name their folder in `out`.")
    read = partial(_read, models=models, tokenizer=tokenizer, processor=processor, on_error=on_error)
    data, selection = read(data), None if selection is None else read(selection)
    plan = Plan.of(
        models, data, methods, metrics, selection, select_by, baselines, seed, trust, max_memory, save_results
    )
    processes = Processes()
    store = Store(out, plan.configuration())
    rows: list[dict[str, Any]] = []
    with bars(progress and processes.rank == 0):
        for at, name in enumerate(plan.models):
            work = _Work(plan, name, at, store, processes)
            layers = work.choose_layers()
            rows.extend(row for unit in work.measure(layers) for row in unit)
    table = Table(rows)
    if store.folder is not None and processes.rank == 0:
        for ending in ("csv", "json"):
            table.save(store.folder / f"table.{ending}")
    return table


def _read(data: Any, *, models: Any, tokenizer: Any, processor: Any, on_error: OnError) -> Iterable[Sample]:
    """Return samples: the given ones, or those of a file, a folder or a data set."""
    if isinstance(data, Sequence) and not isinstance(data, str):
        is_read = any(isinstance(entry, Mapping) for entry in data)
    else:
        is_table = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping)
        is_read = isinstance(data, str | os.PathLike) or is_table
    if not is_read:
        return data
    alone = next(iter(models.values())) if isinstance(models, Mapping) and len(models) == 1 else None
    model = alone if processor is not None and isinstance(alone, nn.Module) else None
    return read_samples(data, tokenizer, processor=processor, model=model, on_error=on_error)


class _Work:
    """The samples of one model, in units that are stored and spread over the processes."""

    def __init__(self, plan: Plan, name: str, at: int, store: Store, processes: Processes) -> None:
        self._plan, self._name, self._at, self._store, self._processes = plan, name, at, store, processes
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
            self._store.agree(f"models/{self._at}", {self._name: _described(host)})

    def choose_layers(self) -> dict[str, int]:
        """Return the index of the best layer of each method that keeps a layer axis, by the samples of `selection`."""
        plan = self._plan
        if plan.selection is None:
            return {}
        composed: set[str] = set()
        units = self._spread("selection", plan.selection, partial(self._precisions, composed))
        best = max if plan.chooser.larger_is_better else min
        layers = {}
        for one in plan.scorers:
            if all(unit[one.label] is not None for unit in units):
                pooled = [pool(parts) for parts in zip(*(unit[one.label] for unit in units), strict=True)]
                layers[one.label] = pooled.index(best(pooled))
        return layers

    def measure(self, layers: Mapping[str, int]) -> list[list[dict[str, Any]]]:
        """Return the rows of each sample."""
        return self._spread("samples", self._plan.samples, partial(self._rows, layers))

    def _spread(self, kind: str, samples: Sequence[Sample], compute: Callable[[int, Sample], Any]) -> list[Any]:
        def run(units: Sequence[int]) -> dict[int, Any]:
            done = {}
            for unit in steps(units, f"{self._name}: {kind}"):
                # In the form that the store returns, so that a stored number equals a computed one.
                done[unit] = json.loads(json.dumps(compute(unit, samples[unit])))
                self._store.write(key(unit), done[unit])
            return done

        def key(unit: int) -> str:
            return f"{kind}/{self._at}-{unit:06d}"

        done = self._processes.spread(range(len(samples)), lambda unit: self._store.read(key(unit)), run)
        return [done[unit] for unit in range(len(samples))]

    def _precisions(self, composed: set[str], at: int, sample: Sample) -> Choice:
        """Return the metric that chooses a layer, for each layer; methods in `composed` are not run again."""
        plan = self._plan
        precisions: Choice = {}
        traced = self._trace(sample, f"selection sample {sample.name or at}")
        for one in plan.scorers:
            precisions[one.label] = None
            if one.label in composed:
                continue
            with self._located(f"selection sample {sample.name or at}, {one.label}"):
                result = self._results(one, traced, sample, "selection", at)[0]
                if not _has_layers(result):
                    composed.add(one.label)
                    continue
                parts = []
                for layer in range(result.sizes["layer"]):
                    measured = plan.chooser(self._case(traced, sample, result.select(layer=layer), at))
                    if measured is None:
                        raise OptionError(f"select_by={plan.select_by!r} is not defined for its scores; name another.")
                    parts.append(measured.parts)
                precisions[one.label] = parts
        return precisions

    def _rows(self, layers: Mapping[str, int], at: int, sample: Sample) -> list[dict[str, Any]]:
        """Return the rows of one sample."""
        plan, name, rows = self._plan, self._plan.name_of(at), []
        traced = self._trace(sample, f"sample {name}")
        for one in plan.scorers:
            with self._located(f"sample {name}, {one.label}"):
                results = [
                    self._one_layer(one, result, layers) for result in self._results(one, traced, sample, "data", at)
                ]
            if plan.save_results and len(results) == 1:
                self._save(results[0], at, one.label)
            layer = results[0].layers[0] if len(results[0].layers) == 1 else "all" if results[0].layers else ""
            # One result for each draw of the random scores. Metrics share the values that a case caches.
            cases = [self._case(traced, sample, result, at) for result in results]
            for label, measure in plan.metrics.items():
                with self._located(f"sample {name}, {one.label}, {label}"):
                    measured = [found for case in cases if (found := measure(case)) is not None]
                if measured:
                    row = {"model": self._name, "method": one.label, "layer": layer, "sample": name, "metric": label}
                    rows.append({**row, **_merged(measured)})
        for label in plan.metrics:
            if all(row["metric"] != label for row in rows):
                raise InputError(
                    f"no method has a {label}: it is defined for methods that decompose a logit, such as 'logit'."
                )
        return rows

    def _save(self, result: Attribution, at: int, label: str) -> None:
        assert self._store.folder is not None
        number = [one.label for one in self._plan.scorers].index(label)
        name = f"{self._at}-{at:06d}-{number}-{re.sub(r'[^A-Za-z0-9_=.-]+', '_', label)}.safetensors"
        (self._store.folder / "results").mkdir(parents=True, exist_ok=True)
        result.save(self._store.folder / "results" / name)

    def _trace(self, sample: Sample, where: str) -> Trace:
        with self._located(where):
            traced = trace(self._host, sample.inputs, progress=False)
            if (batch := traced.layers[-1].output.shape[0]) != 1:
                raise InputError(f"a sample is one sequence or image; its inputs hold {batch}.")
        return traced

    def _results(self, one: Scorer, traced: Trace, sample: Sample, kind: str, at: int) -> list[Attribution]:
        devices = {weight.device.index for weight in self._host.parameters() if weight.is_cuda}
        # The seed depends on the sample and the row; the caller's generators are restored.
        with torch.random.fork_rng(devices=sorted(devices)):
            torch.manual_seed(self._plan.seed_of(kind, at, one.label))
            return one.run(traced, sample, trust=self._plan.trust, max_memory=self._plan.max_memory)

    def _case(self, traced: Trace, sample: Sample, result: Attribution, at: int) -> Case:
        if "layer" in result.dims:
            result = result.select(layer=0)
        return Case(self._host, sample, traced, result, self._plan.seed_of("metric", at))

    def _one_layer(self, one: Scorer, result: Attribution, layers: Mapping[str, int]) -> Attribution:
        if not _has_layers(result):
            return result
        if one.label not in layers:
            raise OptionError(
                f"its scores have {result.sizes['layer']} layers; give `selection`, other samples on which the layer "
                "is chosen, or name one layer or the mean: ('latim', {'layers': [1]}), ('latim', {'layers': 'mean'})."
            )
        return result.select(layer=layers[one.label])

    @contextmanager
    def _located(self, where: str) -> Iterator[None]:
        """Name the model and `where` in the library's errors."""
        try:
            yield
        except UnilinattnError as error:
            raise type(error)(f"model {self._name}, {where}: {error}") from error


def _has_layers(result: Attribution) -> bool:
    return "layer" in result.dims and result.sizes["layer"] > 1


def _merged(measured: Sequence[Measurement]) -> dict[str, Any]:
    """Return the mean over draws, and the sums of the parts."""
    parts = [
        [sum(numbers) for numbers in zip(*part, strict=True)] for part in zip(*(m.parts for m in measured), strict=True)
    ]
    return {"value": sum(m.value for m in measured) / len(measured), PARTS: parts}


def _described(host: nn.Module) -> dict[str, str]:
    """Return the class of a model, and a hash of up to 4096 values of each of its weights."""
    digest = []
    for name, weight in [*host.named_parameters(), *host.named_buffers()]:
        digest.append(f"{name} {tuple(weight.shape)} {weight.dtype}")
        # Quantised and sharded weights have their own classes; only their shapes are compared.
        if type(weight) in (Tensor, nn.Parameter) and weight.device.type != "meta" and weight.layout == torch.strided:
            flat = weight.detach().flatten()
            digest.append(fingerprint(flat[:: max(1, -(-len(flat) // VALUES))]))
    return {"class": type(host).__name__, "weights": fingerprint(*digest)}
