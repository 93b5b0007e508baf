"""The tasks of several studies, for studies that measure the same models in another way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from evidence import alignment, copying, induction
from evidence.study import SEEDS, Study
from unilinattn.evaluation import Sample

METHODS: Mapping[str, Any] = {
    "raw": "raw",
    "latim": "latim",
    "alti": "alti",
    "rollout": "rollout",
    "attribution": "attribution",
    "contribution": "contribution",
    "alti rollout": ("alti", {"compose": "rollout"}),
    "logit": "logit",
    "lrp": "lrp",
    "input x gradient": "input_x_gradient",
}
"""Methods that the tasks' studies compare; the first three keep a layer axis, of which the scored one is chosen."""


BATCH = 12
"""Most samples that one run of a model explains: each of two processes gets one of the two batches of 23."""


@dataclass(frozen=True)
class Task:
    """A task with trained models.

    Attributes:
        study: the study that trains the models.
        models: names of the models.
        samples: `samples(count, seed)` returns samples with one target each and its relevant keys.
    """

    study: Study
    models: Sequence[str]
    samples: Callable[[int, int], list[Sample]]

    def hosts(self, weights: Path, seed: int) -> dict[str, Callable[[], nn.Module]]:
        """Return functions that load the models of a seed."""
        hosts = self.study.hosts(weights, seed)
        return {model: hosts[model] for model in self.models}


def _words(count: int, seed: int) -> list[Sample]:
    return alignment.single_words(alignment.samples(count, seed))


TASKS: Mapping[str, Task] = {
    "copying": Task(copying.STUDY, tuple(copying.STUDY.models), copying.samples),
    "induction": Task(induction.STUDY, induction.EXPLAINED, induction.samples),
    "alignment": Task(alignment.STUDY, alignment.MODELS, _words),
}
"""The tasks by name."""

UNIT = "sequences of each task"
"""A sample of the studies of all tasks, in the plural: the models of a task read the same ones."""


def sizes_text(scored: int) -> str:
    """Return how many sequences a study of all tasks has, from those of a task and a seed."""
    sequences = scored * len(SEEDS) * len(TASKS)
    pairs = scored * len(SEEDS) * sum(len(task.models) for task in TASKS.values())
    return (
        f"Each seed has other sequences, {scored} of each task, which the models of a task share: in all {sequences} "
        f"sequences and {pairs} pairs of a sequence and a model"
    )


def hosts_by_task(weights: Path, seed: int) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that load the models of all tasks, by "task/model"."""
    return {
        f"{name}/{model}": load for name, task in TASKS.items() for model, load in task.hosts(weights, seed).items()
    }


def labelled(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples with the id of the true answer: the next token, or at the end that of the relevant key."""

    def answer(sample: Sample) -> int:
        assert sample.target is not None and sample.relevant is not None
        ids, following = sample.inputs[0], sample.target + 1
        return int(ids[following] if following < len(ids) else ids[sample.relevant.nonzero()[0, 0]])

    return [replace(sample, label=answer(sample)) for sample in samples]
