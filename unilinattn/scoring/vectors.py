"""The vectors T_i(x_j) of all pairs or of some rows, whole or by head, in tiles, for methods that take their norms."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import OptionError, UncoveredError
from unilinattn.memory import allowed, parts, rows_within
from unilinattn.operator.cost import TILE, apply_elements, rows_elements, split_elements, tile_elements, tile_rows
from unilinattn.operator.deferred import shapes_only
from unilinattn.operator.heads import HeadContributions
from unilinattn.operator.pairwise import PairwiseContributions, Tile
from unilinattn.operator.selection import checked_heads, chosen_heads
from unilinattn.options.bases import ThroughHeads
from unilinattn.scoring.maps import sum_on_first
from unilinattn.scoring.selection import StepRows, mixing_operator, only_port, query_rows
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

SUMMED = 3
"""Tiles of vectors beside those of each layer: the last layer's product before its axes are put in order, the sum so
far, and the next sum."""


@dataclass(frozen=True)
class HeadAxis:
    """The heads of a head axis, and whether a head of these layers is one channel wide."""

    heads: tuple[int, ...]
    kind: Literal["head", "channel"]


def head_axis(method: str, layers: Sequence[Layer], heads: Any, scope: str = "core") -> HeadAxis:
    """Return the axis of the heads of a scope that `heads` selects, all for None.

    Raises `UncoveredError` if the layers have different numbers of heads, and `OptionError` for heads out of range.
    """
    maps = [mixing_operator(layer).scoped_map(scope) for layer in layers]
    counts = {layer.name: scoped.heads for layer, scoped in zip(layers, maps, strict=True)}
    if len(set(counts.values())) > 1:
        first, other = layers[0], next(layer for layer in layers if counts[layer.name] != counts[layers[0].name])
        raise UncoveredError(
            f"{method}: {first.name} has {counts[first.name]} heads and {other.name} has {counts[other.name]}, so they "
            "share no head axis; pass layers=[...] with layers of one kind, or one of them."
        )
    kind: Literal["head", "channel"] = "channel" if all(scoped.width == 1 for scoped in maps) else "head"
    return HeadAxis(selected_heads(method, layers[0], heads, scope), kind)


def selected_heads(method: str, layer: Layer, heads: Any, scope: str = "core") -> tuple[int, ...]:
    """Return the heads of a layer that `heads` selects, counted from 0, all for None.

    Raises `OptionError` for heads out of range or named twice.
    """
    total = mixing_operator(layer).num_heads(scope)
    selection = heads if heads is None or isinstance(heads, int) else list(heads)
    try:
        indices = tuple(chosen_heads(checked_heads(selection, total), total))  # type: ignore[arg-type]  # no reduction
    except OptionError as error:
        raise OptionError(f"{method}, {layer.name}: {error}") from None
    if len(set(indices)) < len(indices):
        raise OptionError(f"{method}: heads={selection} names a head twice; name each one once.")
    return indices


def through_heads(options: ThroughHeads, layer: Layer) -> HeadContributions:
    """Return the contributions through heads of a layer's core, each apart if `by_head`, else summed."""
    heads = selected_heads(options.name, layer, options.heads)
    return HeadContributions.of(only_port(layer), heads, joint=not options.by_head)


def contribution_tiles(
    layers: Sequence[Layer], factors: Sequence[float], rows: Int[Tensor, "batch row"], activation: str
) -> Iterator[Tile]:
    """Yield tiles of the sum over layers of factor * T_i(x_j).

    If `rows` are all rows, `activation` is "exact" and every layer has a pairwise form, the tiles are blocks of pairs;
    else they are blocks of rows. Pairs for which every layer's T_i(x_j) is zero by causality may be missing.
    """
    ops = [only_port(layer) for layer in layers]
    tiled = rows.shape[1] == layers[0].output.shape[1] and activation == "exact"
    forms = [form for op in ops if tiled and (form := op.pairwise()) is not None]
    count = len(layers)
    if len(forms) == count:
        # A step of several layers holds the vectors of each layer, in tiles of one size.
        size = min(tile_rows(form, extra_tiles=_held_vectors(count), portions=count) for form in forms)
        causal = all(form.causal for form in forms)
        streams = (form.times(factor).tiles(causal, rows=size) for form, factor in zip(forms, factors, strict=True))
        for tiles in zip(*streams, strict=True):
            yield tiles[0] if count == 1 else _sum(tiles[0], [tile.vectors() for tile in tiles])
        return
    keys, width = ops[0].inputs[ops[0].ports[0]].shape[1], _rows_size(layers)
    size = rows_within(lambda n: n * width, TILE, "vectors T_i(x_j)")
    for start in range(0, rows.shape[1], size):
        span = slice(start, min(start + size, rows.shape[1]))
        vectors = (op.contributions(rows[:, span], activation=activation) for op in ops)
        shares = [(v if f == 1 else f * v).permute(0, 3, 1, 2) for f, v in zip(factors, vectors, strict=True)]
        yield _sum(Tile(span, slice(0, keys), shares[0], None, rows[:, span]), shares)


