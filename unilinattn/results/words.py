"""Merge the tokens of each word or span of a result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.results.panels import target_of, tokens_of_queries
from unilinattn.results.scores import Scores, extra_dims

Result = TypeVar("Result", bound=Scores)
Span = tuple[int, int]
"""First token of a word, and the one after its last; also of characters."""

CONTINUATION = "\N{DOTTED CIRCLE}"
"""Label of a token that continues a character, such as an emoji of several bytes, whose first token has the text."""

REDUCTIONS = ("sum", "max")
UNITS = ("characters", "tokens")


def merged_words(result: Result, reduce: str) -> Result:
    """Return a result with one key, and one query, for each word, see `Attribution.words`.

    Raises `InputError` if the words are unknown, and `OptionError` for an unknown reduction.
    """
    if result.word_ids is None:
        raise InputError(
            "the words of this result are unknown; explain a text with a fast tokenizer: "
            "explain(model, text, tokenizer=tokenizer)."
        )
    return _merged_groups(result, result.word_ids, reduce)


def merged_spans(result: Result, spans: Sequence[Any], reduce: str, unit: str) -> Result:
    """Return a result with one key, and one query, for each span, see `Attribution.spans`.

    Raises `InputError` for spans that do not fit, and `OptionError` for an unknown reduction or unit.
    """
    if unit not in UNITS:
        raise OptionError(f"unknown unit {unit!r}{nearest(unit, UNITS)}")
    if unit == "characters" and result.offsets is None:
        raise InputError(
            "the characters of this result's tokens are unknown; explain a text with a fast tokenizer, or give "
            'positions of tokens with unit="tokens".'
        )
    real = _real(result)
    by_sequence = [spans] if len(real) == 1 and not _nested(spans) else spans
    if len(by_sequence) != len(real):
        raise InputError(f"spans has {len(by_sequence)} lists for {len(real)} sequences; give a list for each.")
    groups = []
    for sequence, (wanted, mask) in enumerate(zip(by_sequence, real, strict=True)):
        positions = mask.nonzero().flatten().tolist()
        if unit == "characters" and result.offsets is not None:
            extents = [result.offsets[sequence][position] for position in positions]
        else:
            extents = [(count, count + 1) for count in range(len(positions))]
        numbers = _span_numbers(wanted, extents, f"of sequence {sequence}", unit)
        # Padding is in no group.
        by_position = dict(zip(positions, numbers, strict=True))
        groups.append([by_position.get(position) for position in range(len(mask))])
    return _merged_groups(result, groups, reduce)


def _span_numbers(spans: Sequence[Any], extents: Sequence[Span], where: str, unit: str) -> list[int | None]:
    """Return the number of the span of each token, None outside of them."""
    numbers: list[int | None] = [None] * len(extents)
    for number, span in enumerate(spans):
        begin, end = _checked(span)
        members = [token for token, (a, b) in enumerate(extents) if max(a, begin) < min(b, end)]
        if not members:
            raise InputError(f"span ({begin}, {end}) {where} has no token; spans count {unit}.")
        if taken := [token for token in members if numbers[token] is not None]:
            raise InputError(f"span ({begin}, {end}) {where} shares token {taken[0]} with another span.")
        for token in members:
            numbers[token] = number
    return numbers


def _nested(spans: Sequence[Any]) -> bool:
    """Whether spans are lists of pairs, one for each sequence."""
    return any(isinstance(pairs, Sequence) and not all(isinstance(n, int) for n in pairs) for pairs in spans)


def _checked(span: Any) -> Span:
    if not isinstance(span, Sequence) or len(span) != 2 or not all(type(n) is int for n in span):
        raise InputError(f"span {span!r} is no pair of integers, such as (4, 11).")
    begin, end = span
    if not 0 <= begin < end:
        raise InputError(f"span ({begin}, {end}) is empty or begins before 0; give (first, one after the last).")
    return begin, end


def _real(result: Scores) -> Bool[Tensor, "batch key"]:
    if result.mask is not None:
        return result.mask.cpu()
    return torch.ones(result.sizes.get("batch", 1), result.sizes["key"], dtype=torch.bool, device="cpu")


def _merged_groups(result: Result, groups: Sequence[Sequence[int | None]], reduce: str) -> Result:
    """Return a result with one key, and one query, for each run of tokens with the same number.

    Raises `OptionError` for an unknown reduction.
    """
    if reduce not in REDUCTIONS:
        raise OptionError(f"unknown reduction {reduce!r}{nearest(reduce, REDUCTIONS)}")
    spans = [_spans(ids, each) for ids, each in zip(groups, _real(result), strict=True)]
    square = result.queries_are_keys and result.query_tokens is None
    merged = partial(_by_sequence, result, spans=spans, merge=partial(_merged, reduce=reduce, square=square))
    scores = merged(result.scores)
    extras = dict(result.extras)
    for name, tensor in extras.items():
        axes = extra_dims(name, result.dims, result.scores.shape, tensor.shape)
        if axes == result.dims:
            extras[name] = merged(tensor)
        elif square and axes is not None:
            extras[name] = _by_sequence(result, tensor, spans, lambda values, each: _last(values, each, -1))
    count = scores.shape[-1]
    labels: dict[str, Any] = dict.fromkeys(("word_ids", "grid", "patches", "cls"))
    if result.tokens is not None:
        texts = [[_joined(row[a:b]) for a, b in each] for row, each in zip(result.tokens, spans, strict=True)]
        labels["tokens"] = [[*row, *[""] * (count - len(row))] for row in texts]
    if result.offsets is not None:
        extents = [[_extent(row[a:b]) for a, b in each] for row, each in zip(result.offsets, spans, strict=True)]
        labels["offsets"] = [[*row, *[(0, 0)] * (count - len(row))] for row in extents]
    if result.sinks is not None:
        labels["sinks"] = [
            [word for word, (a, b) in enumerate(each) if any(a <= sink < b for sink in row)]
            for row, each in zip(result.sinks, spans, strict=True)
        ]
    if len(result.streams.get("key", ())) == 1:
        labels["streams"] = {**result.streams, "key": dict.fromkeys(result.streams["key"], count)}
    mask = torch.arange(count, device="cpu") < torch.tensor([[len(each)] for each in spans], device="cpu")
    return replace(
        result,
        scores=scores,
        **labels,
        mask=None if bool(mask.all()) else mask.to(scores.device),
        extras=extras,
        options=_with_target(result, spans),
        checker=None,
    )


def _with_target(result: Scores, spans: Sequence[Sequence[Span]]) -> Mapping[str, Any]:
    """Return the options with the number of the word or span that the target is in, for targets that are keys."""
    targets: list[int] = []
    if "query" in result.dims:
        return result.options
    for sequence, (each, real) in enumerate(zip(spans, _real(result), strict=True)):
        keys = real.nonzero().flatten().tolist()
        first, count = tokens_of_queries(result, sequence, len(keys))
        target = target_of(result, sequence)
        if target is None or not -count <= target < count:
            return result.options
        numbers = [number for number, (begin, end) in enumerate(each) for key in keys if begin <= key < end]
        # A negative target stays one: it counts from the end.
        start = numbers[first] if target >= 0 else numbers[first + count - 1] + 1
        targets.append(numbers[first + target % count] - start)
    same = len(set(targets)) == 1 and not isinstance(result.options["target"], list)
    return {**result.options, "target": targets[0] if same else targets}


def _spans(word_ids: Sequence[int | None], real: Bool[Tensor, " key"]) -> list[Span]:
    """Return the tokens of each word in order; a token outside of words is one by itself."""
    positions = real.nonzero().flatten().tolist()
    # Neighbours without a word get different keys.
    words = groupby(positions, lambda key: ("token", key) if word_ids[key] is None else ("word", word_ids[key]))
    groups = [list(tokens) for _, tokens in words]
    return [(tokens[0], tokens[-1] + 1) for tokens in groups]


def _joined(labels: Sequence[str]) -> str:
    """Return the text of the tokens of a word, or `CONTINUATION` if its characters began in another word."""
    return "".join(label for label in labels if label != CONTINUATION) or CONTINUATION


def _extent(offsets: Sequence[Span]) -> Span:
    """Return the characters from the first token to the last, without tokens that have none."""
    extents = [(a, b) for a, b in offsets if b > a]
    return (min(a for a, _ in extents), max(b for _, b in extents)) if extents else (0, 0)


def _by_sequence(
    result: Scores, values: Tensor, spans: Sequence[Sequence[Span]], merge: Callable[[Tensor, Sequence[Span]], Tensor]
) -> Tensor:
    """Return `merge` of each sequence's values, padded with zeros to the largest number of words."""
    has_batch = "batch" in result.dims
    axis = result.dims.index("batch") if has_batch else 0
    tensors = values.unbind(axis) if has_batch else [values]
    merged = [merge(tensor, each) for tensor, each in zip(tensors, spans, strict=True)]
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in merged), strict=True)]
    padded = [tensor.new_zeros(shape) for tensor in merged]
    for tensor, whole in zip(merged, padded, strict=True):
        whole[tuple(map(slice, tensor.shape))] = tensor
    return torch.stack(padded, axis) if has_batch else padded[0]


def _merged(values: Float[Tensor, "*axis key"], spans: Sequence[Span], *, reduce: str, square: bool) -> Tensor:
    words = [values[..., begin:end] for begin, end in spans]
    keys = torch.stack([word.sum(-1) if reduce == "sum" else word.amax(-1) for word in words], -1)
    return _last(keys, spans, -2) if square else keys


def _last(values: Tensor, spans: Sequence[Span], axis: int) -> Tensor:
    """Return the entries of each word's last token."""
    return values.index_select(axis, torch.tensor([end - 1 for _, end in spans], device=values.device))
