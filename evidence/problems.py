"""Problems whose answer no single token of the input determines: questions on chains of pairs, and sums."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.examples.tasks import NO_ANSWER

WORDS, SIZE = 8, 12
"""Number of words of the noise; number of heads, of links, and of values."""

HEAD = WORDS
LINK = HEAD + SIZE
VALUE = LINK + SIZE
ASK = VALUE + SIZE
"""First ids of heads, links, values and questions; the words come first."""

CHAINS, SHARING = 4, 2
"""Number of chains of a context, and of chains that end with the same value."""

KINDS = ("value", "two hops", "complement")
"""The questions on chains; `ASK` + k asks the k-th."""

LOOKUP_VOCABULARY = ASK + len(KINDS)
LENGTHS = range(4 * CHAINS, 33)
"""Accepted numbers of tokens of a context of chains; the shortest has no noise."""

MODULUS, MARKED, SUM_LENGTH = 7, 2, 24
"""Number of digits, number of marked ones in a context of a sum, and number of its tokens."""

MARK = MODULUS
EQUALS = MARK + 1
SUM_VOCABULARY = EQUALS + 1


@dataclass(frozen=True)
class Problems:
    """Contexts with questions at their ends.

    Attributes:
        input_ids: the context, then the questions.
        labels: `labels[b, i]` is the token that query i predicts, or `NO_ANSWER`.
        relevant: `relevant[b, i, j]` is true if every replacement of token j of the context changes the answer of query
            i, and false if none does.
        replacements: `replacements[b, j, t]` is true if token j of the context may be replaced by id t.
        context: number of tokens of the context.
    """

    input_ids: Int[Tensor, "batch length"]
    labels: Int[Tensor, "batch length"]
    relevant: Bool[Tensor, "batch length length"]
    replacements: Bool[Tensor, "batch context id"]
    context: int


def complement(value: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Return the complement of values: the first value is that of the last one; no value is that of itself."""
    return 2 * VALUE + SIZE - 1 - value