def shares_cost(layers: Sequence[Layer], rows: int, *, exact: bool) -> int:
    """Return the bytes of `contribution_tiles` for `rows` rows, the output vector of each included."""
    ops, count = [only_port(layer) for layer in layers], len(layers)
    batch, queries, out = layers[0].output.shape
    width = layers[0].output.element_size()
    forms: list[PairwiseContributions] = []
    if exact and rows == queries:
        with shapes_only():
            forms = [form for op in ops if (form := op.pairwise()) is not None]
    vectors = 4 * batch * max(rows, 1) * out
    if len(forms) == count:
        extra_tiles = _held_vectors(count)
        size = min(tile_rows(form, extra_tiles=extra_tiles, portions=count, subject=None) for form in forms)
        elements = sum(tile_elements(form, min(size, queries), extra_tiles=extra_tiles) for form in forms) + vectors
        return width * elements
    # As many rows of a per-channel chain as fit; each row weights a vector of every key.
    each = _rows_size(layers)
    size = min(rows, TILE)
    while size > 1 and size * each > allowed():
        size //= 2
    chains = max(rows_elements(op.chains[op.ports[0]], 0, op.width, size) for op in ops)
    passes = max(apply_elements(op.chains, op.inputs) for op in ops)
    return width * (max(size * each // width + chains, passes) + vectors)


def head_tiles(
    split: HeadContributions, factor: float, rows: Int[Tensor, "batch row"], activation: str
) -> Iterator[tuple[slice, Tile]]:
    """Yield tiles of factor * T^h_i(x_j) with the slice of the parts of `split` that they hold.

    As in `contribution_tiles`, they are blocks of pairs or blocks of rows, and some zero pairs may be missing.
    """
    op, sizes = split.operator, (split.count, split.channel_sets.shape[1])
    tiled = rows.shape[1] == op.output.shape[1] and activation == "exact"
    if tiled and (form := split.pairwise()) is not None:
        yield from split.tiles(form, factor, tile_rows(form, split=sizes))
        return
    size = rows_within(lambda n: _head_rows_size(split, n), TILE, "vectors T^h_i(x_j)")
    for span in parts(rows.shape[1], size):
        yield from split.rows(rows[:, span], span, factor, activation)


def head_tiles_cost(split: HeadContributions, rows: int, *, exact: bool, products: bool) -> int:
    """Return the bytes of `head_tiles` for `rows` rows, the output vector of each included.

    `products`: whether vectors of a single channel are formed; their norms need no product with W.
    """
    op, sizes = split.operator, (split.count, split.channel_sets.shape[1])
    batch, queries, out = op.output.shape
    width = op.output.element_size()
    passed = apply_elements({op.ports[0]: split.chain}, op.inputs)
    vectors = 4 * batch * rows * out
    form = None
    if exact and rows == queries:
        with shapes_only():
            form = split.pairwise()
    if form is not None:
        size = min(tile_rows(form, split=sizes, subject=None), queries)
        # The channels of a folded layer are its heads.
        channels = sizes[1] if form.folded is None else sizes[1] * form.folded.shape[2] // form.channels
        formed = products or channels > 1 or form.weight is None or bool(form.tail)
        elements = tile_elements(form, size, split=sizes, products=formed) + vectors
        return width * max(elements, passed)
    size = rows_within(lambda n: _head_rows_size(split, n), min(rows, TILE), None)
    chain = rows_elements(split.chain, 0, op.width, size)
    return width * (max(_head_rows_size(split, size, products=products) // width + chain, passed) + vectors)


def cancellation(
    sizes: Float[Tensor, "batch row"], total: Float[Tensor, "batch row out"], p: float, rows: StepRows
) -> Float[Tensor, "batch row"]:
    """Return sum_j ||T_i(x_j)||_p / ||sum_j T_i(x_j)||_p of each row, at least 1; 0 for rows of padding.

    `sizes` are the numerators and `total` the sums of the vectors. A row whose vectors are all zero has the ratio 1,
    and one whose vectors cancel has infinity.
    """
    size = torch.linalg.vector_norm(total, ord=p, dim=-1)
    ratio = torch.where(sizes == 0, torch.ones_like(sizes), sizes / size)
    return ratio.masked_fill(~rows.real, 0)


def at_target(
    values: Float[Tensor, "batch row"], trace: Trace, layer: Layer, target: Target | None
) -> Float[Tensor, "batch target"]:
    """Return the values of the target's row, given one for every row or only the target's."""
    targets = query_rows(trace, layer, target)
    return values.gather(1, targets) if values.shape[1] != targets.shape[1] else values


def _sum(tile: Tile, vectors: Sequence[Float[Tensor, "batch out row col"]]) -> Tile:
    return replace(tile, inner=sum_on_first(vectors), weight=None)


def _held_vectors(count: int) -> int:
    """Tiles of vectors that `contribution_tiles` holds for `count` layers in one step: one each, and their sum."""
    return 0 if count == 1 else count + SUMMED


def _head_rows_size(split: HeadContributions, rows: int, *, products: bool = True) -> int:
    """Return the bytes that `head_tiles` holds for `rows` rows of a layer without a pairwise form."""
    op = split.operator
    batch, keys, _ = op.inputs[op.ports[0]].shape
    count, channels = split.channel_sets.shape
    vectors, out = 4 * batch * rows * keys * split.channels, op.output.shape[2]
    reduced = split_elements((batch, rows, keys), out, count, channels, op.output, products=products)
    return (vectors + reduced) * op.output.element_size()


def _rows_size(layers: Sequence[Layer]) -> int:
    """Return the bytes that `contribution_tiles` holds for each row if a layer has no pairwise form."""
    ops = [only_port(layer) for layer in layers]
    batch, keys, _ = ops[0].inputs[ops[0].ports[0]].shape
    return 4 * batch * keys * max(op.width for op in ops) * layers[0].output.element_size()
