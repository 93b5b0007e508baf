"""The Triton kernels of the reduced map: factors of chunks, tiles between chunks, tiles inside one.

Every exponent is a sum of log-decays, never a difference of sums; masks apply before the exponential.
"""

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from unilinattn.kernels.launch import load, product, tuned

SUB = 16
"""Rows of a diagonal tile per program; the pairs of these tokens are computed elementwise."""


class PanelSizes(NamedTuple):
    """Sizes of a panel, the factors of a block of rows and of some columns; chunks are counted from token `origin`.

    Attributes:
        first, last: the first chunk of the columns, and the one after their last.
        row_chunk, row_chunks: the first chunk of the rows, and their number.
        fades: chunks of columns in the table of decays.
        origin, stop: the first token of chunk 0, and the token after the last row.
        rows: number of rows, without those that fill the last chunk.
    """

    first: int
    last: int
    row_chunk: int
    row_chunks: int
    fades: int
    origin: int
    stop: int
    rows: int


@triton.jit
@no_type_check
def chunk_factors(
    query,
    key,
    decay,
    left,
    read,
    written,
    total,
    inner,
    states,
    begin,
    end,
    chunks,
    CHUNK: tl.constexpr,
    INNER: tl.constexpr,
):
    """Write left q exp(sum to token), k exp(sum from token) and the whole sum of one chunk; zero at missing tokens.

    `left` and `read` may be None. The axis `inner` runs over states and then heads: with 16 states, n = 35 is state 3
    of head 2.
    """
    chunk = (tl.program_id(0) % chunks).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) // chunks).to(tl.int64) * INNER + tl.arange(0, INNER)
    head, state = (n // states)[None, :], (n % states)[None, :]
    position = chunk * CHUNK + tl.arange(0, CHUNK)
    token = position[:, None] - begin
    live = ((position >= begin) & (position < end))[:, None] & (n < inner)[None, :]
    g = load(decay, batch, token, head, state, live)
    offset = (batch * chunks * CHUNK + position[:, None]) * inner + n[None, :]
    inside = (position >= 0)[:, None] & (n < inner)[None, :]
    if read is not None:
        q = load(query, batch, token, head, state, live)
        if left is not None:
            q *= load(left, batch, token, head, 0, live)
        tl.store(read + offset, q * tl.exp(tl.cumsum(g, 0)), mask=inside)
    # The step of the next token, because a token's write decays only by the steps after it.
    after = live & (position + 1 < end)[:, None] & (tl.arange(0, CHUNK) < CHUNK - 1)[:, None]
    following = load(decay, batch, token + 1, head, state, after)
    k = load(key, batch, token, head, state, live)
    tl.store(written + offset, k * tl.exp(tl.cumsum(following, 0, reverse=True)), mask=inside)
    tl.store(total + (batch * chunks + chunk) * inner + n, tl.sum(g, 0), mask=n < inner)


@tuned(
    [
        {"ROWS": 64, "COLS": 64, "INNER": 32, "num_warps": 4, "num_stages": 3},
        {"ROWS": 64, "COLS": 64, "INNER": 64, "num_warps": 4, "num_stages": 3},
        {"ROWS": 64, "COLS": 64, "INNER": 32, "num_warps": 8, "num_stages": 4},
        {"ROWS": 32, "COLS": 64, "INNER": 32, "num_warps": 4, "num_stages": 4},
    ],
    key=["inner", "PRECISION", "KIND"],
    restore=["out"],
)
@triton.jit
@no_type_check
def far_tiles(
    read,
    write,
    fade,
    out,
    out_batch,
    out_row,
    row_weight,
    row_scale,
    inner,
    sizes,
    PLANES: tl.constexpr,
    CHUNK: tl.constexpr,
    KIND: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Compute a tile between two chunks, and add it to a map or to a band, or sum its rows per column.

    `row_weight` and `row_scale` are factors (batch, row) for the sum, "fold", only. Programs of axis 0 are tiles of
    columns, those of axis 1 tiles of rows and then sequences: with 2 tiles per chunk and 3 row chunks, program 9 of
    axis 1 is the second tile of the second chunk of sequence 1.
    """
    tiles: tl.constexpr = CHUNK // ROWS
    across: tl.constexpr = CHUNK // COLS
    row_tile = (tl.program_id(1) % (sizes.row_chunks * tiles)).to(tl.int64)
    batch = (tl.program_id(1) // (sizes.row_chunks * tiles)).to(tl.int64)
    col_tile = tl.program_id(0).to(tl.int64)
    r = sizes.row_chunk + row_tile // tiles
    c = r - 1 if KIND == "band" else sizes.first + col_tile // across
    computed = (c >= sizes.first) & (c < sizes.last) & (c < r)
    if KIND == "fold":
        # The band has the chunk before a row's own: taps of its columns may land in either chunk, and the sign applies
        # to the sum of all taps.
        computed = computed & (c < r - 1)
    if computed:
        # The next chunk reads a column at its own chunk's end; later chunks read it, with all taps, one chunk later.
        plane = 0
        between = c
        if PLANES == 2:
            later = (c < r - 1).to(tl.int64)
            plane = later
            between = c + later
        i = row_tile * ROWS + tl.arange(0, ROWS)
        j = (c - sizes.first) * CHUNK + (col_tile % across) * COLS + tl.arange(0, COLS)
        batches = tl.num_programs(1) // (sizes.row_chunks * tiles)
        reads = read + (batch * sizes.row_chunks * CHUNK + i)[:, None] * inner
        writes = write + ((plane * batches + batch) * (sizes.last - sizes.first) * CHUNK + j)[None, :] * inner
        table_row = batch * sizes.row_chunks + r - sizes.row_chunk
        fading = fade + (table_row * sizes.fades + between - sizes.first) * inner
        acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for start in range(0, inner, INNER):
            n = start + tl.arange(0, INNER)
            live = n < inner
            a = tl.load(reads + n[None, :], mask=live[None, :], other=0.0)
            a *= tl.load(fading + n, mask=live, other=0.0)[None, :]
            b = tl.load(writes + n[:, None], mask=live[:, None], other=0.0)
            acc = product(a, b, acc, PRECISION)
        col = sizes.origin + sizes.first * CHUNK + j
        col_live = (col >= 0) & (col < sizes.stop)
        if KIND == "fold":
            value = acc * load(row_scale, batch, i, 0, 0, i < sizes.rows)[:, None]
            if SIGN == "clamp":
                value = tl.maximum(value, 0.0)
            if SIGN == "abs":
                value = tl.abs(value)
            weight = load(row_weight, batch, i, 0, 0, i < sizes.rows)
            target = out + batch * out_batch + row_tile * out_row + col
            tl.store(target, tl.sum(value * weight[:, None], 0), mask=col_live)
        else:
            if KIND == "band":
                col = (col_tile % across) * COLS + tl.arange(0, COLS)
            target = out + batch * out_batch + i[:, None] * out_row + col[None, :]
            mask = (i < sizes.rows)[:, None] & col_live[None, :]
            tl.store(target, tl.load(target, mask=mask, other=0.0) + acc, mask=mask)


@triton.jit
@no_type_check
def _weighted(factor, weight, batch, token, head, state, mask):
    """Read a query or a key, times its weight unless that is None."""
    x = load(factor, batch, token, head, state, mask)
    if weight is not None:
        x *= load(weight, batch, token, head, 0, mask)
    return x


@triton.jit
@no_type_check
def diagonal_tiles(
    query,
    key,
    decay,
    left,
    tap,
    partial,
    inner,
    states,
    rows,
    padded,
    width,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    INNER: tl.constexpr,
):
    """Write the weights of SUB rows on their chunk's tokens, summed over a part of the inner axis.

    `left` and `tap` may be None. `partial` is (part, batch, row, token of the chunk) with `padded` rows, and a part has
    `width` (head, state) pairs, a multiple of 32; entries of tokens after the SUB rows stay as they are. Rows 32 to 47
    of a chunk, for example, take the tokens 0 to 31 by one product, whose factors decay to row 32, and the tokens 32 to
    47 pair by pair: a product around one token would need decays to a later or an earlier one, whose exponentials over-
    or underflow.
    """
    SUB: tl.constexpr = 16
    PAIRS: tl.constexpr = 16
    part = tl.program_id(2).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    sub = tl.program_id(0).to(tl.int64)
    chunk = sub // (CHUNK // SUB)
    cut = sub * SUB
    i = cut + tl.arange(0, SUB)
    out_row = partial + ((part * tl.num_programs(1) + batch) * padded + i)[:, None] * CHUNK
    if (cut > chunk * CHUNK) & (cut < rows):
        # Tokens before the sub-block: one product around its first row.
        j = chunk * CHUNK + tl.arange(0, CHUNK)
        acc = tl.zeros((SUB, CHUNK), dtype=tl.float32)
        for begin in range(0, width, INNER):
            n = part * width + begin + tl.arange(0, INNER)
            head, state = (n // states)[None, :], (n % states)[None, :]
            n_live = (n < inner)[None, :]
            live = (i < rows)[:, None] & n_live
            g = load(decay, batch, i[:, None], head, state, live)
            a = _weighted(query, left, batch, i[:, None], head, state, live) * tl.exp(tl.cumsum(g, 0))
            k = _weighted(key, tap, batch, j[:, None], head, state, (j < cut)[:, None] & n_live)
            g = load(decay, batch, j[:, None] + 1, head, state, (j + 1 < cut)[:, None] & n_live)
            b = k * tl.exp(tl.cumsum(g, 0, reverse=True))
            acc = product(a, tl.trans(b), acc, PRECISION)
        tl.store(out_row + (j - chunk * CHUNK)[None, :], acc, mask=(i < rows)[:, None] & (j < cut)[None, :])
    later = tl.arange(0, SUB)[:, None] > tl.arange(0, SUB)[None, :]
    square = tl.zeros((SUB, SUB), dtype=tl.float32)
    for begin in range(0, width, PAIRS):
        n = part * width + begin + tl.arange(0, PAIRS)
        head, state = (n // states)[None, :], (n % states)[None, :]
        live = (i < rows)[:, None] & (n < inner)[None, :]
        g = load(decay, batch, i[:, None], head, state, live)
        q = _weighted(query, left, batch, i[:, None], head, state, live)
        k = _weighted(key, tap, batch, i[:, None], head, state, live)
        steps = tl.where(later[:, :, None], g[:, None, :], 0.0)
        pairs = q[:, None, :] * tl.exp(tl.cumsum(steps, 0)) * k[None, :, :]
        square += tl.sum(pairs, 2)
    tl.store(out_row + (i - chunk * CHUNK)[None, :], square, mask=(i < rows)[:, None] & (i < rows)[None, :])


@triton.jit
@no_type_check
def add_parts(
    partial,
    out,
    out_batch,
    out_row,
    parts,
    rows,
    padded,
    start,
    lag,
    CHUNK: tl.constexpr,
    BAND: tl.constexpr,
):
    """Add the parts of SUB rows, in their order, to a map or a band; the column of a token is `lag` before it."""
    SUB: tl.constexpr = 16
    batch = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * SUB + tl.arange(0, SUB)
    chunk = tl.program_id(0).to(tl.int64) // (CHUNK // SUB)
    j = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = (i < rows)[:, None] & (i[:, None] >= j[None, :]) & (start + j >= lag)[None, :]
    entry = partial + (batch * padded + i)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    total = tl.zeros((SUB, CHUNK), dtype=tl.float32)
    for _ in range(0, parts):
        total += tl.load(entry, mask=mask, other=0.0)
        entry += tl.num_programs(1).to(tl.int64) * padded * CHUNK
    shift = start - lag
    if BAND:
        shift = CHUNK - chunk * CHUNK - lag
    target = out + batch * out_batch + i[:, None] * out_row + (shift + j)[None, :]
    tl.store(target, tl.load(target, mask=mask, other=0.0) + total, mask=mask)
