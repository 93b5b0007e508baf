"""The reduced map on a GPU: tiles of tokens as products over (head, state); see README.md."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.launch import Factor, Precision, factor, on, power
from unilinattn.kernels.reduced_map import tiled
from unilinattn.kernels.reduced_map.dense import Taps
from unilinattn.kernels.reduced_map.tiled import Factors
from unilinattn.kernels.reduced_map.triton_kernels import SUB, PanelSizes, chunk_factors, diagonal_tiles, far_tiles
from unilinattn.kernels.row_product.naive import Sign
from unilinattn.memory import parts

CHUNK = 64
"""Tokens per chunk, whose factors share a reference: the chunk's end for writes, its beginning for reads."""

ROWS = 1024
"""Rows per block; the factors of the columns before it are recomputed for each block."""

COLUMNS = 4096
"""Columns per panel."""

INNER = 2048
"""(head, state) pairs per panel."""


class Panel(NamedTuple):
    """The factors of a block of rows and some columns for a tile of heads; chunks are counted from `origin`.

    Attributes:
        read: (batch, row chunk * CHUNK, inner), the weights of a row on the state before its chunk, `left` included.
        write: (plane, batch, column chunk * CHUNK, inner), the write of a column, decayed to the end of its chunk, for
            the next chunk, and, with taps, to the end of the next chunk, for all later ones.
        fade: (batch, row chunk, column chunk, inner), the decay across the chunks between.
        chunks: the first chunk of the columns and the one after their last.
        row: the first chunk of the rows.
        origin: the first token of chunk 0, at most 0; the rows begin with a chunk.
        stop: the token after the last row.
    """

    read: Float[Tensor, "batch row inner"]
    write: Float[Tensor, "plane batch col inner"]
    fade: Float[Tensor, "batch rowchunk colchunk inner"]
    chunks: tuple[int, int]
    row: int
    origin: int
    stop: int


