"""Panels: the labelled arrays that every picture of a result draws, one per layer or head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.errors import InputError
from unilinattn.results.scores import Scores, count_kinds, score_array
from unilinattn.results.streams import slots
from unilinattn.viz.colours import Array, largest, shown

COUNT_THE_RESIDUAL = ("alti", "alti_logit", "attribution", "logit", "lrp", "rollout")
"""Methods that add the residual stream to each query's own key, for any options."""


MOST_HEADS = 24
"""Largest number of heads in a figure, and of each layer on a page."""


@dataclass(frozen=True)
class Panel:
    """One array of scores with its title, labels and notes. Padded positions are removed.

    Attributes:
        kind: `matrix` of queries by keys or of heads by keys, `strip` of one row of keys, or `image` of patches.
        title: name of the layer, or of the method where layers are composed.
        mixer: kind of mixer of the layer, or the counted kinds of composed layers.
        error: reconstruction error of the layer, or the worst one of composed layers.
        values: the scores.
        row_tokens, column_tokens: texts of queries and keys.
        expected: the pattern to outline.
        own: position and score of the target's own key, in a strip of a method that adds the residual stream to it;
            `values` is NaN there, so that the other keys set the colour scale.
        head: name of the head, empty for a whole layer.
        rows: name of the axis of rows.
        sinks: True at the scores of attention sinks, None without any.
    """

    kind: Literal["matrix", "strip", "image"]
    title: str
    mixer: str
    error: float | None
    values: Float[Array, "row column"]
    row_tokens: tuple[str, ...] | None
    column_tokens: tuple[str, ...] | None
    expected: Bool[Array, "row column"] | None
    own: tuple[int, float] | None = None
    head: str = ""
    rows: str = "query"
    sinks: Bool[Array, "row column"] | None = None

    @property
    def ranked(self) -> Float[Array, "row column"]:
        """The scores that set the colour scale: NaN at attention sinks."""
        return self.values if self.sinks is None else np.where(self.sinks, np.nan, self.values)

    @property
    def name(self) -> str:
        """The title, with the head if there is one."""
        return " · ".join(text for text in (self.title, self.head) if text)

    @property
    def notes(self) -> list[str]:
        """The notes under the title, without the mixer: error, largest score, the target's own score."""
        notes = [] if self.error is None else [f"error {self.error:.1e}"]
        if self.sinks is not None:
            notes.append("attention sinks in grey")
        some = bool(np.isfinite(self.ranked).any())
        if self.own is None:
            others = f"largest {'' if self.sinks is None else 'of the others '}{largest(self.ranked):.3g}"
            return [*notes, others if some else "no other scores"]
        residual = f"the token itself and the residual stream {self.own[1]:.3g}"
        return [
            *notes,
            f"largest of the other tokens {largest(self.ranked):.3g}" if some else "no other tokens",
            residual,
        ]

    @property
    def signed(self) -> bool:
        """Whether any score is negative."""
        return bool((self.ranked < 0).any())


def panels(
    result: Scores,
    *,
    batch: int = 0,
    expected: Bool[Tensor, "..."] | None = None,
    heads: Sequence[Sequence[int]] | None = None,
) -> tuple[Panel, ...]:
    """Return one panel per layer for one sequence of a result; a method that composes layers has one panel.

    A result with heads has a panel for each of them, one layer after the other; for a target without an image they are
    the rows of one panel per layer. `heads`: positions of the heads of each layer, by default all.

    Raises `InputError` if there is no such sequence or `expected` does not have its shape.
    """
    single = one_sequence(result, batch)
    if "batch" not in result.dims and batch not in (0, -1):
        raise InputError(f"This result is one sequence, so batch can only be 0, not {batch}.")
    pattern = None if expected is None else _one_pattern(result, batch, expected)
    scores = score_array(single).astype(np.float64)
    stacked = scores if "layer" in single.dims else scores[None]
    real = np.ones(single.sizes["key"], dtype=bool) if single.mask is None else single.mask[0].cpu().numpy()
    tokens = (
        None if single.tokens is None else tuple(shown(t) for t, r in zip(single.tokens[0], real, strict=True) if r)
    )
    made = []
    for title, names, values in _by_head(single, stacked, heads):
        head = names[0] if len(names) == 1 else ""
        if "query" in single.dims:
            rows = real if single.queries_are_keys else np.ones(values.shape[0], dtype=bool)
            outlined = None if pattern is None else pattern[np.ix_(rows, real)]
            labels = tokens if single.queries_are_keys else None
            if single.query_tokens is not None:
                labels = tuple(map(shown, single.query_tokens[0]))
            made.append(Panel("matrix", *title, values[np.ix_(rows, real)], labels, tokens, outlined, head=head))
        elif values.ndim == 2:
            outlined = None if pattern is None else pattern[None, real].repeat(len(values), 0)
            made.append(Panel("matrix", *title, values[:, real], names, tokens, outlined, rows=single.head_kind))
        elif single.grid is not None:
            patches = patch_positions(single)
            outlined = None if pattern is None else pattern[patches].reshape(single.grid)
            made.append(Panel("image", *title, values[patches].reshape(single.grid), None, None, outlined, head=head))
        else:
            outlined = None if pattern is None else pattern[None, real]
            row = values[None, real]
            own = None
            position = target_key(result, batch, row.size) if counts_residual(result) else None
            if position is not None:
                own = (position, float(row[0, position]))
                row[0, position] = np.nan
            made.append(Panel("strip", *title, row, None, tokens, outlined, own, head=head))
    sinks = sink_columns(single)
    return tuple(replace(panel, sinks=_cells(single, panel, sinks)) for panel in made) if sinks else tuple(made)


