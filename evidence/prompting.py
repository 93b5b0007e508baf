"""Few-shot prompts of short reviews with rationales, and the answers of a language model to them."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from evidence.study import FOLDER

REVIEWS = FOLDER / "inputs" / "reviews.json"

CLASSES = ("positive", "negative")

BATCH = 16
"""Most reviews of one length that a model reads together."""

WORD = re.compile(r"\w+(?:['-]\w+)*")


@dataclass(frozen=True)
class Review:
    """A review of one sentence with its class."""

    text: str
    label: str


@cache
def reviews(kind: str) -> list[Review]:
    """Return the reviews of a kind, "examples" or "items", in turn of each class."""
    texts: dict[str, list[str]] = json.loads(REVIEWS.read_text())[kind]
    pairs = zip(*(texts[label] for label in CLASSES), strict=True)
    return [Review(text, label) for pair in pairs for text, label in zip(pair, CLASSES, strict=True)]


def question(text: str) -> str:
    """Return the lines of a review without its class."""
    return f"Review: {text}\nSentiment:"


def shown(review: Review, words: Sequence[str]) -> str:
    """Return the lines of an example with its class, and with its key words if there are some."""
    rationale = f"\nThe key words are: {', '.join(words)}" if words else ""
    return f"{question(review.text)} {review.label}{rationale}\n\n"


def words_of(text: str) -> list[tuple[str, int, int]]:
    """Return the words of a text, each with its first character and the one after its last."""
    return [(match.group(), *match.span()) for match in WORD.finditer(text)]


def word_scores(
    text: str, scores: Float[Tensor, " token"], spans: Sequence[tuple[int, int]]
) -> list[tuple[str, float]]:
    """Return the words of a text with their scores: the sum over the tokens that share a character with the word.

    `spans` are the first character of each token in the text, and the one after its last.
    """
    return [
        (word, sum(float(scores[at]) for at, (first, last) in enumerate(spans) if first < end and start < last))
        for word, start, end in words_of(text)
    ]


def top_words(scored: Sequence[tuple[str, float]], count: int) -> list[str]:
    """Return the words with the highest scores, the highest first, each once whatever its case."""
    words: dict[str, str] = {}
    for word, _ in sorted(scored, key=lambda pair: -pair[1]):
        words.setdefault(word.lower(), word)
    return list(words.values())[:count]


def demonstrations(count: int, seed: int) -> list[int]:
    """Return the positions of the examples of a prompt, as many of each class, in a random order that `seed` fixes."""
    generator = torch.Generator().manual_seed(seed)
    pairs = len(reviews("examples")) // len(CLASSES)
    chosen = [
        len(CLASSES) * int(pair) + at
        for at in range(len(CLASSES))
        for pair in torch.randperm(pairs, generator=generator)[: count // len(CLASSES)]
    ]
    return [chosen[int(at)] for at in torch.randperm(len(chosen), generator=generator)]


def answers(
    model: nn.Module, prefix: Sequence[int], questions: Sequence[Sequence[int]], classes: Sequence[int]
) -> list[int]:
    """Return which of some ids, by its position in `classes`, has the highest logit after each question.

    `prefix` are the ids before every question, which the model reads once.
    """
    logits = after_prefix(model, prefix, questions)
    return logits[:, list(classes)].argmax(1).tolist()


@torch.no_grad()
def after_prefix(
    model: nn.Module, prefix: Sequence[int], questions: Sequence[Sequence[int]]
) -> Float[Tensor, "question vocabulary"]:
    """Return the logits after each question, which follows the prefix."""
    read = model(torch.tensor([list(prefix)]), use_cache=True).past_key_values
    rows: dict[int, Float[Tensor, " vocabulary"]] = {}
    for group in _of_one_length(questions):
        past: Any = copy.deepcopy(read)
        past.batch_repeat_interleave(len(group))
        ids: Int[Tensor, "batch length"] = torch.tensor([list(questions[at]) for at in group])
        logits = model(ids, past_key_values=past, use_cache=True).logits[:, -1]
        rows.update(zip(group, logits, strict=True))
    return torch.stack([rows[at] for at in range(len(questions))])


def _of_one_length(questions: Sequence[Sequence[int]]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for at, ids in enumerate(questions):
        groups.setdefault(len(ids), []).append(at)
    return [group[start : start + BATCH] for group in groups.values() for start in range(0, len(group), BATCH)]


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text."""
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def spans_of(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Return the first character of each token of a text, and the one after its last."""
    encoding: Mapping[str, Any] = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [tuple(span) for span in encoding["offset_mapping"]]
