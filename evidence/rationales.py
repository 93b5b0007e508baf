"""SmolLM2-135M: key words of each example of a few-shot prompt, by methods' scores (AMPLIFY, Krishna et al. 2023)."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import nn

from evidence import checkpoints
from evidence.claims import HERE, Claim
from evidence.comparisons import better
from evidence.prompting import (
    CLASSES,
    Review,
    answers,
    demonstrations,
    encoded,
    question,
    reviews,
    shown,
    spans_of,
    top_words,
    word_scores,
    words_of,
)
from evidence.rankings import half
from evidence.record import Numbers
from evidence.rows import number
from evidence.scores import scores_of
from evidence.section import Section
from evidence.study import View
from evidence.truths import Input
from unilinattn import methods
from unilinattn.evaluation import Table
from unilinattn.methods.default import CAUSAL as DEFAULT
from unilinattn.options import Options

ACCURACY, GAPS = "accuracy", "differences"
"""The tables, and the metric of the first."""

MODEL = "SmolLM2-135M"

BEGIN = "<|endoftext|>"

METHODS: Sequence[Options] = (DEFAULT, methods.Logit(), methods.Attribution(), methods.Raw())

NONE, RANDOM, LAST = "no rationale", "random words", "last words"

CONTROLS = (NONE, RANDOM, LAST)

SHOTS, WORDS = (4, 8), (1, 3)
"""Numbers of examples, and of key words of each, from which one half of the reviews chooses."""

CHOOSING, REPORTING = (0,), (1, 2, 3, 4)
"""Seeds of the examples of prompts on each half."""

SOURCE = "Krishna et al. (2023); HMA ACL Table 7, on larger models and other tasks"

Ranked = Mapping[str, Sequence[Sequence[tuple[str, float]]]]
"""The words of each example with their scores, by kind of rationale."""


def rankings(model: nn.Module, tokenizer: Any, examples: Sequence[Review]) -> Ranked:
    """Return the words of each example with their scores by each method, by chance and by position.

    A method explains the logit of the example's class after the example, in a prompt of it only.
    """
    begin = [tokenizer.convert_tokens_to_ids(BEGIN)]
    first = len("Review: ")
    inputs, spans = {}, []
    for at, review in enumerate(examples):
        text = question(review.text)
        ids = begin + encoded(tokenizer, text)
        inputs[at] = Input(tuple(ids), len(ids) - 1, encoded(tokenizer, f" {review.label}")[0], predicted=False)
        spans.append([(start - first, end - first) for start, end in spans_of(tokenizer, text)])
    scored = scores_of(model, inputs, METHODS)
    ranked: dict[str, list[Sequence[tuple[str, float]]]] = {
        method.label: [
            word_scores(review.text, scored[at][0][method.label][len(begin) :], spans[at])
            for at, review in enumerate(examples)
        ]
        for method in METHODS
    }
    for at, review in enumerate(examples):
        words = [word for word, _, _ in words_of(review.text)]
        chance = torch.rand(len(words), generator=torch.Generator().manual_seed(at)).tolist()
        ranked.setdefault(RANDOM, []).append(list(zip(words, chance, strict=True)))
        ranked.setdefault(LAST, []).append([(word, float(place)) for place, word in enumerate(words)])
    return ranked


def right(
    model: nn.Module,
    tokenizer: Any,
    items: Sequence[Review],
    ranked: Sequence[Sequence[tuple[str, float]]] | None,
    *,
    shots: int,
    words: int,
    seeds: Sequence[int],
) -> list[float]:
    """Return for each review the share of prompts, one for each seed, after which the model names its class.

    `ranked` are the words of the examples with their scores, of which the highest `words` are shown; None shows none.
    """
    examples = reviews("examples")
    ids = [encoded(tokenizer, f" {label}")[0] for label in CLASSES]
    questions = [encoded(tokenizer, question(review.text)) for review in items]
    hits = []
    for seed in seeds:
        texts = [
            shown(examples[at], [] if ranked is None else top_words(ranked[at], words))
            for at in demonstrations(shots, seed)
        ]
        prefix = [tokenizer.convert_tokens_to_ids(BEGIN), *encoded(tokenizer, "".join(texts))]
        named = answers(model, prefix, questions, ids)
        hits.append([CLASSES[at] == review.label for at, review in zip(named, items, strict=True)])
    return [fmean(of_item) for of_item in zip(*hits, strict=True)]


def chosen(
    model: nn.Module, tokenizer: Any, items: Sequence[Review], ranked: Ranked
) -> tuple[int, int, list[dict[str, Any]]]:
    """Return the numbers of examples and of key words with the best accuracy, and all accuracies.

    The number of examples is the best without rationales; then that of words is the best by the mean over all kinds of
    rationales, those by chance and by position too, so that no method has an advantage.
    """
    rows = []

    def accuracy(kind: str, of_kind: Sequence[Sequence[tuple[str, float]]] | None, shots: int, words: int) -> float:
        values = right(model, tokenizer, items, of_kind, shots=shots, words=words, seeds=CHOOSING)
        rows.append({"method": kind, "shots": shots, "words": words, "accuracy": round(fmean(values), 4)})
        return fmean(values)

    bare = {shots: accuracy(NONE, None, shots, 0) for shots in SHOTS}
    shots = max(SHOTS, key=lambda count: bare[count])
    of_words = {
        words: fmean(accuracy(kind, of_kind, shots, words) for kind, of_kind in ranked.items()) for words in WORDS
    }
    return shots, max(WORDS, key=lambda count: of_words[count]), rows


def tables(accuracies: Mapping[str, Sequence[float]]) -> dict[str, Table]:
    """Return the accuracy of each kind of rationale by review, and its differences to each control."""
    rows, gaps = [], []
    for kind, values in accuracies.items():
        for at, value in enumerate(values):
            rows.append(number(kind, ACCURACY, value, model=MODEL, sample=str(at)))
            for control in CONTROLS:
                if kind != control:
                    gap = value - accuracies[control][at]
                    gaps.append(number(kind, f"less {control}", gap, model=MODEL, sample=str(at)))
    return {ACCURACY: Table(rows), GAPS: Table(gaps)}


class Rationales(Section):
    """Key words of examples in few-shot prompts."""

    name = "rationales"
    title = "SmolLM2-135M: key words as rationales"
    unit = "reviews"
    text = f"""
