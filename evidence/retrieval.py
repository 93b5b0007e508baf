"""Retrieval: where models look for a passkey and for frequent words, also when they err (LaTIM 4.3 and D.3)."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from evidence import retrieval_length
from evidence.answers import (
    OF_ANSWERS,
    SCORED_LENGTHS,
    Answer,
    answers,
    first_half,
    of_all_lengths,
    one_of_each_context,
)
from evidence.baselines import RANDOM, SAME_TOKEN, SAME_TOKEN_ROW, controlled_view, controls, remark
from evidence.claims import Claim, Results
from evidence.drawing import RIGHT, WRONG, draw_strips
from evidence.hosts import builder
from evidence.pictures import figure
from evidence.questions import KEY, NAMES, PAIRS, PASSKEY_LENGTHS, VOCABULARY, Questions, frequent_words, passkeys
from evidence.remembered import remembered
from evidence.retrieval_claims import (
    BASELINES,
    CONTROLLED,
    METHODS,
    MODELS,
    OF_WORDS,
    RANKS,
    of_answers,
    of_methods,
    of_scores,
)
from evidence.rows import number, proportion
from evidence.study import BATCH, SEEDS, Model, Size, Study, View
from evidence.training import HELD_OUT_SEED, Recipe, scored_seed, selection_seed
from unilinattn.evaluation import Table
from unilinattn.evaluation.measures import function_metric
from unilinattn.examples.tasks import NO_ANSWER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTIONS_IN_TRAINING = 8
"""Number of passkeys that a context of the training is asked for; the evaluation asks for one."""

TRAINING_LENGTHS = (PASSKEY_LENGTHS.start, 64)
"""Lengths of the contexts in the first half of the training and at its end, between which they grow."""

SEED_STEP = 2 * len(SEEDS)
"""Difference of the seeds of two lengths: no two of the scored and selected contexts are drawn from one seed."""

PASSKEYS: Mapping[str, Any] = {"ap": "ap", "hit_at_1": "hit_at_1"}
WORDS_RIGHT: Mapping[str, Any] = {**PASSKEYS, "recall_at_k": "recall_at_k", "first_half": function_metric(first_half)}
OF_ERRORS: Mapping[str, Any] = {**PASSKEYS, **OF_ANSWERS}
"""Metrics of right passkeys, right words and wrong answers."""

RECIPES = {
    "mamba": Recipe(2500, 3e-3, 16, through_operators=True),
    "mamba2": Recipe(800, 5e-3, 16, through_operators=True),
    "transformer": Recipe(1500, 2e-3),
}

WORDS_RECIPES = {
    "mamba": Recipe(800, 5e-3, 16, through_operators=True),
    "mamba2": Recipe(800, 5e-3, 16, through_operators=True),
    "transformer": Recipe(1500, 3e-3, 16),
}
"""The recipes of passkeys and of frequent words."""

HOSTS = {"mamba": "mamba", "mamba2": "mamba2", "transformer": "local_transformer"}
"""The host of each model; a Transformer of two global layers did not learn passkeys on every seed."""

NARROW: Mapping[str, Mapping[str, int]] = {
    "mamba": {"hidden_size": 32},
    "mamba2": {"hidden_size": 32, "head_dim": 8},
    "transformer": {"hidden_size": 32, "head_dim": 8, "intermediate_size": 64},
}
"""Settings of the models of frequent words, which need less width."""


def _of_words(model: str) -> str:
    """Return the name of the model of an architecture that is trained on frequent words."""
    return f"{model}_words"


HEADINGS = dict(zip(MODELS, ("Mamba-1", "Mamba-2", "Transformer"), strict=True))
PAPER = {
    "LaTIM Mamba-2 130M": (0.998, 0.582, 0.281, 0.743, 0.412, 0.469, 0.222),
    "LaTIM Mamba-2 370M": (1.0, 0.576, 0.331, 0.654, 0.473, 0.536, 0.267),
}
"""LaTIM Tables 5 and 6, 1024 tokens: 1, 2 and 4 pairs; 2 and 4 pairs by whether the first or a later one is asked."""

PAPER_ROWS = ("1 pair", "2 pairs", "4 pairs", "2 pairs, first", "2 pairs, later", "4 pairs, first", "4 pairs, later")


def _columns(*metrics: tuple[str, str]) -> list[tuple[str, str, str]]:
    return [
        (model, metric, f"{heading} {label}".strip())
        for metric, label in metrics
        for model, heading in HEADINGS.items()
    ]


class Retrieval(Study):
    """The study of passkeys and frequent words."""

    name = "retrieval"
    title = "Passkey retrieval and frequent words"
    question = "Do scores of an answer name the tokens of a long context that hold it?"
    source = "LaTIM 4.3 and D.3 (Tables 5 and 6, Fig. 3, 8 and 9)"
    text = """
