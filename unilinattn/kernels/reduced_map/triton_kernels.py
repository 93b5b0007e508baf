"""The Triton kernels of the reduced map: factors of chunks, tiles between chunks, tiles inside one.

Every exponent is a sum of log-decays, never a difference of sums; masks apply before the exponential.
"""

from typing import no_type_check

import triton
import triton.language as tl

from unilinattn.kernels.launch import product, tuned

SUB = 16
"""Rows of a diagonal tile per program; the pairs of these tokens are computed elementwise."""


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
    q_batch,
    q_token,
    q_head,
    q_state,
    k_batch,
    k_token,
    k_head,
    k_state,
    g_batch,
    g_token,
    g_head,
    g_state,
    l_batch,
    l_token,
    l_head,
    LEFT: tl.constexpr,
    READ: tl.constexpr,
    CHUNK: tl.constexpr,
    INNER: tl.constexpr,
):
    """Write left q exp(sum to token), k exp(sum from token) and the whole sum of one chunk; zero at missing tokens."""
    chunk = (tl.program_id(0) % chunks).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) // chunks).to(tl.int64) * INNER + tl.arange(0, INNER)
    head, state = n // states, n % states
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    token = place - begin
    live = ((place >= begin) & (place < end))[:, None] & (n < inner)[None, :]
    own = decay + batch * g_batch + head[None, :] * g_head + state[None, :] * g_state
    g = tl.load(own + token[:, None] * g_token, mask=live, other=0.0).to(tl.float32)
    at = (batch * chunks * CHUNK + place[:, None]) * inner + n[None, :]
    inside = (place >= 0)[:, None] & (n < inner)[None, :]
    if READ:
        where = batch * q_batch + token[:, None] * q_token + head[None, :] * q_head + state[None, :] * q_state
        q = tl.load(query + where, mask=live, other=0.0).to(tl.float32)
        if LEFT:
            where = batch * l_batch + token[:, None] * l_token + head[None, :] * l_head
            q *= tl.load(left + where, mask=live, other=0.0).to(tl.float32)
        tl.store(read + at, q * tl.exp(tl.cumsum(g, 0)), mask=inside)
    # The step of the next token, because a token's write decays only by the steps after it.
    after = live & (place + 1 < end)[:, None] & (tl.arange(0, CHUNK) < CHUNK - 1)[:, None]
    following = tl.load(own + (token[:, None] + 1) * g_token, mask=after, other=0.0).to(tl.float32)
    where = batch * k_batch + token[:, None] * k_token + head[None, :] * k_head + state[None, :] * k_state
    k = tl.load(key + where, mask=live, other=0.0).to(tl.float32)
    tl.store(written + at, k * tl.exp(tl.cumsum(following, 0, reverse=True)), mask=inside)
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
    row_weight,
    row_scale,
    inner,
    first,
    last,
    row_chunk,
    row_chunks,
    fades,
    origin,
    stop,
    o_batch,
    o_row,
    rows,
    w_batch,
    w_row,
    s_batch,
    s_row,
    PLANES: tl.constexpr,
    CHUNK: tl.constexpr,
    KIND: tl.constexpr,
    PHI: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Compute a tile between two chunks, and add it to a map or to a band, or sum its rows per column."""
    tiles: tl.constexpr = CHUNK // ROWS
    across: tl.constexpr = CHUNK // COLS
    row_tile = (tl.program_id(1) % (row_chunks * tiles)).to(tl.int64)
    batch = (tl.program_id(1) // (row_chunks * tiles)).to(tl.int64)
    col_tile = tl.program_id(0).to(tl.int64)
    r = row_chunk + row_tile // tiles
    c = r - 1 if KIND == "band" else first + col_tile // across
    wanted = (c >= first) & (c < last) & (c < r)
    if KIND == "fold":
        wanted = wanted & (c < r - 1)
    if wanted:
        # The next chunk reads a column at its own chunk's end; later chunks read it, with all taps, one chunk later.
        plane = 0
        between = c
        if PLANES == 2:
            later = (c < r - 1).to(tl.int64)
            plane = later
            between = c + later
        i = row_tile * ROWS + tl.arange(0, ROWS)
        j = (c - first) * CHUNK + (col_tile % across) * COLS + tl.arange(0, COLS)
        batches = tl.num_programs(1) // (row_chunks * tiles)
        reads = read + (batch * row_chunks * CHUNK + i)[:, None] * inner
        writes = write + ((plane * batches + batch) * (last - first) * CHUNK + j)[None, :] * inner
        fading = fade + ((batch * row_chunks + r - row_chunk) * fades + between - first) * inner
        acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for start in range(0, inner, INNER):
            n = start + tl.arange(0, INNER)
            held = n < inner
            a = tl.load(reads + n[None, :], mask=held[None, :], other=0.0)
            a *= tl.load(fading + n, mask=held, other=0.0)[None, :]
            b = tl.load(writes + n[:, None], mask=held[:, None], other=0.0)
            acc = product(a, b, acc, PRECISION)
        col = origin + first * CHUNK + j
        live = (col >= 0) & (col < stop)
        if KIND == "fold":
            scale = tl.load(row_scale + batch * s_batch + i * s_row, mask=i < rows, other=0.0)
            value = acc * scale[:, None]
            if PHI == "clamp":
                value = tl.maximum(value, 0.0)
            if PHI == "abs":
                value = tl.abs(value)
            weight = tl.load(row_weight + batch * w_batch + i * w_row, mask=i < rows, other=0.0)
            tl.store(out + batch * o_batch + row_tile * o_row + col, tl.sum(value * weight[:, None], 0), mask=live)
        else:
            if KIND == "band":
                col = (col_tile % across) * COLS + tl.arange(0, COLS)
            at = out + batch * o_batch + i[:, None] * o_row + col[None, :]
            mask = (i < rows)[:, None] & live[None, :]
            tl.store(at, tl.load(at, mask=mask, other=0.0) + acc, mask=mask)


@triton.jit
@no_type_check
def diagonal_tiles(
    query,
    key,
    decay,
    left,
    tap,
    out,
    inner,
    states,
    rows,
    start,
    lag,
    q_batch,
    q_token,
    q_head,
    q_state,
    k_batch,
    k_token,
    k_head,
    k_state,
    g_batch,
    g_token,
    g_head,
    g_state,
    l_batch,
    l_token,
    l_head,
    t_batch,
    t_token,
    t_head,
    o_batch,
    o_row,
    LEFT: tl.constexpr,
    TAP: tl.constexpr,
    CHUNK: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
    INNER: tl.constexpr,
):
    """Add to a map or a band the weights of SUB rows on their chunk's tokens; a token's column is `lag` before it."""
    SUB: tl.constexpr = 16
    PAIRS: tl.constexpr = 16
    batch = tl.program_id(1).to(tl.int64)
    sub = tl.program_id(0).to(tl.int64)
    chunk = sub // (CHUNK // SUB)
    cut = sub * SUB
    i = cut + tl.arange(0, SUB)
    query += batch * q_batch
    key += batch * k_batch
    decay += batch * g_batch
    left += batch * l_batch
    tap += batch * t_batch
    shift = start - lag
    if BAND:
        shift = CHUNK - chunk * CHUNK - lag
    out += batch * o_batch
    if (cut > chunk * CHUNK) & (cut < rows):
        # Columns before the sub-block: one product around its first row.
        j = chunk * CHUNK + tl.arange(0, CHUNK)
        acc = tl.zeros((SUB, CHUNK), dtype=tl.float32)
        for begin in range(0, inner, INNER):
            n = begin + tl.arange(0, INNER).to(tl.int64)
            head, state = (n // states)[None, :], (n % states)[None, :]
            held = (n < inner)[None, :]
            live = (i < rows)[:, None] & held
            g = tl.load(decay + i[:, None] * g_token + head * g_head + state * g_state, mask=live, other=0.0)
            q = tl.load(query + i[:, None] * q_token + head * q_head + state * q_state, mask=live, other=0.0)
            q = q.to(tl.float32)
            if LEFT:
                q *= tl.load(left + i[:, None] * l_token + head * l_head, mask=live, other=0.0).to(tl.float32)
            a = q * tl.exp(tl.cumsum(g.to(tl.float32), 0))
            before = (j < cut)[:, None] & held
            k = tl.load(key + j[:, None] * k_token + head * k_head + state * k_state, mask=before, other=0.0)
            k = k.to(tl.float32)
            if TAP:
                k *= tl.load(tap + j[:, None] * t_token + head * t_head, mask=before, other=0.0).to(tl.float32)
            step = (j + 1 < cut)[:, None] & held
            g = tl.load(decay + (j[:, None] + 1) * g_token + head * g_head + state * g_state, mask=step, other=0.0)
            b = k * tl.exp(tl.cumsum(g.to(tl.float32), 0, reverse=True))
            acc = product(a, tl.trans(b), acc, PRECISION)
        col = shift + j
        mask = (i < rows)[:, None] & ((start + j >= lag) & (j < cut))[None, :]
        at = out + i[:, None] * o_row + col[None, :]
        tl.store(at, tl.load(at, mask=mask, other=0.0) + acc, mask=mask)
    later = tl.arange(0, SUB)[:, None] > tl.arange(0, SUB)[None, :]
    square = tl.zeros((SUB, SUB), dtype=tl.float32)
    for begin in range(0, inner, PAIRS):
        n = begin + tl.arange(0, PAIRS).to(tl.int64)
        head, state = (n // states)[None, :], (n % states)[None, :]
        live = (i < rows)[:, None] & (n < inner)[None, :]
        g = tl.load(decay + i[:, None] * g_token + head * g_head + state * g_state, mask=live, other=0.0)
        q = tl.load(query + i[:, None] * q_token + head * q_head + state * q_state, mask=live, other=0.0)
        k = tl.load(key + i[:, None] * k_token + head * k_head + state * k_state, mask=live, other=0.0)
        q, k = q.to(tl.float32), k.to(tl.float32)
        if LEFT:
            q *= tl.load(left + i[:, None] * l_token + head * l_head, mask=live, other=0.0).to(tl.float32)
        if TAP:
            k *= tl.load(tap + i[:, None] * t_token + head * t_head, mask=live, other=0.0).to(tl.float32)
        steps = tl.where(later[:, :, None], g.to(tl.float32)[:, None, :], 0.0)
        pairs = q[:, None, :] * tl.exp(tl.cumsum(steps, 0)) * k[None, :, :]
        square += tl.sum(pairs, 2)
    seen = tl.arange(0, SUB)[:, None] >= tl.arange(0, SUB)[None, :]
    mask = (i < rows)[:, None] & (start + i >= lag)[None, :] & seen
    at = out + i[:, None] * o_row + (shift + i)[None, :]
    tl.store(at, tl.load(at, mask=mask, other=0.0) + square, mask=mask)
