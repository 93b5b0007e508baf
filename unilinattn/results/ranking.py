"""The largest scores of a sequence with their texts: keys of a target, or pairs of a query and a key."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.results.explained import Quote, quoted
from unilinattn.results.panels import one_sequence, patch_names, patch_positions, target_key
from unilinattn.results.scores import Scores
from unilinattn.results.streams import slots

TOP = 5
"""Number of scores in a ranking."""

PARTS = ("content", "control")
"""Extras with the axes of the scores that a ranking shows next to them."""

CHUNK = 2**22
"""Number of scores that are ranked at once."""

Index = tuple[int, ...]


@dataclass(frozen=True)
class Ranked:
    """A score: `name` says its layer, head, query and key, and `numbers` are the score and its parts."""

    name: str
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class Ranking:
    """The largest scores of a sequence by absolute value.

    Attributes:
        columns: names of the numbers: "score", and the `PARTS` of the result.
        pairs: whether the scores are those of queries or layers; the score of a query's token is then left out.
        top: the largest scores of keys that are no attention sinks, without zeros.
        sinks: the largest score of each attention sink.
    """

    columns: tuple[str, ...]
    pairs: bool
    top: tuple[Ranked, ...]
    sinks: tuple[Ranked, ...]


def ranking(result: Scores, batch: int = 0, *, count: int = TOP, quote: Quote = quoted) -> Ranking:
    """Return the `count` largest scores of a sequence, and those of its attention sinks; `quote` shows their texts."""
    labels = SequenceLabels.of(result, batch, quote)
    single = labels.single
    parts = [name for name in PARTS if name in single.extras and single.extras[name].shape == single.scores.shape]
    tensors = [single.scores, *(single.extras[name] for name in parts)]
    sinks = sorted(single.sinks[0]) if single.sinks else []
    words = np.setdiff1d(np.flatnonzero(labels.real), sinks)
    largest: list[tuple[float, Index]] = []
    of_sinks: list[list[tuple[float, Index]]] = [[] for _ in sinks]
    for rows, sizes in _chunks(labels):
        largest = _merged(largest, _largest(sizes, words, rows, count), count)
        of_sinks = [
            _merged(best, _largest(sizes, np.array([key]), rows, 1), 1)
            for best, key in zip(of_sinks, sinks, strict=True)
        ]

    def numbers(index: Index) -> tuple[float, ...]:
        return tuple(float(tensor[index]) for tensor in tensors)

    return Ranking(
        columns=("score", *parts),
        pairs=labels.pairs,
        top=tuple(Ranked(labels.name(index), numbers(index)) for _, index in largest),
        sinks=tuple(
            Ranked(labels.key(key), numbers(best[0][1]) if best else (0.0,) * len(tensors))
            for key, best in zip(sinks, of_sinks, strict=True)
        ),
    )


@dataclass(frozen=True)
class SequenceLabels:
    """The texts of one sequence of a result, and the axes of its scores.

    Attributes:
        single: the sequence.
        real: True at the keys that are no padding.
        rows: True at the queries that are no padding; a result without a query axis has one.
        query_keys: the key that is each query's token, -1 if it is none.
        pairs: whether scores have a query, a layer or a head.
        quote: shows the text of a token.
    """

    single: Scores
    real: Bool[np.ndarray, " key"]
    rows: Bool[np.ndarray, " query"]
    query_keys: Int[np.ndarray, " query"]
    pairs: bool
    quote: Quote

    @classmethod
    def of(cls, result: Scores, batch: int, quote: Quote) -> "SequenceLabels":
        """Return the labels of a sequence."""
        single = one_sequence(result, batch)
        keys, queries = single.sizes["key"], single.sizes.get("query", 1)
        real = np.ones(keys, dtype=bool) if single.mask is None else single.mask[0].cpu().numpy()
        rows, query_keys = np.ones(queries, dtype=bool), np.full(queries, -1)
        if "query" not in single.dims:
            target = target_key(result, batch, int(real.sum()))
            if target is not None:
                query_keys[0] = np.flatnonzero(real)[target]
        elif single.queries_are_keys:
            rows, query_keys = real, np.arange(keys)
        elif single.streams and len(single.streams["query"]) == 1:
            slot = slots(single.streams["key"]).get(next(iter(single.streams["query"])))
            query_keys = query_keys if slot is None else np.arange(slot.start, slot.stop)
        return cls(single, real, rows, query_keys, single.dims != ("key",), quote)

    def name(self, index: Index) -> str:
        """Return the layer, head, query and key of a score: "h.0, head 2, 4 ' is' <- 0 'The'"."""
        row = self.row(index[:-1])
        if self.pairs and "query" not in self.single.dims and self.query_keys[0] >= 0:
            row = ", ".join(text for text in (row, self.key(int(self.query_keys[0]))) if text)
        arrow = " <- " if "query" in self.single.dims or (self.pairs and self.query_keys[0] >= 0) else " "
        return f"{row}{arrow}{self.key(index[-1])}".lstrip()

    def row(self, index: Index) -> str:
        """Return the layer, head and query of a row of scores: "h.0, head 2, 4 ' is'"; empty for scores of a target."""
        single, texts = self.single, []
        for axis, position in zip(single.dims, index, strict=False):
            if axis == "layer":
                texts.append(single.layers[position] if single.layers else f"layer {position}")
            else:
                texts.append(single.head_names[position] if axis == "head" else self.query(position))
        return ", ".join(texts)

    def key(self, key: int) -> str:
        """Return the position of a key, counted over real tokens, and its text; of an image its patch."""
        if self.single.grid is not None and self.single.tokens is None:
            return patch_names(self.single, patch_positions(self.single))[key]
        return self._labelled(int(self.real[:key].sum()), key, self.single.tokens)

    def query(self, query: int) -> str:
        """Return the position of a query and its text."""
        single = self.single
        if single.queries_are_keys:
            return self.key(query)
        # Queries with texts of one stream are those of generated tokens, the last keys.
        generated = single.query_tokens is not None and not single.streams
        first = len(self.real) - len(self.rows) if generated else 0
        return self._labelled(first + query, query, single.query_tokens)

    def _labelled(self, position: int, index: int, tokens: Sequence[Sequence[str]] | None) -> str:
        return str(position) if tokens is None else f"{position} {self.quote(tokens[0][index])}"


def _chunks(labels: SequenceLabels) -> Iterator[tuple[list[Index], Float[Tensor, "row key"]]]:
    """Yield the sizes of some rows of a layer and head, zero where they are not ranked, and the index of each row."""
    single = labels.single
    leading = [range(size) for axis, size in single.sizes.items() if axis not in ("query", "key")]
    dtype = torch.promote_types(single.scores.dtype, torch.float32)
    height = max(1, CHUNK // single.sizes["key"])
    for index in product(*leading):
        rows = single.scores[index].reshape(-1, single.sizes["key"])
        for first in range(0, len(rows), height):
            sizes = rows[first : first + height].cpu().to(dtype).abs().nan_to_num(0.0)
            chunk = slice(first, first + len(sizes))
            sizes[~torch.from_numpy(labels.rows[chunk])] = 0
            columns = torch.from_numpy(labels.query_keys[chunk])
            if labels.pairs:
                sizes[columns >= 0, columns[columns >= 0]] = 0
            queries = range(first, first + len(sizes))
            yield [(*index, query) if "query" in single.dims else index for query in queries], sizes


def _largest(
    sizes: Float[Tensor, "row key"], keys: Int[np.ndarray, " selected"], rows: Sequence[Index], count: int
) -> list[tuple[float, Index]]:
    """Return the largest sizes at some keys that are not zero, with their indices; `rows` are those of the rows."""
    flat = sizes[:, torch.from_numpy(keys)].flatten()
    top = flat.topk(min(count, len(flat)))
    entries = []
    for size, position in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        row, column = divmod(position, len(keys))
        if size > 0:
            entries.append((size, (*rows[row], int(keys[column]))))
    return entries


def _merged(
    largest: list[tuple[float, Index]], more: list[tuple[float, Index]], count: int
) -> list[tuple[float, Index]]:
    return sorted([*largest, *more], key=lambda entry: -entry[0])[:count]