Do few-shot prompts work better if each example names the words that a method ranks first? AMPLIFY (Krishna et al.,
2023; HMA ACL Table 7) puts such rationales into the prompts of large models, by the scores of a small proxy. Here
{MODEL} is both. It reads examples of reviews of one sentence, each with its class and a line "The key words are: ...",
and names the class of another review, positive or negative, by the larger logit. Methods explain the logit of the
example's class, and a word has the sum of its tokens. "{RANDOM}" are drawn once for each example, "{LAST}" are those
nearest to its end, and "{NONE}" leaves the line out.

Of {len(reviews("items"))} written reviews, half choose the number of examples, {" or ".join(map(str, SHOTS))}, which is
that with the best accuracy without rationales, and the number of words, {" or ".join(map(str, WORDS))}, which is that
with the best mean over all rationales, random and last words too. The other half reports. Each review is asked after
{len(REPORTING)} prompts, the same ones for every kind of rationale but for its words, whose examples are drawn from
{len(reviews("examples"))} other reviews, as many of each class; AMPLIFY selects those that models misclassify.
Intervals are 95 % bootstrap over reviews. The rationale stands behind the class, so that the model is asked for the
class only and writes no rationale.
"""
    views = (
        View(ACCURACY, "Accuracy, of which chance has 0.5", [(MODEL, ACCURACY, ACCURACY)]),
        View(
            GAPS,
            "Accuracy less that of each control, on the same reviews",
            [(MODEL, f"less {control}", f"less {control}") for control in CONTROLS],
        ),
    )

    def measure(self) -> tuple[dict[str, Table], dict[str, Any]]:
        """Choose on one half of the reviews, and measure every kind of rationale on the other."""
        model, tokenizer = checkpoints.smollm2()
        return measured(model, tokenizer, reviews("items"))

    def claims(self) -> list[Claim]:
        """Return the claim of both papers, and those of this library."""
        every = [method.label for method in METHODS]

        def above(method: str, *controls: str) -> list[Any]:
            return [one for control in controls for one in better(ACCURACY, ACCURACY, method, control, (MODEL,))]

        return [
            Claim.of("Key words by attribution raise the accuracy", SOURCE, above("attribution", NONE)),
            Claim.of("Key words by every method raise the accuracy", HERE, *(above(method, NONE) for method in every)),
            Claim.of("Key words by the default raise the accuracy", HERE, above(DEFAULT.label, NONE)),
            Claim.of(
                "Key words by the default raise it more than random words and than the last ones",
                HERE,
                above(DEFAULT.label, RANDOM, LAST),
            ),
        ]

    def remark(self, numbers: Numbers) -> str:
        """Return the chosen numbers, and the kinds of rationales whose accuracy differs from that without."""
        bare = [row for row in numbers["choice"] if row["method"] == NONE]
        tried = ", ".join(f"{row['accuracy']:.3f} with {row['shots']}" for row in bare)
        words = ", ".join(
            f"{fmean(row['accuracy'] for row in numbers['choice'] if row['words'] == count):.3f} with {count}"
            for count in WORDS
        )
        return (
            f"The choosing half had accuracies of {tried} examples, and then means of {words} key words of each, so "
            f"that these tables are those of {numbers['shots']} and {numbers['words']}. {_differing(numbers)} "
            f"{_beyond_chance(numbers)}"
        )


def measured(model: nn.Module, tokenizer: Any, items: Sequence[Review]) -> tuple[dict[str, Table], dict[str, Any]]:
    """Return the tables of the reporting half of some reviews, pairs of both classes, and the choice on the other."""
    ranked = rankings(model, tokenizer, reviews("examples"))
    halves: dict[str, list[Review]] = {"choose": [], "report": []}
    for at, review in enumerate(items):
        halves[half(at // len(CLASSES))].append(review)
    shots, words, choice = chosen(model, tokenizer, halves["choose"], ranked)
    accuracies = {
        kind: right(model, tokenizer, halves["report"], of_kind, shots=shots, words=words, seeds=REPORTING)
        for kind, of_kind in {NONE: None, **ranked}.items()
    }
    return tables(accuracies), {"shots": shots, "words": words, "choice": choice}


def _differing(numbers: Numbers) -> str:
    """Return which kinds of rationales are above or below no rationale by their intervals, in a sentence."""
    lines = [row for row in numbers["numbers"] if (row["table"], row["metric"]) == (GAPS, f"less {NONE}")]
    sides = {
        "above": [row["method"] for row in lines if row["low"] > 0],
        "below": [row["method"] for row in lines if row["high"] < 0],
    }
    listed = [f"{side.capitalize()} {NONE}: {', '.join(kinds)}" for side, kinds in sides.items() if kinds]
    if not listed:
        return f"No kind of rationale differs significantly from none: all {len(lines)} intervals contain zero."
    return f"{'. '.join(listed)} (intervals that are not corrected for {len(lines)} comparisons)."


def _beyond_chance(numbers: Numbers) -> str:
    """Return which methods' words raise the accuracy more than random ones, in a sentence."""
    labels = [method.label for method in METHODS]
    above = [
        row["method"]
        for row in numbers["numbers"]
        if (row["table"], row["metric"]) == (GAPS, f"less {RANDOM}") and row["method"] in labels and row["low"] > 0
    ]
    return (
        f"More than {RANDOM}: {', '.join(above)}."
        if above
        else f"The words of no method do better than {RANDOM}: a gain over no rationale says nothing of the scores."
    )


RATIONALES = Rationales()
