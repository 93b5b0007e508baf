"""Rows, blocks of rows and products of a scope's matrix, in the memory that `max_memory` allows."""

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

from unilinattn.kernels.exponents import Scaled, multiply, power, scaled_product, signed_root, times_power_of_two
from unilinattn.kernels.reduced_map.tiled import ROWS
from unilinattn.kernels.row_product.naive import Sign, apply_sign
from unilinattn.memory import parts, rows_within
from unilinattn.operator.cost import block_cut, heads_cut, map_cut, product_elements, reduced_elements
from unilinattn.operator.factored import factored, reduced_blocks, row_product
from unilinattn.operator.rows import block_of, rows_of
from unilinattn.operator.scopes import ScopedMap
from unilinattn.operator.selection import (
    JOINS,
    PRODUCTS,
    REDUCTIONS,
    CheckedHeads,
    Heads,
    as_slice,
    checked_heads,
    chosen_heads,
    head_axis,
)
from unilinattn.operator.stages import Mix


def map_shape(scope: ScopedMap, heads: Heads) -> tuple[int, ...]:
    """Return the shape (batch, [head,] queries, keys) of the matrix."""
    batch, queries, keys = scope.shape
    return batch, *head_axis(checked_heads(heads, scope.heads), scope.heads), queries, keys


def map_rows(scope: ScopedMap, index: Int[Tensor, "batch row"], heads: Heads) -> Float[Tensor, "..."]:
    """Return the rows (batch, [head,] row, key) at the positions `index`, in time linear in length."""
    selected = checked_heads(heads, scope.heads)
    count, channels, _ = block_cut(scope, product_elements(selected), index.shape[1], None)
    pieces = []
    for positions in index.split(count, dim=1):
        rows = as_slice(positions)
        if rows is None:
            every = _by_head(rows_of(scope.chain, scope.groups, positions, scope.like))
            pieces.append(_over_heads(every, selected, scope.repeat))
        else:
            pieces.append(_block(scope, rows, selected, channels))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)


def map_blocks(
    scope: ScopedMap, heads: Heads, subject: str, extra_elements: int = 0
) -> Iterator[tuple[slice, Float[Tensor, "..."]]]:
    """Yield blocks (batch, [head,] row, key) of the matrix from its first rows to its last.

    The mean over heads is summed without the maps of single heads if the chain can be factored. `extra_elements`:
    elements that the caller holds for each entry of a block without heads. Raises `MemoryLimitError`, which names
    `subject`, if the smallest block does not fit.
    """
    selected, queries = checked_heads(heads, scope.heads), scope.shape[1]
    if not queries:
        yield slice(0, 0), scope.like.new_zeros(map_shape(scope, heads))
        return
    rows, channels, _ = map_cut(scope, selected, extra_elements=extra_elements, subject=subject)
    terms = factored(scope.chain) if selected == "mean" else None
    if terms is not None:
        yield from reduced_blocks(terms, scope.shape, rows, scope.like)
        return
    for tokens in parts(queries, rows):
        yield tokens, _block(scope, tokens, selected, channels)


def mean_map(scope: ScopedMap) -> Float[Tensor, "batch query key"] | None:
    """Return the mean over heads, written at once; None if the matrix needs blocks of rows."""
    stage = scope.chain[0]
    if len(scope.chain) > 1 or not isinstance(stage, Mix) or stage.mixer.is_complex:
        return None
    mean = stage.mixer.mean_map()
    return None if mean is None else mean.to(scope.like.dtype)


