"""The reduced map of scalar decays: products of scores and decays that double in size; see README.md."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.reduced_map.dense import Taps, of_tokens
from unilinattn.kernels.reduced_map.tiled import COLUMNS, ROWS, Buffers, square_rows, squares
from unilinattn.kernels.scan.memories import Scalar
from unilinattn.kernels.subnormal import decays, flushed_
from unilinattn.memory import parts

TILE = 512
"""Most rows and columns of a corner whose products are formed at a time, so that they stay in cache."""


def scalar_map(memory: Scalar) -> Float[Tensor, "batch length length"]:
    """Return the map of `scalar_rows` without weights, written at once.

    Memory beside the result: the products of one size of corners, at most L x TILE / 2 elements each, and fewer than
    ROWS rows.
    """
    query = memory.query
    length, groups = query.shape[1:3]
    buffers, whole = Buffers(), query.new_zeros(query.shape[0], length, length)
    for group in range(groups):
        factors = _of_group(memory, group)
        for some in _largest_squares(length):
            size = square_rows(some.stop - some.start)
            if some.stop - some.start == size:
                _fill_group(whole[:, some], some, factors, None, None, buffers, add=group > 0)
            else:
                padded = query.new_zeros(query.shape[0], size, some.start + size)
                _fill_group(padded, some, factors, None, None, buffers, add=False)
                whole[:, some, : some.stop] += padded[:, : some.stop - some.start, : some.stop]
    return whole


def _largest_squares(length: int) -> Iterator[slice]:
    """Yield the tokens of squares that need no padding, the largest first, and then those of fewer than ROWS tokens."""
    start = 0
    while length - start >= ROWS:
        stop = start + (1 << (length - start).bit_length() - 1)
        yield slice(start, stop)
        start = stop
    if start < length:
        yield from squares(slice(start, length))


def scalar_rows(
    memory: Scalar,
    left: Float[Tensor, "#batch #length channel"] | None = None,
    taps: Taps | None = None,
    *,
    blocks: Iterable[slice],
) -> Iterator[Float[Tensor, "batch row key"]]:
    """Yield blocks of rows, in any order, of sum_c left_ic sum_lag alpha_h(c)[i, j + lag] tap_lag[j + lag, c].

    Time: half of one product of inner dimension N per group, and one of the number of channels, for each lag; some
    exponentials per token and head. Memory: the block, and the factors of its tokens.
    """
    query = memory.query
    batch, length, groups, _ = query.shape
    reach = max(taps, default=0) if taps else 0
    weights: Taps | dict[int, None] = {0: None} if taps is None else taps
    buffers = Buffers()
    for tokens in blocks:
        pieces = squares(tokens)
        # Rows and columns of the last square are padded. Column j lies at `reach` + j, so that all taps land inside.
        last = pieces[-1].start + square_rows(pieces[-1].stop - pieces[-1].start)
        block = query.new_zeros(batch, last - tokens.start, reach + max(length, last))
        for group in range(groups):
            factors = _of_group(memory, group)
            for lag, tap in weights.items():
                reading, writing = (of_group(weight, group, groups) for weight in (left, tap))
                for some in pieces:
                    rows = slice(some.start - tokens.start, None if some is pieces[-1] else some.stop - tokens.start)
                    _fill_group(block[:, rows, reach - lag :], some, factors, reading, writing, buffers, add=True)
        yield block[:, : tokens.stop - tokens.start, reach : reach + length]


def held_elements(rows: int, shape: tuple[int, int, int, int], channels: int) -> int:
    """Return the elements that `scalar_rows` holds for blocks of `rows` rows, the block included.

    `shape` is (batch, length, heads, state) of one group.
    """
    batch, length, heads, state = shape
    size = square_rows(min(rows, length))
    columns = min(COLUMNS, length)
    # Scores and decays of the corners of one size or of one tile, and the factors of both sides.
    pairs = 2 * max(size * min(size, TILE) // 2, min(size, TILE) * min(columns, TILE))
    return batch * (size * (length + size) + pairs + 3 * (size + columns) * (max(channels, heads) + state + heads))


def _of_group(memory: Scalar, group: int) -> tuple[Tensor, ...]:
    """Return query and key (batch, length, state), log-decay and scale (batch, length, head) of a group."""
    query, key, log_decay, key_scale = memory
    decay, scale = (t.unflatten(2, (query.shape[2], -1))[:, :, group] for t in (log_decay, key_scale))
    return query[:, :, group], key[:, :, group], decay, scale


def _fill_group(
    block: Float[Tensor, "batch row col"],
    tokens: slice,
    factors: Sequence[Tensor],
    left: Float[Tensor, "#batch #length channel"] | None,
    tap: Float[Tensor, "#batch #length channel"] | None,
    buffers: Buffers,
    *,
    add: bool,
) -> None:
    """Write, or add, the map of one group's heads at one lag to the rows of `tokens`; column 0 of `block` is token 0.

    Squares on the diagonal grow from single tokens in pairs: the corner between the halves of a pair is a product of
    scores times a product of decays around the cut between them.
    """
    size = block.shape[1]
    query, key, decay, scale = (_padded(factor, tokens, size) for factor in factors)
    channels = max(t.shape[2] for t in (scale, left, tap) if t is not None)
    read_weight = None if left is None else _padded(left, tokens, size)
    write_weight = repeat_groups(scale, channels)
    if tap is not None:
        write_weight = write_weight * _padded(tap, tokens, size)
    square = block[:, :, tokens.start : tokens.start + size]
    weight = write_weight if read_weight is None else write_weight * read_weight
    square.diagonal(dim1=1, dim2=2).add_((query * key).sum(2) * weight.sum(2))
    ahead, behind = decay.clone(), torch.zeros_like(decay)
    half, total = 1, decay
    while half < size:
        (before, after) = total.unflatten(1, (-1, 2)).unbind(2)
        (_, later), (earlier, _) = _halves(query, half), _halves(key, half)
        (_, ahead_later), (behind_earlier, _) = _halves(ahead, half), _halves(behind, half)
        read = _weighted(ahead_later, None if read_weight is None else _halves(read_weight, half)[1], channels)
        write = _weighted(behind_earlier, _halves(write_weight, half)[0], channels)
        _fill_products(_blocks(square, half, 1), later, earlier, read, write, buffers, add=add)
        # Counted from the pair's beginning, and to its end.
        ahead_later += before.unsqueeze(2)
        behind_earlier += after.unsqueeze(2)
        half, total = 2 * half, before + after
    read, crossed = _weighted(ahead, read_weight, channels), decay.new_zeros(())
    for stop in range(tokens.start, 0, -COLUMNS):
        columns = slice(max(0, stop - COLUMNS), stop)
        _, key, decay, scale = (factor[:, columns] for factor in factors)
        write_weight = repeat_groups(scale, channels)
        if tap is not None:
            write_weight = write_weight * of_tokens(tap, columns)
        write = _weighted(_after(decay) + crossed, write_weight, channels)
        _fill_products(block[:, :, columns], query, key, read, write, buffers, add=add)
        crossed = crossed + decay.sum(1, keepdim=True)


def _fill_products(
    block: Float[Tensor, "*batch row col"],
    query: Float[Tensor, "*batch row state"],
    key: Float[Tensor, "*batch col state"],
    read: Float[Tensor, "*batch row channel"],
    write: Float[Tensor, "*batch col channel"],
    buffers: Buffers,
    *,
    add: bool,
) -> None:
    """Write, or add, the product of scores, query key^T, times the product of decays, read write^T."""
    rows, cols = block.shape[-2:]
    if max(rows, cols) > TILE:
        for row in parts(rows, TILE):
            for col in parts(cols, TILE):
                factors = (query[..., row, :], key[..., col, :], read[..., row, :], write[..., col, :])
                _fill_products(block[..., row, col], *factors, buffers, add=add)
        return
    scores, faded = (buffers.take(name, block.shape, block) for name in ("scores", "decays"))
    torch.matmul(query, key.mT, out=scores)
    torch.matmul(read, write.mT, out=faded)
    if add:
        block.addcmul_(scores, faded)
    else:
        torch.mul(scores, faded, out=block)


def _weighted(exponent: Tensor, weight: Tensor | None, channels: int) -> Tensor:
    """Return the decays of `exponent` (..., head), repeated for the channels of each head, times `weight`."""
    factor = repeat_groups(decays(exponent), channels)
    return factor if weight is None else flushed_(factor * weight)


def _after(log_decay: Float[Tensor, "batch token head"]) -> Float[Tensor, "batch token head"]:
    """Return the log-decay from after each token to the end."""
    return functional.pad(log_decay[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 1))


def _padded(
    factor: Float[Tensor, "#batch #length channel"], tokens: slice, size: int
) -> Float[Tensor, "#batch token channel"]:
    """Return a factor at some tokens, followed by zeros up to `size` tokens."""
    count = tokens.stop - tokens.start
    return functional.pad(of_tokens(factor, tokens).expand(-1, count, -1), (0, 0, 0, size - count))


def _halves(factor: Float[Tensor, "batch token channel"], half: int) -> tuple[Tensor, Tensor]:
    """Return views of the earlier and the later half of every pair, (batch, pair, half, channel)."""
    earlier, later = factor.unflatten(1, (-1, 2, half)).unbind(2)
    return earlier, later


def _blocks(square: Float[Tensor, "batch token token"], size: int, corner: int) -> Float[Tensor, "batch block row col"]:
    """Return a view of the squares of `size` on the diagonal, or (`corner` 1) of those below it between pairs."""
    batch, rows, _ = square.shape
    # Of 8 tokens with `size` 2, corners are rows 2-3 x columns 0-1 and rows 6-7 x columns 4-5: they are 4 rows and 4
    # columns apart, one stride of the view, which can therefore be written by one product without a copy.
    step, row, col = square.stride()
    apart = (1 + corner) * size
    shape, stride = (batch, rows // apart, size, size), (step, apart * (row + col), row, col)
    return square.as_strided(shape, stride, square.storage_offset() + corner * size * row)


def of_group(
    factor: Float[Tensor, "batch token channel"] | None, group: int, groups: int
) -> Float[Tensor, "batch token groupchannel"] | None:
    """Return the heads or channels of one group; None for None."""
    return None if factor is None else factor.unflatten(2, (groups, -1))[:, :, group]
