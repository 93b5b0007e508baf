"""The checked request of an evaluation: its samples, rows and metrics, and a description that identifies it."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.evaluation.measures import METRICS, Metric, function_metric, metric, require_fields
from unilinattn.evaluation.samples import Sample, fingerprint, function_name
from unilinattn.evaluation.scorers import BASELINES, Scorer, baseline, scorer
from unilinattn.examples.tasks import Task, TaskBatch
from unilinattn.options.base import Options, label_of, refuse_class
from unilinattn.tracing.trust import Trust

VALUES = 4096
"""Number of values of each weight that the hash of a model reads."""

Model = nn.Module | Callable[[], nn.Module]
"""A model, or a function that loads it when its turn comes."""

Entry = str | tuple[str, Mapping[str, Any]] | Callable[..., Any]
"""A method or a metric: its name, its name and options, a function, or a `Scorer` or `Metric`."""


@dataclass(frozen=True)
class Plan:
    """The checked arguments of `evaluate`."""

    models: Mapping[str, Model]
    samples: Sequence[Sample]
    selection: Sequence[Sample] | None
    scorers: tuple[Scorer, ...]
    metrics: Mapping[str, Metric]
    select_by: str
    chooser: Metric
    seed: int = 0
    trust: Trust = "require"
    max_memory: int | None = None
    save_results: bool = False
    batch_size: int = 1
    tokenizer: Any = None

    @classmethod
    def of(
        cls,
        models: Mapping[str, Model],
        data: Iterable[Sample],
        methods: Any,
        metrics: Any,
        *,
        selection: Iterable[Sample] | None = None,
        select_by: str | None = None,
        baselines: Sequence[str] = BASELINES,
        batch_size: int = 1,
        **settings: Any,
    ) -> "Plan":
        """Check the arguments of `evaluate`; see there for the errors.

        `settings`: the other fields; `tokenizer` is that of samples whose inputs are a text.
        """
        if not isinstance(models, Mapping) or not models:
            raise InputError("models must be a mapping from names to models, with at least one.")
        for name, model in models.items():
            if not callable(model):
                raise InputError(
                    f"model {name!r} is a {type(model).__name__}; give a model or a function that loads it."
                )
        samples = _samples(data, "data")
        if batch_size < 1:
            raise OptionError(f"batch_size={batch_size}; give 1 or more samples.")
        asked, rows = _labelled(metrics, "metrics"), _labelled(methods, "methods")
        for label, (entry, _) in (asked | rows).items():
            if batch_size > 1 and callable(entry) and not isinstance(entry, Metric):
                raise OptionError(f"{label} is a function, which takes one sample at a time; use batch_size=1.")
        measured = {label: _metric(*entry) for label, entry in asked.items()}
        select_by = next(iter(measured)) if select_by is None else select_by
        if select_by not in measured and select_by not in METRICS:
            raise OptionError(
                f"select_by={select_by!r} is none of the metrics{nearest(select_by, [*measured, *METRICS])}"
            )
        chooser = measured[select_by] if select_by in measured else metric(select_by, {})
        require_fields(list(measured.values()), samples)
        others = None if selection is None else _samples(selection, "selection")
        if others is not None:
            if chooser.larger_is_better is None:
                raise OptionError(f"layers cannot be chosen by the function {select_by!r}; name a metric in select_by.")
            require_fields([chooser], others)
            _require_disjoint(samples, others)
        scorers = [*map(baseline, baselines)]
        scorers += [scorer(label, *entry) for label, entry in rows.items()]
        for row in scorers:
            if [other.label for other in scorers].count(row.label) > 1:
                raise OptionError(f"two rows are called {row.label!r}; give a mapping with another label for one.")
        settings["batch_size"] = batch_size
        return cls(models, samples, others, tuple(scorers), measured, select_by, chooser, **settings)

    def configuration(self) -> dict[str, Any]:
        """Return the request as JSON values: results of the same configuration belong together."""
        return {
            "models": list(self.models),
            "methods": {row.label: _plain(row.described) for row in self.scorers},
            "metrics": {
                label: _plain({"metric": metric.name, "options": metric.options})
                for label, metric in self.metrics.items()
            },
            "select_by": self.select_by,
            "data": {self.name_of(index): fingerprint(sample) for index, sample in enumerate(self.samples)},
            "selection": None if self.selection is None else fingerprint(*self.selection),
            "seed": self.seed,
            # Numbers that were computed without result files would not be computed again.
            **({"save_results": True} if self.save_results else {}),
            **({"batch_size": self.batch_size} if self.batch_size > 1 else {}),
            "versions": {"unilinattn": version("unilinattn"), "torch": torch.__version__},
        }

    def name_of(self, index: int) -> str:
        """Return the name of a sample."""
        return self.samples[index].name or str(index)

    def seed_of(self, *path: object) -> int:
        """Return the seed of a unit of work, from the seed of the evaluation."""
        text = "/".join(map(str, (self.seed, *path)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def batches(samples: Sequence[Sample], most: int) -> list[list[int]]:
    """Return the indices of samples of token ids, of one length, in batches of at most `most`, by their first samples.

    Samples with a target and those without one are apart. Other samples are batches of one.
    """
    if most == 1:
        # A lazy sequence of samples is not read beforehand.
        return [[index] for index in range(len(samples))]
    indices: list[list[int]] = []
    unfilled: dict[Any, list[int]] = {}
    for index, sample in enumerate(samples):
        key: Any = index
        if isinstance(sample.inputs, Tensor) and not sample.inputs.is_floating_point():
            key = (sample.inputs.shape, sample.inputs.dtype, sample.target is None)
        batch = unfilled.get(key)
        if batch is None or len(batch) == most:
            batch = unfilled[key] = []
            indices.append(batch)
        batch.append(index)
    return indices


def _labelled(entries: Any, kind: str) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return (name or function, options) by label."""
    if isinstance(entries, str) or not isinstance(entries, Mapping | Sequence) or not entries:
        raise OptionError(f"{kind}={entries!r}; give a list of names or of (name, options), or a mapping from labels.")
    if isinstance(entries, Mapping):
        return {label: entry_of(entry, kind) for label, entry in entries.items()}
    labelled = {}
    for entry in entries:
        name, options = entry_of(entry, kind)
        if isinstance(name, Scorer | Metric):
            labelled[name.label if isinstance(name, Scorer) else name.name] = name, options
            continue
        if callable(name):
            raise OptionError(f"{kind} holds the function {name!r}; give it a label in a mapping.")
        label = label_of(name, options)
        if label in labelled:
            raise OptionError(f"{kind} names {label!r} twice.")
        labelled[label] = (name, options)
    return labelled


