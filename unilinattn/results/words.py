"""Merge the tokens of each word of a result."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.results.scores import Scores

Result = TypeVar("Result", bound=Scores)
Span = tuple[int, int]
"""First token of a word, and the one after its last."""

REDUCTIONS = ("sum", "max")


def merged_words(result: Result, reduce: str) -> Result:
    """Return a result with one key, and one query, for each word, see `Attribution.words`.

    Raises `InputError` if the words are unknown, and `OptionError` for an unknown reduction.
    """
    if reduce not in REDUCTIONS:
        raise OptionError(f"unknown reduction {reduce!r}{nearest(reduce, REDUCTIONS)}")
    if result.word_ids is None or result.tokens is None:
        raise InputError(
            "the words of this result are unknown; explain a text with a fast tokenizer: "
            "explain(model, text, tokenizer=tokenizer)."
        )
    length = result.sizes["key"]
    real = torch.ones(len(result.word_ids), length, dtype=torch.bool) if result.mask is None else result.mask.cpu()
    spans = [_spans(ids, each) for ids, each in zip(result.word_ids, real, strict=True)]
    square = result.sizes.get("query") == length
    scores = _by_sequence(result, result.scores, spans, lambda part, each: _merged(part, each, reduce, square=square))
    extras = dict(result.extras)
    for name, tensor in extras.items():
        if square and tensor.shape == result.scores.shape[:-1]:
            extras[name] = _by_sequence(result, tensor, spans, lambda part, each: _last(part, each, -1))
    texts = [["".join(row[a:b]) for a, b in each] for row, each in zip(result.tokens, spans, strict=True)]
    count = scores.shape[-1]
    mask = torch.arange(count) < torch.tensor([[len(each)] for each in spans])
    return replace(
        result,
        scores=scores,
        tokens=[[*row, *[""] * (count - len(row))] for row in texts],
        word_ids=None,
        mask=None if bool(mask.all()) else mask.to(scores.device),
        extras=extras,
    )


def _spans(word_ids: Sequence[int | None], real: Bool[Tensor, " key"]) -> list[Span]:
    """Return the tokens of each word in order; a token outside of words is one by itself."""
    places = real.nonzero().flatten().tolist()
    # Neighbours without a word get different keys.
    words = groupby(places, lambda place: ("token", place) if word_ids[place] is None else ("word", word_ids[place]))
    groups = [list(tokens) for _, tokens in words]
    return [(tokens[0], tokens[-1] + 1) for tokens in groups]


def _by_sequence(
    result: Scores, values: Tensor, spans: Sequence[Sequence[Span]], merge: Callable[[Tensor, Sequence[Span]], Tensor]
) -> Tensor:
    """Return `merge` of each sequence's values, padded with zeros to the largest number of words."""
    has_batch = "batch" in result.dims
    place = result.dims.index("batch") if has_batch else 0
    parts = values.unbind(place) if has_batch else [values]
    merged = [merge(part, each) for part, each in zip(parts, spans, strict=True)]
    shape = [max(sizes) for sizes in zip(*(part.shape for part in merged), strict=True)]
    padded = [part.new_zeros(shape) for part in merged]
    for part, whole in zip(merged, padded, strict=True):
        whole[tuple(map(slice, part.shape))] = part
    return torch.stack(padded, place) if has_batch else padded[0]


def _merged(part: Float[Tensor, "*axis key"], spans: Sequence[Span], reduce: str, *, square: bool) -> Tensor:
    words = [part[..., begin:end] for begin, end in spans]
    keys = torch.stack([word.sum(-1) if reduce == "sum" else word.amax(-1) for word in words], -1)
    return _last(keys, spans, -2) if square else keys


def _last(part: Tensor, spans: Sequence[Span], axis: int) -> Tensor:
    """Return the entries of each word's last token."""
    return part.index_select(axis, torch.tensor([end - 1 for _, end in spans], device=part.device))
