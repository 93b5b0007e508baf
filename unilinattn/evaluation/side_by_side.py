"""The trained examples measured on their tasks: accuracy, exactness, and which method finds the known answer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from unilinattn import examples
from unilinattn.attribution import Attribution
from unilinattn.errors import OptionError, nearest
from unilinattn.evaluation.metrics import RowScores, row_scores
from unilinattn.examples.tasks import HELD_OUT_SEED, SELECTION_SEED, Task, TaskBatch
from unilinattn.registry import Method
from unilinattn.trace import Trace, trace


@dataclass(frozen=True)
class Counts:
    """How many sequences the accuracy is measured on, the layer is chosen on, and the methods are scored on.

    The scored ones are the first of those of the accuracy. Raises `OptionError` unless there are that many.
    """

    accuracy: int = 512
    selection: int = 16
    scored: int = 16

    def __post_init__(self) -> None:
        if min(self.selection, self.scored) < 1 or self.scored > self.accuracy:
            raise OptionError(
                f"cannot choose a layer on {self.selection} sequences and score {self.scored} of {self.accuracy}; at "
                "least one of each is needed, and no more scored than held out."
            )


@dataclass(frozen=True)
class Score:
    """How well one method finds the known answer on the held-out sequences.

    `layer` is the layer whose scores these are, None for a method that composes all layers; `selection` holds the
    average precision of every layer on the selection sequences, by which that layer was chosen.
    """

    found: RowScores
    layer: str | None
    selection: Mapping[str, float]


@dataclass(frozen=True)
class Measured:
    """One trained model on its task; `shown` holds each method's result on the first held-out sequence."""

    task: str
    model: str
    host: str
    kinds: tuple[str, ...]
    accuracy: float
    reconstruction_error: Mapping[str, float]
    scores: Mapping[str, Score]
    shown: Mapping[str, Attribution]
    expected: Bool[Tensor, "query key"]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The task and the model: "copying/mamba"."""
        return f"{self.task}/{self.model}"

    @property
    def kind(self) -> str:
        """What mixes the tokens."""
        return ", ".join(dict.fromkeys(self.kinds))

    @property
    def worst_error(self) -> float:
        """The largest reconstruction error of a layer; a NaN counts as the largest."""
        return max(self.reconstruction_error.values(), key=lambda e: float("inf") if e != e else e)

    def layer_index(self, method: str) -> int | None:
        """Return the position of the layer that a method is scored on, None if it composes them."""
        layer = self.scores[method].layer
        return None if layer is None else list(self.reconstruction_error).index(layer)


def select(task: str, models: Sequence[str] | None) -> list[tuple[str, str]]:
    """Return the shipped (task, model) pairs of one task or of "all", of all models or of those named.

    Raises `OptionError` for a task or a model that is not shipped.
    """
    shipped = examples.names()
    tasks = list(dict.fromkeys(name for name, _ in shipped))
    if task not in ("all", *tasks):
        raise OptionError(f"unknown task {task!r}{nearest(task, ['all', *tasks])}")
    pairs = [(name, model) for name, model in shipped if task in ("all", name)]
    known = list(dict.fromkeys(model for _, model in pairs))
    for model in models or ():
        if model not in known:
            raise OptionError(f"no model {model!r} was trained on {_these(tasks, task)}{nearest(model, known)}")
    return [(name, model) for name, model in pairs if not models or model in models]


def measure(task: str, model: str, methods: Sequence[Method], counts: Counts) -> Measured:
    """Measure one shipped model: everything but the choice of layers on sequences of `HELD_OUT_SEED`.

    Operators are in float32, and the reconstruction error is the worst over the scored sequences.
    """
    problem = examples.TASKS[task]
    held_out = problem.sample(counts.accuracy, HELD_OUT_SEED)
    scored = _first(held_out, counts.scored)
    with quiet_hosts():
        host = examples.load(task, model)
        accuracy = examples.accuracy(host, held_out)
        observed = trace(host, scored.input_ids)
        selection = problem.sample(counts.selection, SELECTION_SEED)
        chooser = _Chooser(trace(host, selection.input_ids), selection)
        scores, shown = {}, {}
        for method in methods:
            result = method.function(observed, target=None)
            scores[method.name] = _score(result, method, scored, chooser)
            shown[method.name] = replace(
                result.select(batch=0), model=f"{task}/{model}", tokens=[_texts(problem, scored)]
            )
    errors = {layer.name: layer.reconstruction_error() for layer in observed.layers}
    return Measured(
        task=task,
        model=model,
        host=observed.model,
        kinds=tuple(layer.kind for layer in observed.layers),
        accuracy=accuracy,
        reconstruction_error=errors,
        scores=scores,
        shown=shown,
        expected=scored.relevant[0],
        versions=observed.versions,
    )


@dataclass(frozen=True)
class _Chooser:
    """Chooses layers by average precision on the selection sequences, which are all that it knows."""

    trace: Trace
    batch: TaskBatch

    def precision(self, method: Method) -> dict[str, float]:
        """Return the average precision of every layer of a layer-wise method."""
        result = method.function(self.trace, target=None)
        return {layer: _found(result.select(layer=layer), self.batch).ap for layer in result.layers}


def _score(result: Attribution, method: Method, batch: TaskBatch, chooser: _Chooser) -> Score:
    if "layer" not in result.dims:
        return Score(_found(result, batch), None, {})
    precision = chooser.precision(method)
    layer = max(precision, key=precision.__getitem__)
    return Score(_found(result.select(layer=layer), batch), layer, precision)


def _found(result: Attribution, batch: TaskBatch) -> RowScores:
    queries, keys = result.scores.shape[-2:]
    return row_scores(result.scores, batch.relevant, torch.ones(queries, keys, dtype=torch.bool).tril())


def _first(batch: TaskBatch, count: int) -> TaskBatch:
    return TaskBatch(batch.input_ids[:count], batch.labels[:count], batch.relevant[:count])


def _texts(task: Task, batch: TaskBatch) -> list[str]:
    separator = getattr(task, "separator", None)
    return ["sep" if token == separator else str(token) for token in batch.input_ids[0].tolist()]


def _these(tasks: Sequence[str], task: str) -> str:
    return " or ".join(tasks) if task == "all" else task


@contextmanager
def quiet_hosts() -> Iterator[None]:
    """Keep transformers from reporting absent CUDA kernels and loading bars; its settings are as before afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