def lookups(
    count: int,
    seed: int,
    *,
    kind: str | None = None,
    length: int = LENGTHS[-1],
    sharing: int = SHARING,
    questions: int = 1,
) -> Problems:
    """Draw contexts of noise with chains of two pairs, and ask for their ends.

    A chain is the pair of a head and a link, and that of the link and a value; pairs stand anywhere, in any order. No
    head and no link belongs to two chains, and `sharing` chains end with each value. The question "value" of a link
    has the answer of its value, "complement" of a link that of its value's complement, and "two hops" of a head that of
    the value at the end of its chain. A question is its token and the link or head, at which the answer is predicted.

    A token may be replaced by those of its kind that the context lacks, and a word of the noise by any other word.

    Args:
        count: number of contexts.
        seed: seed of everything that is drawn.
        kind: one of `KINDS`; by default drawn for each question, and half of the questions "value" ask a head for its
            link.
        length: number of tokens of each context, one of `LENGTHS`.
        sharing: number of chains that end with each value, a divisor of `CHAINS`.
        questions: number of questions, each followed by its answer except the last.

    Raises `InputError` if `count` is below one, and `OptionError` for another value outside these ranges.
    """
    generator = _generator(count, seed)
    if kind is not None and kind not in KINDS:
        raise OptionError(f"unknown question {kind!r}{nearest(kind, KINDS)}")
    if length not in LENGTHS:
        raise OptionError(f"length is {length}; accepted: {LENGTHS.start} to {LENGTHS.stop - 1}.")
    if sharing < 1 or CHAINS % sharing:
        raise OptionError(f"sharing is {sharing}; give a divisor of the {CHAINS} chains.")

    def distinct(first: int, number: int) -> Int[Tensor, "batch number"]:
        return first + torch.rand(count, SIZE, generator=generator).argsort(-1)[:, :number]

    heads, links = distinct(HEAD, CHAINS), distinct(LINK, CHAINS)
    values = distinct(VALUE, CHAINS // sharing).repeat(1, sharing)
    pairs = torch.stack([torch.stack([heads, links], -1), torch.stack([links, values], -1)], 1)
    places = _places(count, length, 2 * CHAINS, generator)
    order = torch.rand(count, 2 * CHAINS, generator=generator).argsort(-1)[:, :, None].expand_as(places)
    places = places.gather(1, order)
    context = torch.randint(WORDS, (count, length), generator=generator)
    context = context.scatter(1, places.flatten(1), pairs.flatten(1))

    asks_link = torch.zeros(count, questions, dtype=torch.bool)
    if kind is None:
        kinds = torch.randint(len(KINDS), (count, questions), generator=generator)
        asks_link = (kinds == 0) & (torch.rand(count, questions, generator=generator) < 0.5)
    else:
        kinds = torch.full((count, questions), KINDS.index(kind))
    chain = torch.randint(CHAINS, (count, questions), generator=generator)
    head, link, value = (tokens.gather(1, chain) for tokens in (heads, links, values))
    of_head = asks_link | (kinds == KINDS.index("two hops"))
    asked = torch.where(of_head, head, link)
    answer = torch.where(kinds == KINDS.index("complement"), complement(value), value)
    answer = torch.where(asks_link, link, answer)
    question = torch.stack([ASK + kinds, asked, answer], -1).flatten(1)[:, :-1]

    batch, queries = torch.arange(count)[:, None], length + 1 + 3 * torch.arange(questions)
    input_ids = torch.cat([context, question], 1)
    relevant = torch.zeros(*input_ids.shape, input_ids.shape[1], dtype=torch.bool)
    first, second = (places.view(count, 2, CHAINS, 2)[batch, step, chain] for step in (0, 1))
    for pair, matters in ((first, of_head), (second, ~asks_link)):
        for key in pair.unbind(-1):
            relevant[batch, queries, key] |= matters
    return Problems(input_ids, _labels(input_ids, queries, answer), relevant, _same_kind(context), length)


def sums(count: int, seed: int) -> Problems:
    """Draw digits, of which `MARKED` stand after a mark, and ask for the sum of these modulo `MODULUS`.

    Marked digits are not zero. A digit may be replaced by any other digit, and a mark by a digit.

    Raises `InputError` if `count` is below one.
    """
    generator = _generator(count, seed)
    places = _places(count, SUM_LENGTH, MARKED, generator)
    digits = torch.randint(1, MODULUS, (count, MARKED), generator=generator)
    written = torch.stack([torch.full_like(digits, MARK), digits], -1).flatten(1)
    context = torch.randint(MODULUS, (count, SUM_LENGTH), generator=generator).scatter(1, places.flatten(1), written)
    input_ids = torch.cat([context, torch.full((count, 1), EQUALS)], 1)
    relevant = torch.zeros(*input_ids.shape, input_ids.shape[1], dtype=torch.bool)
    relevant[torch.arange(count)[:, None], SUM_LENGTH, places.flatten(1)] = True
    labels = _labels(input_ids, torch.tensor([SUM_LENGTH]), digits.sum(1, keepdim=True) % MODULUS)
    ids = torch.arange(SUM_VOCABULARY)
    replacements = (ids < MODULUS) & (ids != context[:, :, None])
    return Problems(input_ids, labels, relevant, replacements, SUM_LENGTH)


def _generator(count: int, seed: int) -> torch.Generator:
    if count < 1:
        raise InputError(f"count is {count}; a batch needs at least one context: pass count >= 1.")
    return torch.Generator().manual_seed(seed)


def _places(count: int, length: int, pairs: int, generator: torch.Generator) -> Int[Tensor, "batch pair 2"]:
    """Draw the positions of pairs of neighbours that do not overlap, in ascending order."""
    # A pair is one item among `length - pairs` items, and takes two positions.
    items = torch.rand(count, length - pairs, generator=generator).argsort(-1)[:, :pairs].sort(-1).values
    return (items + torch.arange(pairs))[:, :, None] + torch.arange(2)


def _labels(
    input_ids: Int[Tensor, "batch length"], queries: Int[Tensor, " query"], answers: Int[Tensor, "batch query"]
) -> Int[Tensor, "batch length"]:
    labels = torch.full_like(input_ids, NO_ANSWER)
    labels[:, queries] = answers
    return labels


def _same_kind(context: Int[Tensor, "batch context"]) -> Bool[Tensor, "batch context id"]:
    """Return for each token the ids of its kind that the context lacks, or the other words of the noise."""
    ids = torch.arange(LOOKUP_VOCABULARY)
    starts = torch.tensor([HEAD, LINK, VALUE, ASK])
    kinds = torch.bucketize(ids, starts, right=True)
    occurs = (context[:, :, None] == ids).any(1)
    same = kinds == kinds[context][:, :, None]
    return same & (ids != context[:, :, None]) & ((ids < WORDS) | ~occurs[:, None])
