"""Measure the trained examples on their tasks: accuracy, reconstruction error, and the ranks of the known answer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn import examples
from unilinattn.errors import OptionError, nearest
from unilinattn.evaluation.decomposition import DecompositionErrors, decomposition_errors
from unilinattn.evaluation.intervention import replacement_effects
from unilinattn.evaluation.metrics import RankCorrelation, RowScores, earlier_keys, rank_correlation, row_scores
from unilinattn.evaluation.plan import seed_of
from unilinattn.evaluation.scorers import BASELINES, random_scores
from unilinattn.examples.tasks import HELD_OUT_SEED, SELECTION_SEED, Task, TaskBatch
from unilinattn.methods.run import COMPOSED
from unilinattn.registry import Method
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace, trace

INTERVENTION = "intervention"
"""Row of the ground truth by intervention: the drop in the answer's log-probability when a token is replaced."""
REPLACEMENTS = 4
"""Replacements per token, over which the effect is averaged."""
SEQUENCES = 8
"""Number of sequences on which decomposition errors are measured."""
CHOSEN_BY = "ap"
"""The metric by which layers are chosen."""
RANDOM_SEED, INTERVENTION_SEED = 0, 1


@dataclass(frozen=True)
class Counts:
    """Numbers of sequences for the accuracy, for the choice of a layer, and for the scores of the methods.

    The command `evaluate` takes the same sequences by default. Raises `OptionError` if a number is below 1.
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


@dataclass(frozen=True)
class Score:
    """Metrics of one row's scores on the held-out sequences.

    Attributes:
        found: ranking metrics against the known answer.
        correlation: rank correlation with the effect of replacing each token.
        layers: names of the scored layers: the chosen one, all for a method that composes layers, or none for a row
            that reads no operator.
        selection: average precision of each layer on the selection sequences; the best layer is chosen.
    """

    found: RowScores
    correlation: RankCorrelation
    layers: tuple[str, ...] = ()
    selection: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The measurements of one trained model on its task.

    Attributes:
        task, model: names of the task and the model.
        host: class of the host model.
        kinds: kind of mixer of each layer.
        accuracy: share of right answers, from 0 to 1.
        reconstruction_error: the worst error over the scored sequences, by layer.
        scores: the metrics of each row of the table.
        shown: maps of the methods and of the intervention on the first held-out sequence, NaN at each query's own key,
            which is no candidate.
        expected: the known answer of that sequence.
        versions: package versions by name.
    """

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
        """The kinds of mixers of the model, without repetition."""
        return ", ".join(dict.fromkeys(self.kinds))

    @property
    def worst_error(self) -> float:
        """The largest reconstruction error of a layer; a NaN counts as the largest."""
        return max(self.reconstruction_error.values(), key=lambda e: float("inf") if e != e else e)

    def layer_text(self, row: str) -> str:
        """Return the index of a row's layer from 0, "all" if the row composes layers, or "-" if it reads none."""
        layers = self.scores[row].layers
        if len(layers) != 1:
            return "all" if layers else "-"
        return str(list(self.reconstruction_error).index(layers[0]))


@dataclass(frozen=True)
class Form:
    """A method with its options: one row of the table."""

    method: Method
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, observed: Trace) -> Attribution:
        """Score every query of a trace."""
        return self.method.function(observed, target=None, **self.options)


def forms(methods: Sequence[Method]) -> dict[str, Form]:
    """Return the rows of methods by name: each method with its default options, `alti` also composed over layers."""
    rows: dict[str, Form] = {}
    for method in methods:
        rows[method.name] = Form(method)
        if method.name == COMPOSED.name:
            rows[f"{method.name} (composed)"] = Form(method, COMPOSED.given)
    return rows


