"""Answers that no single token determines: look-ups of shared values, in two hops and of complements; and sums."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from evidence.claims import Claim, Results
from evidence.convergence import GAP
from evidence.hosts import builder
from evidence.pictures import dots
from evidence.problems import (
    CHAINS,
    KINDS,
    LENGTHS,
    LOOKUP_VOCABULARY,
    MARKED,
    MODULUS,
    SHARING,
    SUM_LENGTH,
    SUM_VOCABULARY,
    Problems,
    lookups,
    sums,
)
from evidence.reasoning_claims import EXPLAINED, METHODS, MODELS, TASKS, WITH_COPIES, of_methods
from evidence.replaced import DRAWS, effects
from evidence.rows import number, proportion
from evidence.study import Model, Size, Study, View
from evidence.training import HELD_OUT_SEED, SELECTION_SEED, Recipe
from unilinattn.evaluation import Case, Sample, Table, rank_correlation, row_scores
from unilinattn.evaluation.measures import Measurement, Metric
from unilinattn.evaluation.scorers import Scorer, as_result
from unilinattn.examples.tasks import NO_ANSWER
from unilinattn.host.substitution import through_operators
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACY_PROBLEMS = 512
"""Number of problems of each task for the accuracy of the training."""

QUESTIONS = 8
"""Number of questions of a context in the training; the evaluation asks one."""

BATCH = 24
"""Problems that are explained together."""

DRAWN: Mapping[str, Callable[[int, int], Problems]] = {
    **{task: partial(lookups, kind=kind) for task, kind in zip(TASKS, KINDS, strict=False)},
    TASKS[-1]: sums,
}
"""The problems of each task."""

RECIPES = {
    "mamba2": Recipe(1500, 5e-3, through_operators=True),
    "transformer": Recipe(4000, 3e-3),
    "mamba2_sums": Recipe(800, 5e-3, 64, through_operators=True),
    "transformer_sums": Recipe(1000, 3e-3, 64),
}

BUILDERS = {
    "mamba2": builder("mamba2", LOOKUP_VOCABULARY),
    "transformer": builder(
        "local_transformer",
        LOOKUP_VOCABULARY,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        hidden_size=48,
        head_dim=12,
        intermediate_size=96,
    ),
    "mamba2_sums": builder("mamba2", SUM_VOCABULARY, hidden_size=32, head_dim=8, state_size=16),
    "transformer_sums": builder("local_transformer", SUM_VOCABULARY, hidden_size=32, head_dim=8, intermediate_size=64),
}

HEADINGS = dict(zip(MODELS, ("Mamba-2", "Transformer"), strict=True))
METRICS = {"ap": "AP", "hit_at_1": "hit@1", "spearman": "Spearman"}
GAPS = "integrated gradients"
"""The method whose completeness gaps are listed."""


def _columns(metrics: Mapping[str, str], models: Sequence[str] = MODELS) -> list[tuple[str, str, str]]:
    return [
        (model, metric, f"{HEADINGS[model]} {label}".strip()) for metric, label in metrics.items() for model in models
    ]


def _of_task(model: str, task: str) -> str:
    """Return the name of the model of an architecture that is trained on a task."""
    return f"{model}_sums" if task == "sums" else model


class Reasoning(Study):
    """The study of problems whose answer no single token determines."""

    name = "reasoning"
    title = "Answers that no single token determines"
    question = "Do scores name the tokens that determine an answer which none of them is?"
    source = "this library"
    text = f"""
In the other tasks one token equals the answer, and "the keys whose token is the prediction" finds it without a model.
Here it does not. A context of {LENGTHS[-1]} tokens has noise and {CHAINS} chains, each the pair of a head and a link
and the pair of that link and a value, anywhere and in any order; {SHARING} chains end with each value. *Shared values*
asks a link for its value, which stands at {SHARING} positions; *two hops* asks a head for the value of its link;
*complements* asks a link for the complement of its value, a token that is never the stored one. *Sums* has
{SUM_LENGTH} digits, {MARKED} of them, not zero, after a mark; the answer is the sum of these modulo {MODULUS}. One
model of each architecture learns the three look-ups, with a value for each chain, and one the sums: Mamba-2 of two
layers, and Transformers of a local layer and one global layer, for look-ups two.