def one_sequence(result: Scores, batch: int) -> Scores:
    """Return one sequence of a result, which may be of a single one without a batch axis."""
    return result.select(batch=batch) if "batch" in result.dims else result


def sink_columns(single: Scores) -> list[int]:
    """Return the positions of the attention sinks of one sequence among its real keys."""
    if not single.sinks:
        return []
    real = range(single.sizes["key"]) if single.mask is None else single.mask[0].nonzero().flatten().tolist()
    return [column for column, key in enumerate(real) if key in single.sinks[0]]


def _cells(single: Scores, panel: Panel, sinks: Sequence[int]) -> Bool[Array, "row column"]:
    """Return True at the cells of a panel that are scores of attention sinks."""
    if panel.kind == "image":
        return np.isin(patch_positions(single), sinks).reshape(panel.values.shape)
    return np.broadcast_to(np.isin(np.arange(panel.values.shape[1]), sinks), panel.values.shape)


def largest_heads(result: Scores, *, batch: int, each: int | None = None, total: int | None = None) -> list[list[int]]:
    """Return the positions of the heads of each layer with the largest sums of absolute scores, in order.

    `each`: largest number of heads of a layer. `total`: largest number of heads of all layers.
    """
    single = one_sequence(result, batch)
    scores = np.nan_to_num(np.abs(score_array(single).astype(np.float64)))
    stacked = scores if "layer" in single.dims else scores[None]
    sums = stacked.sum(tuple(range(2, stacked.ndim)))
    ranks = (-sums).argsort(1, kind="stable").argsort(1, kind="stable")
    drawn = ranks < (sums.shape[1] if each is None else each)
    if total is not None:
        largest_sums = (-sums).ravel().argsort(kind="stable")[:total]
        drawn &= np.isin(np.arange(sums.size), largest_sums).reshape(sums.shape)
    return [np.flatnonzero(row).tolist() for row in drawn]


def heads_note(result: Scores, shown: int, *, layers: int = 1) -> str:
    """Return a sentence on the heads that are shown, empty if all are: '24 of 1536 channels, the largest by ...'.

    `layers`: number of layers of which the heads are.
    """
    count = result.sizes.get("head", 0) * layers
    if shown >= count:
        return ""
    return f"{shown} of {count} {result.head_kind}s, the largest by sum of absolute scores"


def _by_head(
    single: Scores, stacked: Float[Array, "layer ..."], heads: Sequence[Sequence[int]] | None
) -> list[tuple[tuple[str, str, float | None], tuple[str, ...], Float[Array, "..."]]]:
    """Return the title, the names of the heads and the scores of each panel, which has one head or rows of heads."""
    titles, names = _titles(single, len(stacked)), single.head_names
    if "head" not in single.dims:
        return [(title, names, values) for title, values in zip(titles, stacked, strict=True)]
    selection = [range(stacked.shape[1])] * len(stacked) if heads is None else heads
    if "query" in single.dims or single.grid is not None:
        return [
            (title, (names[head],), values[head])
            for title, values, positions in zip(titles, stacked, selection, strict=True)
            for head in positions
        ]
    return [
        (title, tuple(names[head] for head in positions), values[list(positions)])
        for title, values, positions in zip(titles, stacked, selection, strict=True)
        if len(positions)
    ]