def reduced_rows(
    factors: Factors,
    shape: tuple[int, int, int, int],
    left: Float[Tensor, "#batch #length head"] | None = None,
    taps: Taps | None = None,
    *,
    blocks: Iterable[slice],
    precision: Precision = "tf32x3",
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield blocks of rows, in any order, of sum_h left_ih sum_lag alpha_h[i, j + lag] tap_lag[j + lag, h], in float32.

    `shape` is (batch, length, head, state); `precision` is that of the products' inputs; sums are float32.
    Time: half of one product (L x HN)(HN x L). Memory: the block, and the factors of one tile of heads and columns.
    """
    if taps and max(taps) > CHUNK:
        # A tap that crosses a whole chunk would need the factors of more than two chunks per column.
        yield from tiled.reduced_rows(factors, shape, left, taps, blocks=blocks)
        return
    batch, length, heads, state = shape
    step = max(1, INNER // state)
    for rows in blocks:
        block: Tensor | None = None
        for tile in parts(heads, step):
            for panel in panels(factors, rows, tile, left, taps, COLUMNS):
                if block is None:
                    block = panel.read.new_zeros(batch, rows.stop - rows.start, length)
                add_far(block, panel, precision)
            assert block is not None
            add_diagonal(block, factors, rows, tile, left, taps, precision)
        assert block is not None
        yield rows, block


def held_elements(rows: int, shape: tuple[int, int, int, int]) -> int:
    """Return the elements that `reduced_rows` holds for blocks of `rows` rows, the block included."""
    batch, length, heads, state = shape
    inner = min(heads, max(1, INNER // state)) * state
    rows = -(-min(rows, length) // CHUNK) * CHUNK
    columns = -(-max(rows, min(COLUMNS, length)) // CHUNK) * CHUNK
    # Query, key, decay, their writes, two planes of them and one copy, and a decay for each pair of chunks.
    return batch * (rows * length + inner * (rows + 7 * columns + rows * columns // CHUNK**2))


def panels(
    factors: Factors, rows: slice, heads: slice, left: Tensor | None, taps: Taps | None, columns: int
) -> Iterator[Panel]:
    """Yield panels: of the columns in the chunks of the rows, then of earlier columns, nearest first."""
    row = -(-rows.start // CHUNK)
    origin, stop = rows.start - row * CHUNK, rows.stop
    end = row + -(-(stop - rows.start) // CHUNK)
    read, near, near_total = _chunks(factors, (row, end), origin, stop, heads, left, read=True)
    assert read is not None
    nothing = torch.zeros_like(near_total[:, :1])
    fade = _fade(torch.zeros_like(near_total), near_total, row, row)
    next_chunk = near.unflatten(1, (-1, CHUNK))[:, :1]
    write = _planes(near, None, near_total, (row, end), origin, stop, heads, taps)
    yield Panel(read, write, fade, (row, end), row, origin, stop)
    step = max(1, columns // CHUNK)
    # The decays from chunk `last` to the rows, without that chunk and with it.
    after, crossed, last_total = nothing, nothing, near_total[:, :1]
    for last in range(row, 0, -step):
        chunks = max(0, last - step), last
        _, written, total = _chunks(factors, chunks, origin, stop, heads, None, read=False)
        inside = functional.pad(total[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 1))
        across = inside + crossed
        table = across if taps is None else torch.cat([across, after], dim=1)
        fade = _fade(table, near_total, chunks[0], row)
        write = _planes(written, next_chunk, torch.cat([total, last_total], dim=1), chunks, origin, stop, heads, taps)
        yield Panel(read, write, fade, chunks, row, origin, stop)
        next_chunk = written.unflatten(1, (-1, CHUNK))[:, :1]
        after, crossed, last_total = across[:, :1], across[:, :1] + total[:, :1], total[:, :1]


def add_far(out: Float[Tensor, "batch row col"], panel: Panel, precision: Precision, *, band: bool = False) -> None:
    """Add the tiles of a panel whose columns lie in chunks before their rows.

    `out` is the map of the rows or, with `band`, the part of each row in its own chunk and the one before.
    """
    launch_far(out, panel, out.shape[1], "band" if band else "add", precision)


def launch_far(
    out: Float[Tensor, "batch _ col"],
    panel: Panel,
    rows: int,
    kind: Literal["add", "band", "fold"],
    precision: Precision,
    *,
    weight: Float[Tensor, "batch row"] | None = None,
    scale: Float[Tensor, "batch row"] | None = None,
    sign: Sign = "keep",
) -> None:
    """Run `far_tiles` on a panel with `rows` rows; `weight`, `scale` and `sign` are those of "fold"."""
    first, last = panel.chunks
    batch, padded, inner = panel.read.shape
    row_chunks = padded // CHUNK
    fades = panel.fade.shape[2]

    def grid(options: dict[str, int]) -> tuple[int, int]:
        across = 1 if kind == "band" else last - first
        return across * (CHUNK // options["COLS"]), batch * row_chunks * (CHUNK // options["ROWS"])

    with on(out):
        far_tiles[grid](
            panel.read,
            panel.write,
            panel.fade,
            out,
            *out.stride()[:2],
            None if weight is None else factor(weight, "batch token"),
            None if scale is None else factor(scale, "batch token"),
            inner,
            PanelSizes(first, last, panel.row, row_chunks, fades, panel.origin, panel.stop, rows),
            PLANES=panel.write.shape[0],
            CHUNK=CHUNK,
            KIND=kind,
            SIGN=sign,
            PRECISION=precision,
        )


def add_diagonal(
    out: Float[Tensor, "batch row col"],
    factors: Factors,
    rows: slice,
    heads: slice,
    left: Tensor | None,
    taps: Taps | None,
    precision: Precision,
    *,
    band: bool = False,
) -> None:
    """Add the writes that land in the rows' own chunks: one pass per tap, with column = landing token - lag."""
    query, key, decay = _whole(factors(rows, heads))
    batch, count, heads_here, state = decay.shape
    row_chunks = -(-count // CHUNK)
    landing: Mapping[int, Tensor | None] = taps or {0: None}
    for lag, tap in landing.items():
        with on(out):
            diagonal_tiles[(row_chunks * (CHUNK // SUB), batch)](
                factor(query),
                factor(key),
                factor(decay),
                _weight(left, rows, heads, decay),
                _weight(tap, rows, heads, decay),
                out,
                *out.stride()[:2],
                heads_here * state,
                state,
                count,
                rows.start,
                lag,
                CHUNK=CHUNK,
                BAND=band,
                PRECISION=precision,
                INNER=power(min(32, heads_here * state), 16),
            )


def _chunks(
    factors: Factors,
    chunks: tuple[int, int],
    origin: int,
    stop: int,
    heads: slice,
    left: Tensor | None,
    *,
    read: bool,
) -> tuple[Tensor | None, Float[Tensor, "batch col inner"], Float[Tensor, "batch chunk inner"]]:
    """Return the read factors, write factors and whole log-decays of chunks, each relative to its chunk."""
    begin = origin + chunks[0] * CHUNK
    tokens = slice(max(0, begin), min(stop, origin + chunks[1] * CHUNK))
    query, key, decay = _whole(factors(tokens, heads))
    batch, _, heads_here, state = decay.shape
    inner, count = heads_here * state, chunks[1] - chunks[0]
    written = torch.empty(batch, count * CHUNK, inner, dtype=torch.float32, device=decay.device)
    reading = torch.empty_like(written) if read else None
    total = written.new_empty(batch, count, inner)
    width = power(min(64, inner))
    with on(written):
        chunk_factors[(count * -(-inner // width), batch)](
            factor(query),
            factor(key),
            factor(decay),
            _weight(left, tokens, heads, decay),
            reading,
            written,
            total,
            inner,
            state,
            tokens.start - begin,
            tokens.stop - begin,
            count,
            CHUNK=CHUNK,
            INNER=width,
            num_warps=8,
        )
    return reading, written, total


def _planes(
    written: Float[Tensor, "batch col inner"],
    beyond: Tensor | None,
    total: Float[Tensor, "batch chunk inner"],
    chunks: tuple[int, int],
    origin: int,
    stop: int,
    heads: slice,
    taps: Taps | None,
) -> Float[Tensor, "plane batch col inner"]:
    """Sum the taps of each column: those that land in its own chunk, and all of them at the next chunk's end.

    `written`: writes decayed to the end of their chunk; `beyond`: the same for the chunk after the last; `total`: the
    log-decay of every chunk, that chunk included.
    """
    if taps is None:
        return written.unsqueeze(0)
    length = written.shape[1]
    if beyond is not None:
        written = torch.cat([written, beyond.flatten(1, 2)], dim=1)
    here, there = written.new_zeros(2, written.shape[0], length, written.shape[2]).unbind()
    position = torch.arange(length, device=written.device) % CHUNK
    begin = origin + chunks[0] * CHUNK
    tokens = slice(max(0, begin), min(stop, begin + written.shape[1]))
    around = (0, 0, tokens.start - begin, begin + written.shape[1] - tokens.stop)
    for lag, tap in taps.items():
        weight = tap[:, :, heads] if tap.shape[1] == 1 else functional.pad(tap[:, tokens, heads], around)
        each = weight.to(written.dtype).repeat_interleave(written.shape[2] // weight.shape[2], dim=2)
        shifted = (written * each)[:, lag : lag + length]
        shifted = functional.pad(shifted, (0, 0, 0, length - shifted.shape[1]))
        same = (position + lag < CHUNK)[:, None]
        here += shifted.where(same, 0)
        there += shifted.where(~same, 0)
    following = functional.pad(total[:, 1:], (0, 0, 0, length // CHUNK + 1 - total.shape[1]))
    later = here.unflatten(1, (-1, CHUNK)) * following.exp().unsqueeze(2)
    return torch.stack([here, later.flatten(1, 2) + there])


def _fade(
    across: Float[Tensor, "batch colchunk inner"],
    own_total: Float[Tensor, "batch rowchunk inner"],
    first: int,
    row: int,
) -> Float[Tensor, "batch rowchunk colchunk inner"]:
    """Return the decay across the chunks between a column's and a row's, with log-decays summed over row chunks."""
    rows, chunks = own_total.shape[1], across.shape[1]
    chunk = torch.arange(first, first + chunks, device=across.device)
    crossed = chunk < torch.arange(row, row + rows - 1, device=across.device)[:, None]
    # A row's decay is that of the row before, and across that row's chunk: one cumulative sum, not a launch for each.
    steps = own_total[:, :-1, None].where(crossed[..., None], 0)
    return torch.cat([across[:, None], steps], dim=1).cumsum(1).exp()


def _whole(some_factors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, decay = some_factors
    return query.expand_as(decay), key.expand_as(decay), decay


def _weight(weight: Tensor | None, tokens: slice, heads: slice, like: Tensor) -> Factor | None:
    """Return a weight (batch, token, head) of some tokens and heads, expanded along broadcast axes; None for None."""
    if weight is None:
        return None
    some = weight[:, :, heads] if weight.shape[1] == 1 else weight[:, tokens, heads]
    return factor(some.expand(like.shape[:3]), "batch token head")