A passkey context has 48 to 96 tokens: noise with 1, 2, 4 or 8 pairs of a key and the value after it; the question at
the end repeats a key, and the answer is its value. A passage of frequent words has as many tokens of the same noise; at
the end the three most frequent words are named, the most frequent first. Each task has its models, of two layers: 64
wide for passkeys, 32 for words. The first layer of the Transformer sees four tokens, the second all: with two global
layers it did not learn passkeys from every seed. The passkey contexts of the training have 16 tokens in its first half
and grow to 64, so that the longer scored ones ask for more than was trained, and one table has up to 1,024. The keys
that hold an answer are known: one for a passkey, all occurrences for a word. Wrong answers are explained too, and the
relevant keys are then those of the *predicted* token: a method that shows the reason for the error finds them, and not
those of the right answer. Methods explain the predicted token; candidates are the tokens of the context. One word of
each passage is explained.

`same token` marks the keys that hold the predicted token. No value of a passkey occurs twice and all occurrences of a
word are relevant, so it is right by construction: these keys are known without a model, and a method shows that its map
agrees with them.
"""
    unit = "answers"
    caption = (
        "A right and a wrong answer of Mamba-2: the tokens of a context with eight pairs, the question at the end, and "
        "the absolute scores of three methods, each relative to its largest. The right answer is framed in green, the "
        "predicted one, if it is another, in red."
    )
    models: ClassVar[Mapping[str, Model]] = {
        **{name: Model(builder(HOSTS[name], VOCABULARY), recipe) for name, recipe in RECIPES.items()},
        **{
            _of_words(name): Model(builder(HOSTS[name], VOCABULARY, **NARROW[name]), recipe)
            for name, recipe in WORDS_RECIPES.items()
        },
    }
    size = Size(72, 24)
    quick = Size(4, 2)
    views = (
        View(
            "accuracy",
            "Share of right answers",
            _columns(("accuracy", "")),
            {heading: dict(zip(PAPER_ROWS, map("{:.3f}".format, row), strict=True)) for heading, row in PAPER.items()},
            "By the number of pairs, by whether the first pair or a later one is asked, and by the length of the "
            "context; below, by the rank of the named word. LaTIM's contexts have 1024 tokens.",
        ),
        View(
            "passkeys",
            "Passkeys among 8 pairs, right answers: AP, and share of best keys that hold the answer",
            _columns(("ap", "AP"), ("hit_at_1", "hit@1")),
        ),
        View(
            "wrong passkeys",
            "Passkeys among 8 pairs, wrong answers: share of best keys that hold the predicted and the right token",
            _columns(("hit_at_1", "predicted"), ("answer_hit", "right")),
        ),
        View(
            "words",
            "Frequent words, right answers: AP, and share of the first half of a word's occurrences in its scores",
            _columns(("ap", "AP"), ("first_half", "first half")),
        ),
        View(
            "wrong words",
            "Frequent words, wrong answers: AP for the predicted and for the right word",
            _columns(("ap", "predicted"), ("answer_ap", "right")),
        ),
        controlled_view(
            "passkeys",
            "Passkeys among 8 pairs",
            MODELS,
            "All models explain the contexts that the trained one answers right.",
        ),
        retrieval_length.view(HEADINGS, TRAINING_LENGTHS[1]),
        View("counts", "Number of wrong answers that are explained", _columns(("explained", ""))),
    )

    def loss(self, host: nn.Module, model: str, seed: int, batch: int) -> Tensor:
        """Return the cross entropy of the answers."""
        if model not in RECIPES:
            return _loss(host, frequent_words(batch, seed))
        first, last = TRAINING_LENGTHS
        # Models learn to look keys up in short contexts in the first half, and then in longer ones.
        growth = max(0.0, 2 * self.models[model].recipe.progress(seed) - 1)
        length = first + int((last - first) * growth)
        return _loss(host, passkeys(batch, seed, length=length, questions=QUESTIONS_IN_TRAINING))

    def accuracy(self, host: nn.Module, model: str) -> float:
        """Return the share of right answers."""
        given = of_all_lengths(host, passkeys if model in RECIPES else frequent_words, 64, HELD_OUT_SEED)
        return sum(one.right for one in given) / len(given)

    def measure(
        self, hosts: Mapping[str, Callable[[], nn.Module]], seed: int, size: Size, out: Path
    ) -> dict[str, Table]:
        """Return the tables of the views. Each model has its right and wrong answers explained."""
        rows: dict[str, list[Mapping[str, Any]]] = {view.table: [] for view in self.views}
        for model in (name for name in MODELS if name in hosts):
            of_task = {"passkeys": hosts[model](), "words": hosts[_of_words(model)]()}
            rows["accuracy"] += _accuracies(
                model, of_task["passkeys"], of_task["words"], size.scored, scored_seed(seed)
            )
            tasks = ("passkeys", _eight_pairs, METHODS, PASSKEYS), ("words", frequent_words, OF_WORDS, WORDS_RIGHT)
            for task, draw, methods, metrics in tasks:
                host = of_task[task]
                scored, choosing = (
                    one_of_each_context(of_all_lengths(host, draw, count, first, step=SEED_STEP))
                    for count, first in (
                        (3 * size.scored, scored_seed(seed)),
                        (2 * size.selection, selection_seed(seed)),
                    )
                )
                selection = [answer.sample for answer in choosing if answer.right][: size.selection]
                settings: dict[str, Any] = {
                    "selection": selection,
                    "select_by": "ap",
                    "baselines": BASELINES,
                    "progress": False,
                    "batch_size": BATCH,
                }
                groups = {
                    task: ([answer.sample for answer in scored if answer.right], metrics),
                    # An answer that is no token of the context has no key that holds it.
                    f"wrong {task}": (
                        [answer.sample for answer in scored if not answer.right and answer.in_context],
                        OF_ERRORS,
                    ),
                }
                # Layers are chosen on the same answers for both groups.
                explained = remembered(methods, {})
                for name, (samples, measured) in groups.items():
                    rows["counts"].append(number(name, "explained", min(len(samples), size.scored), model=model))
                    if samples:
                        rows[name] += ula.evaluate(
                            {model: host},
                            samples[: size.scored],
                            {**SAME_TOKEN_ROW, **explained},
                            measured,
                            out=out / f"{name}-{model}",
                            **settings,
                        )
                if task == "passkeys":
                    rows[task] += ula.evaluate(
                        controls(self.models, {model: hosts[model]}, seed),
                        groups[task][0][: size.scored],
                        {label: METHODS[label] for label in CONTROLLED[RANDOM]},
                        ["ap"],
                        out=out / f"controls-{model}",
                        **settings,
                    )
        of_passkeys = {model: hosts[model] for model in MODELS if model in hosts}
        rows[retrieval_length.TABLE] += retrieval_length.measure(of_passkeys, seed, size.scored, SEED_STEP)
        return {name: Table(of_table) for name, of_table in rows.items() if of_table}

    def remark(self, record: Mapping[str, Any]) -> str:
        """Return the baselines that win."""
        return remark(record, "passkeys", [SAME_TOKEN], CONTROLLED, MODELS)

    def claims(self, results: Results) -> list[Claim]:
        """Return the claims of LaTIM 4.3 and D.3, and those of this library."""
        return [*of_answers(), *of_scores(results), *retrieval_length.claims(MODELS), *of_methods(results)]

    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw the scores of a right and of a wrong answer of Mamba-2 over the tokens of the context."""
        host = hosts["mamba2"]()
        given = answers(host, _eight_pairs(512, HELD_OUT_SEED, length=SCORED_LENGTHS[0]))
        wrong = [one for one in given if not one.right and one.in_context]
        shown = [next(one for one in given if one.right), *wrong[:1]]
        drawn = figure(11.6, 2.7 * len(shown))
        for axis, one in zip(drawn.subplots(len(shown), 1, squeeze=False).flat, shown, strict=True):
            rows = {
                label: ula.explain(host, one.ids, method=method, target=-1, progress=False, **options).scores.flatten()
                for label, (method, options) in DRAWN.items()
            }
            ids = one.ids[0].tolist()
            colors = {one.predicted: WRONG, one.answer: RIGHT}
            answer = NAMES[one.predicted] + (", which is right" if one.right else f"; right is {NAMES[one.answer]}")
            draw_strips(
                axis,
                [NAMES[token] for token in ids],
                {label: scores[: one.context] for label, scores in rows.items()},
                f"Asked for {NAMES[ids[-1]]}, the model answers {answer}",
                pale=[at for at, token in enumerate(ids) if token < KEY],
                colors={at: colors[token] for at, token in enumerate(ids) if token in colors},
            )
        return drawn


