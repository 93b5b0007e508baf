"""The Triton kernels of a diagonal memory: segments of tokens, the states between them, and gradients.

Both directions of time share one kernel: backward in time, position p is token `padded` - 1 - p, a state decays by the
step of the token after the one that it reaches, and the writing factor reads. Positions without a token change nothing.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _after(decay, write, later_decay, later_write):
    """Compose two steps of a recurrence: S -> decay S + write, then the later step."""
    return decay * later_decay, write * later_decay + later_write


@triton.jit
@no_type_check
def _rows_of(program, group, blocks, per_group, columns, ROWS: tl.constexpr, ONE: tl.constexpr):
    """Return the heads and columns of a program's rows: several heads of one column, or several columns of one head."""
    block = program % blocks
    r = tl.arange(0, ROWS).to(tl.int64)
    if ONE:
        wide = (columns + ROWS - 1) // ROWS
        column = block % wide * ROWS + r
        head = group * per_group + block // wide + 0 * r
        live = column < columns
    else:
        place = block * ROWS + r
        head = group * per_group + place
        column = 0 * r
        live = place < per_group
    return head, column, live


@triton.jit
@no_type_check
def diagonal_segments(
    read,
    write,
    decay,
    rate,
    scale,
    reset,
    value,
    entering,
    total,
    out,
    length,
    padded,
    segments,
    segment,
    groups,
    blocks,
    per_group,
    heads,
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
    g_state,
    a_head,
    a_state,
    s_batch,
    s_token,
    s_head,
    e_batch,
    e_token,
    v_batch,
    v_token,
    v_head,
    v_column,
    RATE: tl.constexpr,
    SCALE: tl.constexpr,
    RESET: tl.constexpr,
    ENTERS: tl.constexpr,
    LEAVES: tl.constexpr,
    REVERSE: tl.constexpr,
    ONE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Run one segment of a diagonal memory: write its outputs, or its final state and its log-decay."""
    nth = tl.program_id(0).to(tl.int64) % segments
    program = tl.program_id(0).to(tl.int64) // segments
    group = program // blocks % groups
    batch = program // (blocks * groups)
    head, column, row_live = _rows_of(program, group, blocks, per_group, columns, ROWS, ONE)
    n = tl.arange(0, STATES).to(tl.int64)
    n_live = n < states
    held = row_live[:, None] & n_live[None, :]
    corner = ((batch * segments + nth) * heads + head) * columns + column
    state = tl.zeros((ROWS, STATES), dtype=tl.float32)
    faded = tl.zeros((ROWS, STATES), dtype=tl.float32)
    if ENTERS:
        state = tl.load(entering + corner[:, None] * states + n[None, :], mask=held, other=0.0)
    if RATE:
        speed = tl.load(rate + head[:, None] * a_head + n[None, :] * a_state, mask=held, other=0.0).to(tl.float32)
    i = tl.arange(0, TOKENS).to(tl.int64)
    for start in range(0, segment, TOKENS):
        token = nth * segment + start + i
        step = token
        if REVERSE:
            token = padded - 1 - token
            step = token + 1
        here = (token < length) & (start + i < segment)
        moves = here & (step < length)
        mask = here[:, None] & row_live[None, :]
        v = tl.load(
            value + batch * v_batch + token[:, None] * v_token + (head * v_head + column * v_column)[None, :],
            mask=mask,
            other=0.0,
        ).to(tl.float32)
        if SCALE:
            strength = tl.load(
                scale + batch * s_batch + token[:, None] * s_token + head[None, :] * s_head, mask=mask, other=0.0
            ).to(tl.float32)
            if not REVERSE:
                v *= strength
        shared = here[:, None] & n_live[None, :]
        w = tl.load(
            write + batch * w_batch + token[:, None] * w_token + group * w_group + n[None, :] * w_state,
            mask=shared,
            other=0.0,
        ).to(tl.float32)
        wide = moves[:, None, None] & held[None, :, :]
        g = tl.load(
            decay
            + batch * g_batch
            + step[:, None, None] * g_token
            + (head[:, None] * g_head + n[None, :] * g_state)[None, :, :],
            mask=wide,
            other=0.0,
        ).to(tl.float32)
        if RATE:
            g *= speed[None, :, :]
        if RESET:
            begins = tl.load(reset + batch * e_batch + step * e_token, mask=moves, other=0)
            g = tl.where((begins != 0)[:, None, None] & wide, float("-inf"), g)
        kept = tl.exp(g)
        new = w[:, None, :] * v[:, :, None]
        new = tl.where((i == 0)[:, None, None], new + kept * state[None, :, :], new)
        _, memory = tl.associative_scan((kept, new), 0, _after)
        if LEAVES:
            faded += tl.sum(g, 0)
        else:
            x = tl.load(
                read + batch * r_batch + token[:, None] * r_token + group * r_group + n[None, :] * r_state,
                mask=shared,
                other=0.0,
            ).to(tl.float32)
            y = tl.sum(memory * x[:, None, :], 2)
            if SCALE and REVERSE:
                y *= strength
            at = ((batch * length + token[:, None]) * heads + head[None, :]) * columns + column[None, :]
            tl.store(out + at, y, mask=mask)
        state = tl.sum(tl.where((i == TOKENS - 1)[:, None, None], memory, 0.0), 0)
    if LEAVES:
        tl.store(entering + corner[:, None] * states + n[None, :], state, mask=held)
        own = ((batch * segments + nth) * heads + head)[:, None] * states + n[None, :]
        tl.store(total + own, faded, mask=held & (column == 0)[:, None])


@triton.jit
@no_type_check
def carry(states, total, segments, per_batch, columns, width, per_head, SIZE: tl.constexpr):
    """Replace each segment's final state by its initial state; there are `per_head` decays per head, or one for all."""
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < per_batch
    head = at // (columns * width)
    log = head * per_head + at % width % per_head
    heads = per_batch // (columns * width)
    state = tl.zeros((SIZE,), dtype=tl.float32)
    states += batch * segments * per_batch
    total += batch * segments * heads * per_head
    for _ in range(0, segments):
        left = tl.load(states + at, mask=live, other=0.0)
        faded = tl.load(total + log, mask=live, other=0.0)
        tl.store(states + at, state, mask=live)
        state = tl.exp(faded) * state + left
        states += per_batch
        total += heads * per_head


@triton.jit
@no_type_check
def diagonal_gradients(
    query,
    key,
    decay,
    rate,
    scale,
    reset,
    value,
    grad,
    before,
    after,
    query_grad,
    key_grad,
    decay_grad,
    rate_grad,
    scale_grad,
    value_grad,
    length,
    segments,
    groups,
    blocks,
    per_group,
    heads,
    columns,
    states,
    batches,
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
    g_state,
    a_head,
    a_state,
    s_batch,
    s_token,
    s_head,
    e_batch,
    e_token,
    v_batch,
    v_token,
    v_head,
    v_column,
    y_batch,
    y_token,
    y_head,
    y_column,
    RATE: tl.constexpr,
    SCALE: tl.constexpr,
    RESET: tl.constexpr,
    NARROW: tl.constexpr,
    ONE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Write all gradients of TOKENS tokens from the state before them and the adjoint state after them."""
    nth = tl.program_id(0).to(tl.int64) % segments
    program = tl.program_id(0).to(tl.int64) // segments
    block = program % blocks
    group = program // blocks % groups
    batch = program // (blocks * groups)
    head, column, row_live = _rows_of(program, group, blocks, per_group, columns, ROWS, ONE)
    n = tl.arange(0, STATES).to(tl.int64)
    n_live = n < states
    held = row_live[:, None] & n_live[None, :]
    i = tl.arange(0, TOKENS).to(tl.int64)
    t = nth * TOKENS + i
    here = t < length
    shared = here[:, None] & n_live[None, :]
    rows = here[:, None] & row_live[None, :]
    wide = here[:, None, None] & held[None, :, :]
    query += batch * q_batch + group * q_group
    key += batch * k_batch + group * k_group
    q = tl.load(query + t[:, None] * q_token + n[None, :] * q_state, mask=shared, other=0.0).to(tl.float32)
    k = tl.load(key + t[:, None] * k_token + n[None, :] * k_state, mask=shared, other=0.0).to(tl.float32)
    grad += batch * y_batch
    y = tl.load(grad + t[:, None] * y_token + (head * y_head + column * y_column)[None, :], mask=rows, other=0.0)
    y = y.to(tl.float32)
    value += batch * v_batch
    v = tl.load(value + t[:, None] * v_token + (head * v_head + column * v_column)[None, :], mask=rows, other=0.0)
    v = v.to(tl.float32)
    # The same, one token earlier; the token before the first is part of the state.
    early = (i > 0) & here
    early_rows = early[:, None] & row_live[None, :]
    v_early = tl.load(
        value + (t[:, None] - 1) * v_token + (head * v_head + column * v_column)[None, :], mask=early_rows, other=0.0
    ).to(tl.float32)
    entered = v
    if SCALE:
        scale += batch * s_batch
        strength = tl.load(scale + t[:, None] * s_token + head[None, :] * s_head, mask=rows, other=0.0)
        strength = strength.to(tl.float32)
        entered = v * strength
        earlier = tl.load(scale + (t[:, None] - 1) * s_token + head[None, :] * s_head, mask=early_rows, other=0.0)
        v_early *= earlier.to(tl.float32)
    k_early = tl.load(
        key + (t[:, None] - 1) * k_token + n[None, :] * k_state, mask=early[:, None] & n_live[None, :], other=0.0
    ).to(tl.float32)
    decay += batch * g_batch
    place = (head[:, None] * g_head + n[None, :] * g_state)[None, :, :]
    g = tl.load(decay + t[:, None, None] * g_token + place, mask=wide, other=0.0).to(tl.float32)
    wide_early = early[:, None, None] & held[None, :, :]
    g_early = tl.load(decay + (t[:, None, None] - 1) * g_token + place, mask=wide_early, other=0.0).to(tl.float32)
    late = here & (t + 1 < length)
    wide_late = late[:, None, None] & held[None, :, :]
    g_late = tl.load(decay + (t[:, None, None] + 1) * g_token + place, mask=wide_late, other=0.0).to(tl.float32)
    log = g
    if RATE:
        speed = tl.load(rate + head[:, None] * a_head + n[None, :] * a_state, mask=held, other=0.0).to(tl.float32)
        g *= speed[None, :, :]
        g_early *= speed[None, :, :]
        g_late *= speed[None, :, :]
    if RESET:
        reset += batch * e_batch
        begins = tl.load(reset + t * e_token, mask=here, other=0)
        g = tl.where((begins != 0)[:, None, None] & wide, float("-inf"), g)
        begins = tl.load(reset + (t - 1) * e_token, mask=early, other=0)
        g_early = tl.where((begins != 0)[:, None, None] & wide_early, float("-inf"), g_early)
        begins = tl.load(reset + (t + 1) * e_token, mask=late, other=0)
        g_late = tl.where((begins != 0)[:, None, None] & wide_late, float("-inf"), g_late)
    corner = (((batch * segments + nth) * heads + head) * columns + column)[:, None] * states + n[None, :]
    first = tl.load(before + corner, mask=held, other=0.0)
    corner = (((batch * segments + segments - 1 - nth) * heads + head) * columns + column)[:, None] * states
    final = tl.load(after + corner + n[None, :], mask=held, other=0.0)
    new = k_early[:, None, :] * v_early[:, :, None]
    new = tl.where((i == 0)[:, None, None], first[None, :, :], new)
    _, old = tl.associative_scan((tl.exp(g_early), new), 0, _after)
    old *= tl.exp(g)
    memory = old + k[:, None, :] * entered[:, :, None]
    new = q[:, None, :] * y[:, :, None]
    kept = tl.exp(g_late)
    # In the last tile the state after is zero, for any content at positions beyond the last token.
    new = tl.where((i == TOKENS - 1)[:, None, None], new + kept * final[None, :, :], new)
    _, adjoint = tl.associative_scan((kept, new), 0, _after, reverse=True)
    own = ((block * batches + batch) * length + t[:, None]) * groups + group
    tl.store(query_grad + own * states + n[None, :], tl.sum(memory * y[:, :, None], 1), mask=shared)
    tl.store(key_grad + own * states + n[None, :], tl.sum(adjoint * entered[:, :, None], 1), mask=shared)
    passed = tl.sum(adjoint * k[:, None, :], 2)
    at = ((batch * length + t[:, None]) * heads + head[None, :]) * columns + column[None, :]
    part = 0 * block
    if ONE:
        part = block % ((columns + ROWS - 1) // ROWS)
    by_head = ((part * batches + batch) * length + t[:, None]) * heads + head[None, :]
    mine = rows & (tl.arange(0, ROWS) == 0)[None, :] if ONE else rows
    if SCALE:
        tl.store(value_grad + at, passed * strength, mask=rows)
        by_strength = passed * v
        if ONE:
            by_strength = tl.sum(by_strength, 1)[:, None] + 0 * by_strength
        tl.store(scale_grad + by_head, by_strength, mask=mine)
    else:
        tl.store(value_grad + at, passed, mask=rows)
    by_decay = old * adjoint
    if ONE:
        by_decay = tl.sum(by_decay, 1)[:, None, :] + 0 * by_decay
    if RATE:
        by_rate = tl.sum(by_decay * log, 0)
        place = (((part * batches + batch) * segments + nth) * heads + head)[:, None] * states + n[None, :]
        if ONE:
            tl.store(rate_grad + place, by_rate, mask=held & (tl.arange(0, ROWS) == 0)[:, None])
        else:
            tl.store(rate_grad + place, by_rate, mask=held)
        by_decay *= speed[None, :, :]
    if NARROW:
        tl.store(decay_grad + by_head, tl.sum(by_decay, 2), mask=mine)
    else:
        at = by_head[:, :, None] * states + n[None, None, :]
        tl.store(decay_grad + at, by_decay, mask=mine[:, :, None] & n_live[None, None, :])