There are two truths. By construction the decisive tokens are the pair of the link, in two hops also that of the head,
or the marks and the marked digits: every replacement of these changes the right answer, and no other one does. By
intervention the effect of a token is the fall of the right answer's logit when it is replaced, the mean of {DRAWS}
draws of its kind. AP and hit@1 are for the decisive tokens, Spearman is the correlation with the effects over the
tokens of the context. The row `effect` has the effects of other draws: its AP and hit@1 say whether the two truths
agree, its Spearman how far draws repeat. `same token` are the keys that hold the answer; `asked token` those that hold
the token of the question, and the keys after them, which is the rule of a look-up. Right answers are explained, of
problems that each seed draws anew. The Transformer learned two hops from one seed of three, so its answers to them are
not explained; a Gated DeltaNet of width 48 did not learn look-ups in 1000 steps, and is left out.
"""
    unit = "right answers of each task"
    caption = "AP for the decisive tokens by method, mean of three seeds."
    models: ClassVar[Mapping[str, Model]] = {name: Model(BUILDERS[name], recipe) for name, recipe in RECIPES.items()}
    size = Size(68, 8)
    quick = Size(2, 2)
    views = (
        View("accuracy", "Share of right answers", _columns({"accuracy": ""})),
        *(
            View(
                task,
                task.capitalize(),
                _columns({**METRICS, **({"right_copy": "asked copy"} if task in WITH_COPIES else {})}, EXPLAINED[task]),
                note="Asked copy: of the keys that hold the answer, how often the best one is that of the question."
                if task in WITH_COPIES
                else "",
            )
            for task in TASKS
        ),
        View("gaps", "Completeness gap of integrated gradients", _columns({"gap": ""})),
    )

    def loss(self, host: nn.Module, model: str, seed: int, batch: int) -> Tensor:
        """Return the cross entropy of the answers."""
        if model.endswith("_sums"):
            return _loss(host, sums(batch, seed))
        # Models learn to look up in short contexts in the first half, and then in longer ones.
        growth = max(0.0, 2 * self.models[model].recipe.progress(seed) - 1)
        length = LENGTHS[0] + int((LENGTHS[-1] - LENGTHS[0]) * growth)
        return _loss(host, lookups(batch, seed, length=length, sharing=1, questions=QUESTIONS))

    def accuracy(self, host: nn.Module, model: str) -> float:
        """Return the share of right answers, the mean over the tasks of the model."""
        tasks = TASKS[-1:] if model.endswith("_sums") else TASKS[:-1]
        return fmean(
            float(_right(host, DRAWN[task](ACCURACY_PROBLEMS, HELD_OUT_SEED)).double().mean()) for task in tasks
        )

    def measure(
        self, hosts: Mapping[str, Callable[[], nn.Module]], seed: int, size: Size, out: Path
    ) -> dict[str, Table]:
        """Return the tables of the views."""
        # Each seed of a model scores other problems, and selects layers on others again.
        scored_seed, selection_seed = HELD_OUT_SEED + 2 * seed, SELECTION_SEED + 2 * seed
        rows: dict[str, list[Mapping[str, Any]]] = {view.table: [] for view in self.views}
        for task in TASKS:
            for model in MODELS:
                host = hosts[_of_task(model, task)]()
                drawn = DRAWN[task](4 * size.scored, scored_seed)
                right = _right(host, drawn)
                rows["accuracy"] += proportion(task, "accuracy", right.tolist(), model=model)
                if model not in EXPLAINED[task]:
                    continue
                scored = right.nonzero().flatten().tolist()[: size.scored]
                samples = {str(at): sample(drawn, at) for at in scored}
                truths, others = (
                    {
                        str(at): effects(
                            host,
                            drawn.input_ids[at : at + 1],
                            int(drawn.labels[at, -1]),
                            drawn.replacements[at],
                            seed=2 * at + draw,
                        )
                        for at in scored
                    }
                    for draw in (0, 1)
                )
                methods: dict[str, Any] = {
                    "same token": of_function("same token", same_token),
                    "asked token": of_function("asked token", asked_token),
                    "effect": of_function("effect", partial(_effect, others)),
                    **METHODS,
                }
                table = ula.evaluate(
                    {model: host},
                    list(samples.values()),
                    methods,
                    {
                        "ap": "ap",
                        "hit_at_1": "hit_at_1",
                        "spearman": Metric("spearman", partial(_spearman, truths)),
                        **({"right_copy": Metric("right_copy", right_copy)} if task in WITH_COPIES else {}),
                        "gap": GAP,
                    },
                    selection=selected(host, task, size.selection, selection_seed),
                    baselines=("random", "recency"),
                    out=out / f"{task}-{model}",
                    progress=False,
                    batch_size=BATCH,
                )
                rows[task] += table
                rows["gaps"] += [
                    number(task, "gap", row["value"], model=model, sample=row["sample"])
                    for row in table.select(method=GAPS, metric="gap")
                ]
        return {name: Table(of_table) for name, of_table in rows.items()}

    def claims(self, results: Results) -> list[Claim]:
        """Return the claims of this library."""
        return of_methods()

    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw the AP of every method."""
        return dots({task.capitalize(): (task, "ap", EXPLAINED[task]) for task in TASKS}, results, across="AP")