def _loss(host: nn.Module, drawn: Questions) -> Tensor:
    asked = drawn.labels != NO_ANSWER
    return functional.cross_entropy(host(drawn.input_ids).logits[asked], drawn.labels[asked])


def _eight_pairs(count: int, seed: int, *, length: int) -> Questions:
    return passkeys(count, seed, length=length, pairs=max(PAIRS))


def _accuracies(model: str, host: nn.Module, of_words: nn.Module, count: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each answer, by number of pairs, place of the asked pair, length, and rank of the word."""
    groups: dict[str, list[Answer]] = {}
    for pairs in PAIRS:
        label = "1 pair" if pairs == 1 else f"{pairs} pairs"
        for place, first in (("", None), (", first", True), (", later", False)):
            if pairs > 1 or first is None:
                draw = partial(passkeys, pairs=pairs, first=first)
                groups[label + place] = of_all_lengths(host, draw, count, seed, step=SEED_STEP)
    hardest = f"{max(PAIRS)} pairs"
    for length in (SCORED_LENGTHS[0], SCORED_LENGTHS[-1]):
        groups[f"{hardest}, {length} tokens"] = [one for one in groups[hardest] if one.context == length]
    words = of_all_lengths(of_words, frequent_words, count, seed, step=SEED_STEP)
    for rank, label in enumerate(RANKS):
        groups[label] = [one for one in words if one.ids.shape[1] == one.context + 1 + rank]
    return [
        row
        for label, given in groups.items()
        for row in proportion(label, "accuracy", (one.right for one in given), model=model)
    ]


DRAWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "raw, mean": ("raw", {"layers": "mean"}),
    "latim l2, mean": ("latim", {"layers": "mean"}),
    "logit": ("logit", {}),
}
"""Methods of the picture, which need no choice of a layer."""


STUDY = Retrieval()
