"""The Triton kernels of a scalar memory: segments by products of chunks, and the gradient by the decays.

The same kernels run backward in time, see triton_diagonal.py; its `carry` joins the segments.
"""

from typing import no_type_check

import triton
import triton.language as tl

from unilinattn.kernels.launch import product


@triton.jit
@no_type_check
def _chunk_decays(decay, step, moves, g_token, CHUNK: tl.constexpr):
    """Return a chunk's decays from its start, to its end and between its positions, and its whole log-decay.

    Each exponent is the sum of the steps between: one cumulative sum per position, starting after it.
    """
    i = tl.arange(0, CHUNK)
    g = tl.load(decay + step * g_token, mask=moves, other=0.0).to(tl.float32)
    spread = tl.where(i[:, None] > i[None, :], g[:, None] + tl.zeros((CHUNK, CHUNK), dtype=tl.float32), 0.0)
    between = tl.where(i[:, None] >= i[None, :], tl.cumsum(spread, 0), float("-inf"))
    return tl.exp(tl.cumsum(g, 0)), tl.exp(tl.sum(spread, 0)), tl.exp(between), tl.sum(g, 0)


@triton.jit
@no_type_check
def scalar_segments(
    read,
    write,
    decay,
    value,
    entering,
    total,
    out,
    length,
    padded,
    segments,
    segment,
    heads,
    per_read,
    columns,
    states,
    r_batch,
    r_token,
    r_group,
    r_state,
    w_batch,
    w_token,
    w_group,
    w_state,
    g_batch,
    g_token,
    g_head,
    v_batch,
    v_token,
    v_head,
    v_column,
    ENTERS: tl.constexpr,
    LEAVES: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Run one segment of a scalar memory, chunk by chunk; `per_read` heads share a read and a write factor."""
    wide = (columns + COLUMNS - 1) // COLUMNS
    nth = tl.program_id(0).to(tl.int64) % segments
    program = tl.program_id(0).to(tl.int64) // segments
    p = program % wide * COLUMNS + tl.arange(0, COLUMNS)
    head = program // wide % heads
    batch = program // (wide * heads)
    n = tl.arange(0, STATES).to(tl.int64)
    n_live, p_live = n < states, p < columns
    corner = (((batch * segments + nth) * heads + head) * columns + p[None, :]) * states + n[:, None]
    held = n_live[:, None] & p_live[None, :]
    state = tl.zeros((STATES, COLUMNS), dtype=tl.float32)
    faded = 0.0
    if ENTERS:
        state = tl.load(entering + corner, mask=held, other=0.0)
    read += batch * r_batch + head // per_read * r_group
    write += batch * w_batch + head // per_read * w_group
    decay += batch * g_batch + head * g_head
    value += batch * v_batch + head * v_head
    i = tl.arange(0, CHUNK).to(tl.int64)
    for start in range(0, segment, CHUNK):
        token = nth * segment + start + i
        step = token
        if REVERSE:
            token = padded - 1 - token
            step = token + 1
        here = token < length
        begun, ahead, between, crossed = _chunk_decays(decay, step, here & (step < length), g_token, CHUNK)
        shared = here[:, None] & n_live[None, :]
        w = tl.load(write + token[:, None] * w_token + n[None, :] * w_state, mask=shared, other=0.0).to(tl.float32)
        mask = here[:, None] & p_live[None, :]
        v = tl.load(value + token[:, None] * v_token + p[None, :] * v_column, mask=mask, other=0.0).to(tl.float32)
        if LEAVES:
            faded += crossed
        else:
            x = tl.load(read + token[:, None] * r_token + n[None, :] * r_state, mask=shared, other=0.0)
            x = x.to(tl.float32)
            nothing = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
            scores = product(x, tl.trans(w), nothing, PRECISION) * between
            y = product(scores, v, tl.zeros((CHUNK, COLUMNS), dtype=tl.float32), PRECISION)
            y = product(x * begun[:, None], state, y, PRECISION)
            at = ((batch * length + token[:, None]) * heads + head) * columns + p[None, :]
            tl.store(out + at, y, mask=mask)
        state = product(tl.trans(w * ahead[:, None]), v, tl.exp(crossed) * state, PRECISION)
    if LEAVES:
        tl.store(entering + corner, state, mask=held)
        tl.store(total + (batch * segments + nth) * heads + head, faded)


@triton.jit
@no_type_check
def scalar_decay_gradient(
    query,
    key,
    decay,
    value,
    grad,
    before,
    after,
    decay_grad,
    length,
    segments,
    heads,
    per_read,
    columns,
    states,
    q_batch,
    q_token,
    q_group,
    q_state,
    k_batch,
    k_token,
    k_group,
    k_state,
    g_batch,
    g_token,
    g_head,
    v_batch,
    v_token,
    v_head,
    v_column,
    y_batch,
    y_token,
    y_head,
    y_column,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Write the gradient by a chunk's log-decays: for each step, the sum over all pairs of tokens on its two sides."""
    nth = tl.program_id(0).to(tl.int64) % segments
    program = tl.program_id(0).to(tl.int64) // segments
    head, batch = program % heads, program // heads
    n = tl.arange(0, STATES).to(tl.int64)
    i = tl.arange(0, CHUNK).to(tl.int64)
    t = nth * CHUNK + i
    here = t < length
    shared = here[:, None] & (n < states)[None, :]
    query += batch * q_batch + head // per_read * q_group
    key += batch * k_batch + head // per_read * k_group
    decay += batch * g_batch + head * g_head
    value += batch * v_batch + head * v_head
    grad += batch * y_batch + head * y_head
    begun, _, between, crossed = _chunk_decays(decay, t, here, g_token, CHUNK)
    late = here & (t + 1 < length)
    # The decay to the end of the chunk, without the step into the next one, which the adjoint state includes.
    q = tl.load(query + t[:, None] * q_token + n[None, :] * q_state, mask=shared, other=0.0).to(tl.float32)
    k = tl.load(key + t[:, None] * k_token + n[None, :] * k_state, mask=shared, other=0.0).to(tl.float32)
    following = tl.load(decay + (t + 1) * g_token, mask=late & (i < CHUNK - 1), other=0.0).to(tl.float32)
    ahead = tl.exp(tl.cumsum(following, 0, reverse=True))
    pairs = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    reading = tl.zeros((CHUNK, STATES), dtype=tl.float32)
    written = tl.zeros((CHUNK, STATES), dtype=tl.float32)
    through = 0.0
    # The step from this chunk's last token to the next chunk's first.
    onward = tl.load(decay + (nth + 1) * CHUNK * g_token, mask=(nth + 1) * CHUNK < length, other=0.0).to(tl.float32)
    for start in range(0, columns, COLUMNS):
        p = start + tl.arange(0, COLUMNS).to(tl.int64)
        p_live = p < columns
        mask = here[:, None] & p_live[None, :]
        v = tl.load(value + t[:, None] * v_token + p[None, :] * v_column, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(grad + t[:, None] * y_token + p[None, :] * y_column, mask=mask, other=0.0).to(tl.float32)
        held = (n < states)[:, None] & p_live[None, :]
        corner = (((batch * segments + nth) * heads + head) * columns + p[None, :]) * states + n[:, None]
        first = tl.load(before + corner, mask=held, other=0.0)
        mirrored = batch * segments + segments - 1 - nth
        corner = ((mirrored * heads + head) * columns + p[None, :]) * states + n[:, None]
        final = tl.load(after + corner, mask=held, other=0.0) * tl.exp(onward)
        pairs = product(y, tl.trans(v), pairs, PRECISION)
        reading = product(y, tl.trans(first), reading, PRECISION)
        written = product(v, tl.trans(final), written, PRECISION)
        through += tl.sum(first * final)
    pairs *= product(q, tl.trans(k), tl.zeros((CHUNK, CHUNK), dtype=tl.float32), PRECISION) * between
    from_before = tl.sum(q * reading, 1) * begun
    to_after = tl.sum(k * written, 1) * ahead
    # Step t lies between rows from t on and columns before t; only these pairs are summed, without a difference.
    earlier = (i[:, None] < i[None, :]).to(tl.float32)
    before_t = product(pairs, earlier, tl.zeros((CHUNK, CHUNK), dtype=tl.float32), "ieee")
    inside = tl.sum(tl.where(i[:, None] >= i[None, :], before_t, 0.0), 0)
    leaving = tl.sum(earlier * to_after[:, None], 0)
    found = inside + tl.cumsum(from_before, 0, reverse=True) + leaving + tl.exp(crossed) * through
    tl.store(decay_grad + (batch * length + t) * heads + head, found, mask=here)