def sample(drawn: Problems, at: int) -> Sample:
    """Return the problem at an index, with the tokens of the context as candidates."""
    return Sample(
        inputs=drawn.input_ids[at : at + 1],
        target=-1,
        relevant=drawn.relevant[at, -1],
        valid=torch.arange(drawn.input_ids.shape[1]) < drawn.context,
        label=int(drawn.labels[at, -1]),
        name=str(at),
    )


def selected(host: nn.Module, task: str, count: int, seed: int) -> list[Sample]:
    """Return problems that a model answers right."""
    drawn = DRAWN[task](2 * count, seed)
    return [sample(drawn, at) for at in _right(host, drawn).nonzero().flatten().tolist()[:count]]


def of_function(label: str, function: Callable[[Sample], Tensor]) -> Scorer:
    """Return the row of a function that reads no model, for samples in batches."""

    def run(trace: Trace, samples: Sequence[Sample], **_: Any) -> list[Attribution]:
        (only,) = samples
        return [as_result(label, function(only), trace)]

    return Scorer(label, {"function": label}, run, reads_model=False)


def same_token(sample: Sample) -> Float[Tensor, " key"]:
    """Score the keys that hold the answer by 1."""
    return (sample.inputs[0] == sample.label).double()


def asked_token(sample: Sample) -> Float[Tensor, " key"]:
    """Score the keys that hold the token of the question, and the keys after them, by 1."""
    equal = sample.inputs[0] == sample.inputs[0, -1]
    return (equal | equal.roll(1)).double()


def right_copy(case: Case) -> Measurement:
    """Return the probability that the best of the keys that hold the answer is the decisive one."""
    copies: Bool[Tensor, " key"] = case.valid & (case.sample.inputs[0] == case.sample.label)
    return Measurement.mean(row_scores(case.scores[None], case.relevant[None], copies[None]).hit_at_1)


def _effect(effects: Mapping[str, Tensor], sample: Sample) -> Float[Tensor, " key"]:
    return effects[sample.name]


def _spearman(truths: Mapping[str, Tensor], case: Case) -> Measurement:
    truth = truths[case.sample.name]
    return Measurement.mean(rank_correlation(case.scores[None].double(), truth[None], case.valid[None]).mean)


def _loss(host: nn.Module, drawn: Problems) -> Tensor:
    asked = drawn.labels != NO_ANSWER
    return functional.cross_entropy(host(drawn.input_ids).logits[asked], drawn.labels[asked])


@torch.no_grad()
def _right(host: nn.Module, drawn: Problems) -> Bool[Tensor, " batch"]:
    """Return whether a model answers the last question of each problem right."""
    with through_operators(host):
        return host(drawn.input_ids).logits[:, -1].argmax(-1) == drawn.labels[:, -1]


STUDY = Reasoning()
