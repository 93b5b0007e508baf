"""Contexts with questions at their ends: passkeys in noise, and the most frequent words of a passage."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from unilinattn.errors import InputError, OptionError
from unilinattn.examples.tasks import NO_ANSWER

WORDS, KEYS, VALUES = 16, 16, 16
"""Number of words of the noise, of keys, and of values."""

KEY = WORDS
VALUE = KEY + KEYS
ASK = VALUE + VALUES
NAME = ASK + 1
VOCABULARY = NAME + 1

PAIRS = (1, 2, 4, 8)
"""Numbers of pairs in a context."""

LENGTHS = range(25, 97)
"""Numbers of tokens of a context, from which its length is drawn."""

PASSKEY_LENGTHS = range(2 * max(PAIRS), 1025)
"""Accepted numbers of tokens of a passkey context; the shortest holds eight pairs and no noise."""

SHARES = (0.20, 0.16, 0.12, 0.08)
"""Shares of the four most frequent words; the others share the rest evenly."""

NAMED = 3
"""Number of frequent words to name."""

_NAMES = """
the and of to in was for as on with by at from or an so
river lamp tiger wagon piano candle rocket anchor garden mirror basket violin ladder bottle saddle pepper
14 17 23 28 31 36 42 45 53 59 62 67 71 78 84 96 ? named:
"""
NAMES = _NAMES.split()
"""The tokens as words, for pictures."""


@dataclass(frozen=True)
class Questions:
    """Contexts with questions at their ends.

    Attributes:
        input_ids: the context, then the questions.
        labels: `labels[b, i]` is the token that query i predicts, or `NO_ANSWER`.
        relevant: `relevant[b, i, j]` is true if key j of the context holds the answer of query i.
        context: number of tokens of the context.
    """

    input_ids: Int[Tensor, "batch length"]
    labels: Int[Tensor, "batch length"]
    relevant: Bool[Tensor, "batch length length"]
    context: int


def passkeys(
    count: int,
    seed: int,
    *,
    length: int | None = None,
    pairs: int | None = None,
    first: bool | None = None,
    questions: int = 1,
) -> Questions:
    """Draw contexts of noise with pairs of a key and a value, and ask for the values of keys at the end.

    A pair is a key and, after it, its value; no key and no value occurs twice in a context. A question is `ASK` and a
    key, at which the answer is predicted.

    Args:
        count: number of contexts.
        seed: seed of everything that is drawn.
        length: number of tokens of each context, one of `PASSKEY_LENGTHS`; by default one of `LENGTHS`, drawn for all
            contexts together.
        pairs: number of pairs, one of `PAIRS`; by default drawn for each context.
        first: whether the first or a later pair is asked; by default any.
        questions: number of questions, each followed by its answer except the last.

    Raises `InputError` and `OptionError` for values outside these ranges.
    """
    generator, length = _start(count, seed, length, PASSKEY_LENGTHS)
    if pairs is not None and pairs not in PAIRS:
        raise OptionError(f"pairs is {pairs}; accepted: {', '.join(map(str, PAIRS))}.")
    most = max(PAIRS)
    ids = torch.randint(WORDS, (count, length), generator=generator)
    drawn = torch.tensor(PAIRS)[torch.randint(len(PAIRS), (count,), generator=generator)]
    size = drawn if pairs is None else torch.full((count,), pairs)
    keys, values = (
        first_id + torch.rand(count, size_of, generator=generator).argsort(-1)[:, :most]
        for first_id, size_of in ((KEY, KEYS), (VALUE, VALUES))
    )
    given = torch.stack([keys, values], -1)
    # `most` of the items of a context are pairs, which take two places; those beyond `size` are noise.
    items = torch.rand(count, length - most, generator=generator).argsort(-1)[:, :most].sort(-1).values
    places = (items + torch.arange(most))[:, :, None] + torch.arange(2)
    used = torch.rand(count, most, generator=generator).argsort(-1).argsort(-1) < size[:, None]
    written = torch.where(used[:, :, None], given, ids.gather(1, places.flatten(1)).view(count, most, 2))
    ids = ids.scatter(1, places.flatten(1), written.flatten(1))

    draw = torch.rand(count, questions, most, generator=generator)
    is_first = used & (used.cumsum(-1) == 1)
    candidates = used if first is None else is_first if first else used & ~is_first
    if not bool(candidates.any(-1).all()):
        raise OptionError("first=False asks for a later pair, and a context may have one pair only; pass pairs >= 2.")
    asked = torch.where(candidates[:, None], draw, -1).argmax(-1)
    answer = given.gather(1, asked[:, :, None].expand(-1, -1, 2))
    question = torch.cat([torch.full((count, questions, 1), ASK), answer], -1).flatten(1)[:, :-1]
    input_ids = torch.cat([ids, question], 1)
    labels = torch.full_like(input_ids, NO_ANSWER)
    at = length + 1 + 3 * torch.arange(questions)
    labels[:, at] = answer[:, :, 1]
    relevant = torch.zeros(*input_ids.shape, input_ids.shape[1], dtype=torch.bool)
    place = places[:, :, 1].gather(1, asked)
    relevant[torch.arange(count)[:, None], at, place] = True
    return Questions(input_ids, labels, relevant, length)


def frequent_words(count: int, seed: int, *, length: int | None = None) -> Questions:
    """Draw passages of words, whose three most frequent ones are named at the end, the most frequent first.

    The counts of the four most frequent words are `SHARES` of the length, rounded down, and the others share the rest
    evenly: no two of the named words occur equally often. The relevant keys of a name are all its occurrences in the
    passage. `length`: number of tokens of each passage, one of `LENGTHS`; by default drawn for all together.

    Raises `InputError` and `OptionError` as `passkeys`.
    """
    generator, length = _start(count, seed, length, LENGTHS)
    counts = [int(share * length) for share in SHARES]
    rest = torch.arange(length - sum(counts)) % (WORDS - len(counts)) + len(counts)
    ranks = torch.cat([torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)), rest])
    words = torch.rand(count, WORDS, generator=generator).argsort(-1)
    order = torch.rand(count, length, generator=generator).argsort(-1)
    passage = words.gather(1, ranks[order])
    named = words[:, :NAMED]
    input_ids = torch.cat([passage, torch.full((count, 1), NAME), named[:, :-1]], 1)
    labels = torch.full_like(input_ids, NO_ANSWER)
    labels[:, length:] = named
    relevant = torch.zeros(*input_ids.shape, input_ids.shape[1], dtype=torch.bool)
    relevant[:, length:, :length] = passage[:, None] == named[:, :, None]
    return Questions(input_ids, labels, relevant, length)


def _start(count: int, seed: int, length: int | None, accepted: range) -> tuple[torch.Generator, int]:
    """Return the generator of a seed, and the length of the contexts."""
    if count < 1:
        raise InputError(f"count is {count}; a batch needs at least one context: pass count >= 1.")
    if length is not None and length not in accepted:
        raise OptionError(f"length is {length}; accepted: {accepted.start} to {accepted.stop - 1}.")
    generator = torch.Generator().manual_seed(seed)
    drawn = LENGTHS[int(torch.randint(len(LENGTHS), (), generator=generator))]
    return generator, drawn if length is None else length