def fill_heads(
    out: Float[Tensor, "batch head query key"], scope: ScopedMap, heads: Sequence[int], subject: str
) -> None:
    """Write the maps of some heads into `out`, in blocks of rows and channels that `heads_cut` chooses."""
    rows, channels, _ = heads_cut(scope, subject)
    for row_part in parts(scope.shape[1], rows):
        for span in parts(scope.groups, channels):
            positions = [k for k, head in enumerate(heads) if span.start <= head // scope.repeat < span.stop]
            if positions:
                block = _by_head(block_of(scope.chain, scope.groups, row_part, scope.like, span))
                for position in positions:
                    out[:, position, row_part] = block[:, heads[position] // scope.repeat - span.start]


def map_row_product(
    scope: ScopedMap,
    row: Float[Tensor, "batch query"],
    weight: Float[Tensor, "batch query"],
    sign: Sign,
    subject: str,
) -> Float[Tensor, "batch key"]:
    """Return sum_i row_i sign(weight_i m_ij) for the mean m over heads, block by block.

    Raises `MemoryLimitError`, which names `subject`, if the smallest block does not fit.
    """
    terms = factored(scope.chain)
    if terms is None:
        blocks = map_blocks(scope, "mean", subject)
        products = (row[:, None, some] @ apply_sign(sign, block * weight[:, some, None]) for some, block in blocks)
        return torch.stack([product.squeeze(1) for product in products]).sum(0)
    element_bytes = scope.like.element_size()
    rows = rows_within(lambda count: element_bytes * reduced_elements(terms, scope.shape, count), ROWS, subject)
    return row_product(terms, scope.shape, rows, row, weight, sign)


def _block(scope: ScopedMap, rows: slice, heads: CheckedHeads, step: int) -> Float[Tensor, "..."]:
    """Return consecutive rows (batch, [head,] row, key), computed for `step` channels at a time."""
    groups, repeat = scope.groups, scope.repeat
    channels_of = list(parts(groups, step))
    if isinstance(heads, str) and heads in PRODUCTS:
        blocks = (_by_head(block_of(scope.chain, groups, rows, scope.like, span)) for span in channels_of)
        return _product(reduce(multiply, map(scaled_product, blocks)), heads, groups, repeat)
    if isinstance(heads, str):
        total: Tensor | None = None
        for span in channels_of:
            reduced = REDUCTIONS[heads](_by_head(block_of(scope.chain, groups, rows, scope.like, span)))
            if len(channels_of) > 1 and heads in ("mean", "abs-mean"):
                reduced = reduced * ((span.stop - span.start) / groups)
            total = reduced if total is None else JOINS[heads](total, reduced)
        assert total is not None
        return total
    indices = chosen_heads(heads, scope.heads)
    selected: Tensor | None = None
    for span in channels_of:
        positions = [position for position, head in enumerate(indices) if span.start <= head // repeat < span.stop]
        if not positions and span.stop < groups:
            continue
        block = _by_head(block_of(scope.chain, groups, rows, scope.like, span))
        if selected is None:
            selected = block.new_empty(block.shape[0], len(indices), *block.shape[2:])
        channels = _select(block, [indices[position] // repeat - span.start for position in positions])
        selected.index_copy_(1, _index(positions, block), channels)
    assert selected is not None
    return selected.squeeze(1) if isinstance(heads, int) else selected


def _over_heads(rows: Float[Tensor, "batch head row key"], heads: CheckedHeads, repeat: int) -> Float[Tensor, "..."]:
    """Reduce or select heads; each of the given rows stands for `repeat` equal heads."""
    if isinstance(heads, str):
        if heads in PRODUCTS:
            return _product(scaled_product(rows), heads, rows.shape[1], repeat)
        return REDUCTIONS[heads](rows)
    selected = _select(rows, [head // repeat for head in chosen_heads(heads, rows.shape[1] * repeat)])
    return selected.squeeze(1) if isinstance(heads, int) else selected


def _product(product: Scaled, heads: str, groups: int, repeat: int) -> Float[Tensor, "batch row key"]:
    """Return the product of `groups` heads that stand for `repeat` equal heads each, or its geometric mean."""
    product = power(product, repeat)
    return times_power_of_two(*product) if heads == "product" else signed_root(product, groups * repeat)


def _select(rows: Float[Tensor, "batch head row key"], heads: Sequence[int]) -> Float[Tensor, "batch chosen row key"]:
    return rows.index_select(1, _index(heads, rows))


def _index(heads: Sequence[int], like: Tensor) -> Int[Tensor, " head"]:
    return torch.tensor(heads, dtype=torch.long, device=like.device)


def _by_head(columns: Inexact[Tensor, "batch key group row"]) -> Float[Tensor, "batch group row key"]:
    """Put the axes of rows in order; of complex modes the real part passes from input to output."""
    return columns.real.permute(0, 2, 3, 1)