def fitting_pattern(result: Scores, expected: Bool[Tensor, "..."] | None) -> Bool[Tensor, "..."] | None:
    """Return the pattern of a comparison for one result: None if it is one of queries and the result is of a target."""
    sizes = tuple(size for axis, size in result.sizes.items() if axis not in ("layer", "head"))
    if expected is None or "query" in result.dims or tuple(expected.shape) in (sizes, sizes[-1:]):
        return expected
    return None


def counts_residual(result: Scores) -> bool:
    """Return whether a method adds the residual stream to the score of each query's own key."""
    composed = result.options.get("compose") == "rollout"
    if result.method == "alti" and (result.options.get("by_head") or result.options.get("heads") is not None):
        return False
    return composed or result.method in COUNT_THE_RESIDUAL or result.options.get("residual") is True


def _one_pattern(result: Scores, batch: int, expected: Tensor) -> Bool[Array, "..."]:
    sizes = {axis: size for axis, size in result.sizes.items() if axis not in ("layer", "head")}
    whole = tuple(sizes.values())
    single = tuple(size for axis, size in sizes.items() if axis != "batch")
    if tuple(expected.shape) not in (whole, single):
        raise InputError(
            f"expected must have shape {whole} ({', '.join(sizes)}) or, if the same in every sequence, "
            f"{single}; got {tuple(expected.shape)}."
        )
    return (expected[batch] if expected.ndim > len(single) else expected).cpu().numpy()


def _titles(single: Scores, count: int) -> list[tuple[str, str, float | None]]:
    """Return the title, mixer and reconstruction error of each panel; composed layers share their worst error."""
    if "layer" not in single.dims and len(single.layers) != 1:
        worst = None if single.worst_error is None else single.worst_error[1]
        title = f"{len(single.layers)} layers together" if single.layers else single.method
        return [(title, count_kinds(single.kinds), worst)]
    names = single.layers or tuple(f"layer {index}" for index in range(count))
    kinds = single.kinds or ("",) * count
    return [(name, kind, single.reconstruction_error.get(name)) for name, kind in zip(names, kinds, strict=True)]


def target_key(result: Scores, batch: int, count: int) -> int | None:
    """Return the target's position among `count` real keys, or None if unknown or if it is the only key."""
    target = target_of(result, batch)
    first, count = tokens_of_queries(result, batch, count)
    if target is None or not -count <= target < count or count == 1:
        return None
    return first + target % count


def target_query(result: Scores, batch: int) -> tuple[str, int] | None:
    """Return the stream of a target that is no key, and its position there; None if it is a key or unknown."""
    queries, keys = (result.streams.get(axis, {}) for axis in ("query", "key"))
    target = target_of(result, batch)
    if target is None or len(queries) != 1 or not keys.keys().isdisjoint(queries):
        return None
    ((name, count),) = queries.items()
    return (name, target % count) if -count <= target < count else None


def target_of(result: Scores, batch: int) -> int | None:
    """Return the position of the target of a sequence, None if it is unknown."""
    target = result.options.get("target")
    if isinstance(target, list):
        # Without a batch axis, which of several targets is explained is unknown.
        target = target[batch] if "batch" in result.dims or len(target) == 1 else None
    return target if isinstance(target, int) else None


def tokens_of_queries(result: Scores, batch: int, count: int) -> tuple[int, int]:
    """Return the first of `count` real keys that are tokens of the queries' stream, and their number; 0 if none are."""
    if not result.streams:
        return 0, count
    slot = slots(result.streams["key"]).get(next(iter(result.streams["query"])), slice(0, 0))
    if result.mask is None:
        return slot.start, slot.stop - slot.start
    real = result.mask[batch if "batch" in result.dims else 0]
    return int(real[: slot.start].sum()), int(real[slot].sum())


def patch_positions(single: Scores) -> list[int]:
    """Return the positions of the patches: if unknown, keys without a bracketed token such as [CLS], else the last."""
    assert single.grid is not None
    if single.patches is not None:
        return list(single.patches)
    length, count = single.sizes["key"], single.grid[0] * single.grid[1]
    if single.tokens is not None:
        plain = [i for i, t in enumerate(single.tokens[0]) if not (t.startswith("[") and t.endswith("]"))]
        if len(plain) == count:
            return plain
    return list(range(length - count, length))


def patch_names(single: Scores, patches: Sequence[int]) -> list[str]:
    """Return the row and column of each patch, and the names of the other keys."""
    assert single.grid is not None
    names = ["[CLS]" if key in (single.cls or ()) else f"token {key}" for key in range(single.sizes["key"])]
    for index, key in enumerate(patches):
        names[key] = f"({index // single.grid[1]}, {index % single.grid[1]})"
    return names
