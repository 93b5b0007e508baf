"""The Triton kernels of a diagonal memory: segments of tokens, the states between them, and gradients.

Both directions of time share one kernel: backward in time, position p is token `padded` - 1 - p, a state decays by the
step of the token after the one that it reaches, and the writing factor reads. Positions without a token change nothing.
"""

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from unilinattn.kernels.launch import load


class Sizes(NamedTuple):
    """Sizes of a memory and of its division into programs.

    Attributes:
        batches, length, heads, columns, states: shape of the memory; a column is a channel of the values.
        groups, per_group: groups of heads with the same query and key, and heads of each.
        blocks: programs of a group in each segment.
        segments, segment: number of segments, and tokens of each.
    """

    batches: int
    length: int
    heads: int
    columns: int
    states: int
    groups: int
    per_group: int
    blocks: int
    segments: int
    segment: int


@triton.jit
@no_type_check
def _after(decay, write, later_decay, later_write):
    """Compose two steps of a recurrence: S -> decay S + write, then the later step."""
    return decay * later_decay, write * later_decay + later_write


@triton.jit
@no_type_check
def _program(sizes):
    """Return the segment, block, group and sequence of this program."""
    # Segments of the same heads are neighbours, so that they run at the same time and share the factors in the cache.
    segment = tl.program_id(0).to(tl.int64) % sizes.segments
    program = tl.program_id(0).to(tl.int64) // sizes.segments
    block = program % sizes.blocks
    return segment, block, program // sizes.blocks % sizes.groups, program // (sizes.blocks * sizes.groups)


@triton.jit
@no_type_check
def _rows_of(block, group, sizes, ROWS: tl.constexpr, ONE_HEAD: tl.constexpr):
    """Return the heads and columns of a program's rows: several heads of one column, or several columns of one head.

    With 3 columns in blocks of 2 rows, a group of 2 heads has 4 blocks: (head 0: columns 0, 1), (head 0: column 2),
    (head 1: columns 0, 1), (head 1: column 2). With 1 column it has one block, of heads 0 and 1.
    """
    r = tl.arange(0, ROWS).to(tl.int64)
    if ONE_HEAD:
        blocks_of_head = (sizes.columns + ROWS - 1) // ROWS
        column = block % blocks_of_head * ROWS + r
        head = group * sizes.per_group + block // blocks_of_head + 0 * r
        live = column < sizes.columns
    else:
        head_in_group = block * ROWS + r
        head = group * sizes.per_group + head_in_group
        column = 0 * r
        live = head_in_group < sizes.per_group
    return head, column, live


@triton.jit
@no_type_check
def _states_at(batch, segment, head, column, n, sizes):
    """Return the offsets of states (row, coordinate) in a tensor (batch, segment, head, column, state)."""
    row = ((batch * sizes.segments + segment) * sizes.heads + head) * sizes.columns + column
    return row[:, None] * sizes.states + n[None, :]