def select(task: str, models: Sequence[str] | None) -> list[tuple[str, str]]:
    """Return the shipped (task, model) pairs of one task or "all", restricted to `models` if given.

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
            raise OptionError(f"no model {model!r} was trained on {_these(tasks, task)}{nearest(model, trained)}")
    return [(name, model) for name, model in pairs if not models or model in models]


def example_decompositions() -> dict[str, DecompositionErrors]:
    """Return the decomposition errors of the shipped models on held-out sequences, by "task/model"."""
    found = {}
    for task, model in examples.names():
        batch = examples.TASKS[task].sample(SEQUENCES, HELD_OUT_SEED)
        found[f"{task}/{model}"] = decomposition_errors(trace(examples.load(task, model), batch.input_ids))
    return found


def measure(task: str, model: str, methods: Sequence[Method], counts: Counts) -> Measured:
    """Measure one shipped model on sequences of `HELD_OUT_SEED`; layers are chosen on those of `SELECTION_SEED`.

    The command `evaluate` has the same numbers.

    Rows: the baselines, the methods in all their `forms`, and the ground truth by intervention. Operators are in
    float32, and the reconstruction error is the worst over the scored sequences.
    """
    problem = examples.TASKS[task]
    # The sequences of a task depend on their number too, so the scored ones are drawn by themselves.
    scored = problem.sample(counts.scored, HELD_OUT_SEED)
    with quiet_hosts():
        host = examples.load(task, model)
        accuracy = examples.accuracy(host, problem.sample(counts.accuracy, HELD_OUT_SEED))
        observed = trace(host, scored.input_ids)
        selection = problem.sample(counts.selection, SELECTION_SEED)
        chooser = _Chooser(trace(host, selection.input_ids), selection)
        judge = _Judge(
            scored,
            replacement_effects(
                host,
                scored.input_ids,
                scored.labels,
                vocabulary=problem.vocabulary,
                draws=REPLACEMENTS,
                seed=INTERVENTION_SEED,
            ),
        )
        scores = {name: judge.score(baseline) for name, baseline in baselines(scored).items()}
        shown = {}
        for name, form in forms(methods).items():
            result = form(observed)
            scores[name] = _score(result, form, judge, chooser)
            shown[name] = result.select(batch=0)
    scores[INTERVENTION] = judge.score(judge.effects)
    shown[INTERVENTION] = Attribution(scores=judge.effects[0], dims=("query", "key"), method=INTERVENTION)
    errors = {layer.name: layer.reconstruction_error() for layer in observed.layers}
    return Measured(
        task=task,
        model=model,
        host=observed.model,
        kinds=tuple(layer.kind for layer in observed.layers),
        accuracy=accuracy,
        reconstruction_error=errors,
        scores=scores,
        shown={
            name: replace(
                result,
                scores=_without_own(result.scores),
                model=f"{task}/{model}",
                tokens=[_texts(problem, scored)],
            )
            for name, result in shown.items()
        },
        expected=scored.relevant[0],
        versions=observed.versions,
    )


@dataclass(frozen=True)
class _Judge:
    """Scores each row on the held-out sequences, against the known answers and the effects of replacing tokens."""

    batch: TaskBatch
    effects: Float[Tensor, "batch query key"]

    def score(
        self, scores: Float[Tensor, "*draw batch query key"], layers: Sequence[str] = (), **choice: Mapping[str, float]
    ) -> Score:
        candidates = earlier_keys(scores.shape[-1])
        # Restricted to the rows that `row_scores` counts: those with a relevant candidate.
        asked = (self.batch.relevant & candidates).any(-1, keepdim=True)
        correlation = rank_correlation(scores, self.effects.expand_as(scores), candidates & asked)
        return Score(answer_scores(scores, self.batch), correlation, tuple(layers), **choice)


@dataclass(frozen=True)
class _Chooser:
    """Chooses layers by their average precision on the selection sequences only."""

    trace: Trace
    batch: TaskBatch

    def precision(self, form: Form) -> dict[str, float]:
        """Return the average precision of each layer of a layer-wise method."""
        result = form(self.trace)
        by_layer = {name: answer_scores(result.select(layer=name).scores, self.batch) for name in result.layers}
        return {name: getattr(scores, CHOSEN_BY) for name, scores in by_layer.items()}


def _score(result: Attribution, form: Form, judge: _Judge, chooser: _Chooser) -> Score:
    if "layer" not in result.dims:
        return judge.score(result.scores, result.layers)
    precision = chooser.precision(form)
    layer = max(precision, key=precision.__getitem__)
    return judge.score(result.select(layer=layer).scores, (layer,), selection=precision)


def answer_scores(scores: Float[Tensor, "*draw batch query key"], batch: TaskBatch) -> RowScores:
    """Return the ranking metrics of scores against the known answers, over the keys before each query."""
    return row_scores(scores, batch.relevant, earlier_keys(scores.shape[-1]))


def baselines(batch: TaskBatch) -> dict[str, Float[Tensor, "*draw batch query key"]]:
    """Return the scores of each row of `BASELINES`, those of `evaluate`; the random ones have an axis of draws."""
    shape = batch.relevant.shape
    position = torch.arange(shape[-1], dtype=torch.float64).expand(shape)
    seeds = (seed_of(RANDOM_SEED, "data", at, "random") for at in range(shape[0]))
    drawn = [torch.stack(random_scores(shape[1:], torch.Generator().manual_seed(seed))) for seed in seeds]
    return dict(zip(BASELINES, (torch.stack(drawn, 1), position, -position), strict=True))


def _without_own(scores: Float[Tensor, "*layer query key"]) -> Float[Tensor, "*layer query key"]:
    return scores.masked_fill(torch.eye(scores.shape[-1], dtype=torch.bool), torch.nan)


def _texts(task: Task, batch: TaskBatch) -> list[str]:
    separator = getattr(task, "separator", None)
    return ["sep" if token == separator else str(token) for token in batch.input_ids[0].tolist()]


def _these(tasks: Sequence[str], task: str) -> str:
    return " or ".join(tasks) if task == "all" else task


@contextmanager
def quiet_hosts() -> Iterator[None]:
    """Silence transformers' warnings about missing CUDA kernels and its loading bars inside the block."""
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread, which is faster for tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
