"""The trained examples on their tasks: which models, their samples, and the ground truth by intervention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from unilinattn import examples
from unilinattn.errors import OptionError, nearest
from unilinattn.evaluation.case import Case
from unilinattn.evaluation.intervention import replacement_effects
from unilinattn.evaluation.measures import Measurement, Metric
from unilinattn.evaluation.metrics import rank_correlation
from unilinattn.evaluation.samples import Sample, task_samples
from unilinattn.evaluation.scorers import Scorer, as_result
from unilinattn.examples.tasks import HELD_OUT_SEED, SELECTION_SEED
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace

INTERVENTION = "intervention"
"""Row of the ground truth by intervention: the drop in the answer's log-probability when a token is replaced."""

CORRELATION = "rank_correlation"
"""Metric of the rank correlation of scores with the effect of replacing each token."""

REPLACEMENTS = 4
"""Replacements of each token, over which the effect is averaged."""

CHOSEN_BY = "ap"
"""The metric by which layers are chosen."""

INTERVENTION_SEED = 1


@dataclass(frozen=True)
class Counts:
    """Numbers of sequences for the accuracy, for the choice of a layer, and for the scores of the methods.

    Raises `OptionError` if a number is below 1.
    """

    accuracy: int = 512
    selection: int = 16
    scored: int = 16

    def __post_init__(self) -> None:
        if min(self.accuracy, self.selection, self.scored) < 1:
            raise OptionError(
                f"cannot measure the accuracy on {self.accuracy} sequences, choose a layer on {self.selection} and "
                f"score {self.scored}; at least one of each is needed."
            )


def select(task: str, models: Sequence[str] | None) -> dict[str, list[str]]:
    """Return the names of the shipped models by task, of one task or "all", restricted to `models` if given.

    Raises `OptionError` if a task or a model is not shipped.
    """
    shipped = examples.names()
    tasks = list(dict.fromkeys(name for name, _ in shipped))
    if task not in ("all", *tasks):
        raise OptionError(f"unknown task {task!r}{nearest(task, ['all', *tasks])}")
    pairs = [(name, model) for name, model in shipped if task in ("all", name)]
    trained = list(dict.fromkeys(model for _, model in pairs))
    for model in models or ():
        if model not in trained:
            where = " or ".join(tasks) if task == "all" else task
            raise OptionError(f"no model {model!r} was trained on {where}{nearest(model, trained)}")
    by_task: dict[str, list[str]] = {}
    for name, model in pairs:
        if not models or model in models:
            by_task.setdefault(name, []).append(model)
    return by_task


def known_samples(task: str, counts: Counts, *, target: int | None = None) -> dict[str, Any]:
    """Return the arguments of `evaluate` for a task: its held-out sequences, and those on which layers are chosen.

    They are run as one batch each.
    """
    return {
        "data": task_samples(task, counts.scored, target=target),
        "selection": task_samples(task, counts.selection, seed=SELECTION_SEED, target=target),
        "select_by": CHOSEN_BY,
        "batch_size": max(counts.scored, counts.selection),
    }


class Intervention:
    """The effects of replacing each token of a task's held-out sequences, measured once for each model.

    `row` is the row of these effects as scores, and `correlation` the metric that compares scores with them. The
    replacements depend on the number of sequences.
    """

    def __init__(self, task: str, count: int) -> None:
        """Draw the sequences."""
        self._vocabulary = examples.TASKS[task].vocabulary
        self._batch = examples.TASKS[task].sample(count, HELD_OUT_SEED)
        self._measured: tuple[nn.Module, Float[Tensor, "batch query key"]] | None = None
        self.row = Scorer(INTERVENTION, {"intervention": REPLACEMENTS}, self._scores, reads_model=False)
        self.correlation = Metric(CORRELATION, self._correlation, ("relevant",), True, {})

    def effects(self, host: nn.Module, sample: Sample) -> Float[Tensor, "query key"]:
        """Return the drop in the log-probability of each query's answer when a token of a sample is replaced."""
        if self._measured is None or self._measured[0] is not host:
            effects = replacement_effects(
                host,
                self._batch.input_ids,
                self._batch.labels,
                vocabulary=self._vocabulary,
                draws=REPLACEMENTS,
                seed=INTERVENTION_SEED,
            )
            self._measured = host, effects
        index = (self._batch.input_ids == sample.inputs).all(1).nonzero()[0]
        return self._measured[1][int(index)]

    def _scores(self, trace: Trace, samples: Sequence[Sample], **_: Any) -> list[Attribution]:
        return [as_result(INTERVENTION, self.effects(trace.host, sample), trace) for sample in samples]

    def _correlation(self, case: Case) -> Measurement:
        # Only the rows that the ranking metrics count.
        asked = case.valid & (case.relevant & case.valid).any(-1, keepdim=True)
        correlation = rank_correlation(case.scores, self.effects(case.model, case.sample), asked)
        return Measurement.mean(correlation.mean, float(correlation.rows))