@triton.jit
@no_type_check
def _log_decays(decay, speed, reset, batch, token, live, head, n, state_live):
    """Return the log-decays (token, row, coordinate) of tokens before and after the rates and the resets apply."""
    mask = live[:, None, None] & state_live[None, :, :]
    raw = load(decay, batch, token[:, None, None], head[None, :, None], n[None, None, :], mask)
    g = raw
    if speed is not None:
        g = raw * speed[None, :, :]
    if reset is not None:
        begins = tl.load(reset.data + batch * reset.batch + token * reset.token, mask=live, other=0)
        g = tl.where((begins != 0)[:, None, None] & mask, float("-inf"), g)
    return raw, g


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
    leaving,
    total,
    out,
    sizes,
    REVERSE: tl.constexpr,
    ONE_HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Run one segment of a diagonal memory: write its outputs, or its final state and its log-decay.

    `rate`, `scale`, `reset` and `entering` may be None. Without `leaving` and `total` the outputs are written to `out`.
    """
    nth, block, group, batch = _program(sizes)
    head, column, row_live = _rows_of(block, group, sizes, ROWS, ONE_HEAD)
    n = tl.arange(0, STATES).to(tl.int64)
    n_live = n < sizes.states
    state_live = row_live[:, None] & n_live[None, :]
    corner = _states_at(batch, nth, head, column, n, sizes)
    state = tl.zeros((ROWS, STATES), dtype=tl.float32)
    log_total = tl.zeros((ROWS, STATES), dtype=tl.float32)
    if entering is not None:
        state = tl.load(entering + corner, mask=state_live, other=0.0)
    speed = None
    if rate is not None:
        speed = load(rate, 0, 0, head[:, None], n[None, :], state_live)
    i = tl.arange(0, TOKENS).to(tl.int64)
    for start in range(0, sizes.segment, TOKENS):
        token = nth * sizes.segment + start + i
        step = token
        if REVERSE:
            token = sizes.segments * sizes.segment - 1 - token
            step = token + 1
        live = (token < sizes.length) & (start + i < sizes.segment)
        value_mask = live[:, None] & row_live[None, :]
        factor_mask = live[:, None] & n_live[None, :]
        v = load(value, batch, token[:, None], head[None, :], column[None, :], value_mask)
        if scale is not None:
            strength = load(scale, batch, token[:, None], head[None, :], 0, value_mask)
            if not REVERSE:
                v *= strength
        w = load(write, batch, token[:, None], group, n[None, :], factor_mask)
        _, g = _log_decays(decay, speed, reset, batch, step, live & (step < sizes.length), head, n, state_live)
        a = tl.exp(g)
        new = w[:, None, :] * v[:, :, None]
        # The state before these tokens enters with the first of them: the scan itself starts from zero.
        new = tl.where((i == 0)[:, None, None], new + a * state[None, :, :], new)
        _, memory = tl.associative_scan((a, new), 0, _after)
        if total is not None:
            log_total += tl.sum(g, 0)
        else:
            x = load(read, batch, token[:, None], group, n[None, :], factor_mask)
            y = tl.sum(memory * x[:, None, :], 2)
            if REVERSE and scale is not None:
                y *= strength
            row = (batch * sizes.length + token[:, None]) * sizes.heads + head[None, :]
            tl.store(out + row * sizes.columns + column[None, :], y, mask=value_mask)
        # A block cannot be indexed by a position: the last token's state is a sum in which the others are zero.
        state = tl.sum(tl.where((i == TOKENS - 1)[:, None, None], memory, 0.0), 0)
    if total is not None:
        tl.store(leaving + corner, state, mask=state_live)
        # All columns of a head decay alike: the first one writes.
        row = (batch * sizes.segments + nth) * sizes.heads + head
        offset = row[:, None] * sizes.states + n[None, :]
        tl.store(total + offset, log_total, mask=state_live & (column == 0)[:, None])


@triton.jit
@no_type_check
def carry(states, total, segments, per_batch, columns, width, per_head, SIZE: tl.constexpr):
    """Replace each segment's final state by its initial state; there are `per_head` decays per head, or one for all."""
    batch = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = entry < per_batch
    head = entry // (columns * width)
    log = head * per_head + entry % width % per_head
    heads = per_batch // (columns * width)
    state = tl.zeros((SIZE,), dtype=tl.float32)
    states += batch * segments * per_batch
    total += batch * segments * heads * per_head
    for _ in range(0, segments):
        left = tl.load(states + entry, mask=live, other=0.0)
        log_total = tl.load(total + log, mask=live, other=0.0)
        tl.store(states + entry, state, mask=live)
        state = tl.exp(log_total) * state + left
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
    sizes,
    NARROW: tl.constexpr,
    ONE_HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Write all gradients of TOKENS tokens from the state before them and the adjoint state after them.

    `rate`, `scale` and `reset` may be None. With S_t = a_t S_{t-1} + k_t v_t^T and y_t = S_t^T q_t, the adjoint state
    is D_t = q_t dy_t^T + a_{t+1} D_{t+1}. The gradients are S_t dy_t by q_t, D_t v_t by k_t, D_t^T k_t by v_t, and
    sum_columns a_t S_{t-1} * D_t by log a_t.
    """
    nth, block, group, batch = _program(sizes)
    head, column, row_live = _rows_of(block, group, sizes, ROWS, ONE_HEAD)
    n = tl.arange(0, STATES).to(tl.int64)
    n_live = n < sizes.states
    state_live = row_live[:, None] & n_live[None, :]
    i = tl.arange(0, TOKENS).to(tl.int64)
    t = nth * TOKENS + i
    live = t < sizes.length
    factor_mask = live[:, None] & n_live[None, :]
    value_mask = live[:, None] & row_live[None, :]
    q = load(query, batch, t[:, None], group, n[None, :], factor_mask)
    k = load(key, batch, t[:, None], group, n[None, :], factor_mask)
    y = load(grad, batch, t[:, None], head[None, :], column[None, :], value_mask)
    v = load(value, batch, t[:, None], head[None, :], column[None, :], value_mask)
    # S_{t-1} is scanned apart from S_t, as a_t S_{t-1} = S_t - k_t v_t^T would cancel: the factors one token earlier.
    # The token before the first is part of the state.
    live_early = (i > 0) & live
    early_mask = live_early[:, None] & row_live[None, :]
    v_early = load(value, batch, t[:, None] - 1, head[None, :], column[None, :], early_mask)
    k_early = load(key, batch, t[:, None] - 1, group, n[None, :], live_early[:, None] & n_live[None, :])
    entered = v
    if scale is not None:
        strength = load(scale, batch, t[:, None], head[None, :], 0, value_mask)
        entered = v * strength
        v_early *= load(scale, batch, t[:, None] - 1, head[None, :], 0, early_mask)
    speed = None
    if rate is not None:
        speed = load(rate, 0, 0, head[:, None], n[None, :], state_live)
    live_late = live & (t + 1 < sizes.length)
    raw, g = _log_decays(decay, speed, reset, batch, t, live, head, n, state_live)
    _, g_early = _log_decays(decay, speed, reset, batch, t - 1, live_early, head, n, state_live)
    _, g_late = _log_decays(decay, speed, reset, batch, t + 1, live_late, head, n, state_live)
    first = tl.load(before + _states_at(batch, nth, head, column, n, sizes), mask=state_live, other=0.0)
    # The adjoint pass counted its segments from the end of the sequence.
    mirrored = sizes.segments - 1 - nth
    final = tl.load(after + _states_at(batch, mirrored, head, column, n, sizes), mask=state_live, other=0.0)
    new = k_early[:, None, :] * v_early[:, :, None]
    new = tl.where((i == 0)[:, None, None], first[None, :, :], new)
    _, old = tl.associative_scan((tl.exp(g_early), new), 0, _after)
    old *= tl.exp(g)
    memory = old + k[:, None, :] * entered[:, :, None]
    new = q[:, None, :] * y[:, :, None]
    a_late = tl.exp(g_late)
    # In the last tile the state after is zero, for any content at positions beyond the last token.
    new = tl.where((i == TOKENS - 1)[:, None, None], new + a_late * final[None, :, :], new)
    _, adjoint = tl.associative_scan((a_late, new), 0, _after, reverse=True)
    # Each block writes its sum over its rows apart; the caller adds the blocks, in one order and without atomics.
    offset = (((block * sizes.batches + batch) * sizes.length + t[:, None]) * sizes.groups + group) * sizes.states
    tl.store(query_grad + offset + n[None, :], tl.sum(memory * y[:, :, None], 1), mask=factor_mask)
    tl.store(key_grad + offset + n[None, :], tl.sum(adjoint * entered[:, :, None], 1), mask=factor_mask)
    passed = tl.sum(adjoint * k[:, None, :], 2)
    row = (batch * sizes.length + t[:, None]) * sizes.heads + head[None, :]
    offset = row * sizes.columns + column[None, :]
    # Gradients per head: blocks of columns of one head write apart, and of a block the first row, with the sum.
    slot = 0 * block
    writes = tl.arange(0, ROWS) >= 0
    if ONE_HEAD:
        slot = block % ((sizes.columns + ROWS - 1) // ROWS)
        writes = tl.arange(0, ROWS) == 0
    by_head = ((slot * sizes.batches + batch) * sizes.length + t[:, None]) * sizes.heads + head[None, :]
    head_mask = value_mask & writes[None, :]
    if scale is not None:
        tl.store(value_grad + offset, passed * strength, mask=value_mask)
        by_strength = passed * v
        if ONE_HEAD:
            by_strength = tl.sum(by_strength, 1)[:, None] + 0 * by_strength
        tl.store(scale_grad + by_head, by_strength, mask=head_mask)
    else:
        tl.store(value_grad + offset, passed, mask=value_mask)
    by_decay = old * adjoint
    if ONE_HEAD:
        by_decay = tl.sum(by_decay, 1)[:, None, :] + 0 * by_decay
    if rate is not None:
        row = ((slot * sizes.batches + batch) * sizes.segments + nth) * sizes.heads + head
        offset = row[:, None] * sizes.states + n[None, :]
        tl.store(rate_grad + offset, tl.sum(by_decay * raw, 0), mask=state_live & writes[:, None])
        by_decay *= speed[None, :, :]
    if NARROW:
        tl.store(decay_grad + by_head, tl.sum(by_decay, 2), mask=head_mask)
    else:
        offset = by_head[:, :, None] * sizes.states + n[None, None, :]
        tl.store(decay_grad + offset, by_decay, mask=head_mask[:, :, None] & n_live[None, None, :])
