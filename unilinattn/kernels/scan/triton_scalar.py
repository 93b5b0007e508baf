"""The Triton kernels of a scalar memory: segments by products of chunks, and the gradient by the decays.

The same kernels run backward in time, see triton_diagonal.py; its `carry` joins the segments.
"""

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from unilinattn.kernels.launch import load, product


class Sizes(NamedTuple):
    """Sizes of a memory and of its segments.

    Attributes:
        length, heads, columns, states: shape of the memory; a column is a channel of the values.
        per_group: heads that share a query and a key.
        segments, segment: number of segments, and tokens of each.
    """

    length: int
    heads: int
    columns: int
    states: int
    per_group: int
    segments: int
    segment: int


@triton.jit
@no_type_check
def _chunk_decays(decay, batch, step, head, mask, CHUNK: tl.constexpr):
    """Return a chunk's decays from its start, to its end and between its positions, and its whole log-decay.

    Each exponent is the sum of the steps between: one cumulative sum per position, starting after it. With the steps g
    of 3 tokens, `steps` and its sums along the first axis, the exponents, are

        0    0   0        0        0   0
        g1   0   0        g1       0   0
        g2   g2  0        g1 + g2  g2  0

    A difference of two sums over the whole chunk would lose the digits of small steps after large ones.
    """
    i = tl.arange(0, CHUNK)
    g = load(decay, batch, step, head, 0, mask)
    steps = tl.where(i[:, None] > i[None, :], g[:, None] + tl.zeros((CHUNK, CHUNK), dtype=tl.float32), 0.0)
    between = tl.where(i[:, None] >= i[None, :], tl.cumsum(steps, 0), float("-inf"))
    return tl.exp(tl.cumsum(g, 0)), tl.exp(tl.sum(steps, 0)), tl.exp(between), tl.sum(g, 0)


@triton.jit
@no_type_check
def _states_at(batch, segment, head, p, n, sizes):
    """Return the offsets of states (coordinate, column) in a tensor (batch, segment, head, column, state)."""
    row = ((batch * sizes.segments + segment) * sizes.heads + head) * sizes.columns + p[None, :]
    return row * sizes.states + n[:, None]


@triton.jit
@no_type_check
def scalar_segments(
    read,
    write,
    decay,
    value,
    entering,
    leaving,
    total,
    out,
    sizes,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Run one segment of a scalar memory, chunk by chunk: write its outputs, or its final state and its log-decay.

    `entering` may be None. Without `leaving` and `total` the outputs are written to `out`.
    """
    blocks = (sizes.columns + COLUMNS - 1) // COLUMNS
    nth = tl.program_id(0).to(tl.int64) % sizes.segments
    program = tl.program_id(0).to(tl.int64) // sizes.segments
    p = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    head = program // blocks % sizes.heads
    batch = program // (blocks * sizes.heads)
    group = head // sizes.per_group
    n = tl.arange(0, STATES).to(tl.int64)
    n_live, p_live = n < sizes.states, p < sizes.columns
    corner = _states_at(batch, nth, head, p, n, sizes)
    state_mask = n_live[:, None] & p_live[None, :]
    state = tl.zeros((STATES, COLUMNS), dtype=tl.float32)
    log_total = 0.0
    if entering is not None:
        state = tl.load(entering + corner, mask=state_mask, other=0.0)
    i = tl.arange(0, CHUNK).to(tl.int64)
    for start in range(0, sizes.segment, CHUNK):
        token = nth * sizes.segment + start + i
        step = token
        if REVERSE:
            token = sizes.segments * sizes.segment - 1 - token
            step = token + 1
        live = token < sizes.length
        begun, ahead, between, crossed = _chunk_decays(decay, batch, step, head, live & (step < sizes.length), CHUNK)
        factor_mask = live[:, None] & n_live[None, :]
        w = load(write, batch, token[:, None], group, n[None, :], factor_mask)
        value_mask = live[:, None] & p_live[None, :]
        v = load(value, batch, token[:, None], head, p[None, :], value_mask)
        if total is not None:
            log_total += crossed
        else:
            x = load(read, batch, token[:, None], group, n[None, :], factor_mask)
            scores = product(x, tl.trans(w), tl.zeros((CHUNK, CHUNK), dtype=tl.float32), PRECISION) * between
            y = product(scores, v, tl.zeros((CHUNK, COLUMNS), dtype=tl.float32), PRECISION)
            y = product(x * begun[:, None], state, y, PRECISION)
            offset = ((batch * sizes.length + token[:, None]) * sizes.heads + head) * sizes.columns + p[None, :]
            tl.store(out + offset, y, mask=value_mask)
        state = product(tl.trans(w * ahead[:, None]), v, tl.exp(crossed) * state, PRECISION)
    if total is not None:
        tl.store(leaving + corner, state, mask=state_mask)
        tl.store(total + (batch * sizes.segments + nth) * sizes.heads + head, log_total)


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
    sizes,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Write the gradient by a chunk's log-decays: for each step, the sum over all pairs of tokens on its two sides.

    The pairs (read i, written j) of step t lie in four regions: both inside the chunk, j before it, i after it, both.
    """
    nth = tl.program_id(0).to(tl.int64) % sizes.segments
    program = tl.program_id(0).to(tl.int64) // sizes.segments
    head, batch = program % sizes.heads, program // sizes.heads
    group = head // sizes.per_group
    n = tl.arange(0, STATES).to(tl.int64)
    i = tl.arange(0, CHUNK).to(tl.int64)
    t = nth * CHUNK + i
    live = t < sizes.length
    factor_mask = live[:, None] & (n < sizes.states)[None, :]
    begun, _, between, crossed = _chunk_decays(decay, batch, t, head, live, CHUNK)
    live_late = live & (t + 1 < sizes.length)
    # The decay to the end of the chunk, without the step into the next one, which the adjoint state includes.
    q = load(query, batch, t[:, None], group, n[None, :], factor_mask)
    k = load(key, batch, t[:, None], group, n[None, :], factor_mask)
    ahead = tl.exp(tl.cumsum(load(decay, batch, t + 1, head, 0, live_late & (i < CHUNK - 1)), 0, reverse=True))
    pairs = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    reading = tl.zeros((CHUNK, STATES), dtype=tl.float32)
    written = tl.zeros((CHUNK, STATES), dtype=tl.float32)
    through = 0.0
    # The step from this chunk's last token to the next chunk's first.
    onward = load(decay, batch, (nth + 1) * CHUNK, head, 0, (nth + 1) * CHUNK < sizes.length)
    for start in range(0, sizes.columns, COLUMNS):
        p = start + tl.arange(0, COLUMNS).to(tl.int64)
        p_live = p < sizes.columns
        value_mask = live[:, None] & p_live[None, :]
        v = load(value, batch, t[:, None], head, p[None, :], value_mask)
        y = load(grad, batch, t[:, None], head, p[None, :], value_mask)
        state_mask = (n < sizes.states)[:, None] & p_live[None, :]
        first = tl.load(before + _states_at(batch, nth, head, p, n, sizes), mask=state_mask, other=0.0)
        # The adjoint pass counted its segments from the end of the sequence.
        mirrored = sizes.segments - 1 - nth
        final = tl.load(after + _states_at(batch, mirrored, head, p, n, sizes), mask=state_mask, other=0.0)
        final *= tl.exp(onward)
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
    gradient = inside + tl.cumsum(from_before, 0, reverse=True) + leaving + tl.exp(crossed) * through
    tl.store(decay_grad + (batch * sizes.length + t) * sizes.heads + head, gradient, mask=live)