def entry_of(entry: Any, kind: str) -> tuple[Any, Mapping[str, Any]]:
    """Return the name or function, and the options, of an entry of the methods or metrics, which `kind` names.

    Raises `OptionError` for a value that is none.
    """
    refuse_class(entry)
    if isinstance(entry, Options):
        return entry.name, entry.keywords
    if isinstance(entry, str | Scorer) or callable(entry):
        return entry, {}
    if isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[1], Mapping):
        return entry[0], entry[1]
    raise OptionError(
        f"{kind} holds {entry!r}; give a name, a method with options, (name, options) with a mapping, or a labelled "
        "function."
    )


def _metric(name: Any, options: Mapping[str, Any]) -> Metric:
    if isinstance(name, Metric):
        return name
    return function_metric(name) if callable(name) else metric(name, options)


def _samples(entries: Any, kind: str) -> Sequence[Sample]:
    """Return samples; raise `InputError` for other values, for none and for equal names."""
    if not isinstance(entries, Iterable):
        raise InputError(f"{kind} is {_instead(entries)}")
    samples = entries if isinstance(entries, Sequence) else list(entries)
    if not samples:
        raise InputError(f"{kind} is empty; give at least one sample.")
    names: dict[str, int] = {}
    for index, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise InputError(f"{kind} holds {_instead(sample)}")
        name = sample.name or str(index)
        if name in names:
            raise InputError(f"samples {names[name]} and {index} of {kind} have the same name {name!r}.")
        names[name] = index
    return samples


def _instead(value: Any) -> str:
    """Return the type of a value that is no sample, and the samples to give in its place."""
    name = type(value).__name__
    kind = f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
    if isinstance(value, (Task, TaskBatch)):
        return (
            f"{kind}, a task or its sequences; give samples of it, such as `evaluation.task_samples('induction', 8)`."
        )
    return (
        f"{kind}; give a list of `unilinattn.evaluation.Sample`s, or the path of a file of texts or a folder of images."
    )


def _require_disjoint(samples: Sequence[Sample], selection: Sequence[Sample]) -> None:
    scored = {fingerprint(sample.inputs): index for index, sample in enumerate(samples)}
    for index, sample in enumerate(selection):
        if (same := scored.get(fingerprint(sample.inputs))) is not None:
            raise InputError(
                f"selection sample {index} is sample {same} of data; layers are chosen on samples that are not scored."
            )


def _plain(value: Any) -> Any:
    """Return JSON values, with functions by name and other objects as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return fingerprint(value) if isinstance(value, Tensor) else function_name(value)


def described(host: nn.Module) -> dict[str, str]:
    """Return the class of a model, and a hash of up to 4096 values of each of its weights."""
    digest = []
    for name, weight in [*host.named_parameters(), *host.named_buffers()]:
        digest.append(f"{name} {tuple(weight.shape)} {weight.dtype}")
        # Quantised and sharded weights have their own classes; only their shapes are compared.
        if type(weight) in (Tensor, nn.Parameter) and weight.device.type != "meta" and weight.layout == torch.strided:
            flat = weight.detach().flatten()
            digest.append(fingerprint(flat[:: max(1, -(-len(flat) // VALUES))]))
    return {"class": type(host).__name__, "weights": fingerprint(*digest)}
