"""The Triton kernels of the weighted map: the square of a block of rows of each head, and the writes before it.

Every exponent is a sum of log-decays, never a difference of sums; masks apply before the exponential.
"""

from typing import no_type_check

import triton
import triton.language as tl

from unilinattn.kernels.launch import load, product

SUB = 16
"""Tokens of a sub-block; taps reach over at most this many."""


@triton.jit
@no_type_check
def _landing(taps, batch, first, end, head, offset, REACH: tl.constexpr):
    """Return the weight of each of 16 tokens, from `first`, on 16 columns: the tap of lag token - column.

    The first column is `offset` tokens before the first token.
    """
    SUB: tl.constexpr = 16
    token = first + tl.arange(0, SUB)[:, None]
    lag = tl.arange(0, SUB)[:, None] - tl.arange(0, SUB)[None, :] + offset
    return load(taps, batch, token, head, lag, (lag >= 0) & (lag <= REACH) & (token < end))


@triton.jit
@no_type_check
def head_squares(
    query,
    key,
    decay,
    left,
    taps,
    near,
    read,
    heads,
    states,
    rows,
    REACH: tl.constexpr,
    PRECISION: tl.constexpr,
    STATES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Fill 16 rows of the square of a head, whose columns begin REACH tokens before it, and their readers.

    `taps` are (batch, token, head, lag); `left` may be None; columns after the last that a row's taps reach stay as
    they are. Sub-blocks of tokens before the rows are products around the first row, from the nearest to the farthest,
    and the tokens of the rows are computed pair by pair. A sub-block's taps land in 16 columns and in the 16 after
    them, which also take those of the next sub-block: each column is written once, with both.
    """
    SUB: tl.constexpr = 16
    subs = (rows + SUB - 1) // SUB
    sub = (tl.program_id(0) % subs).to(tl.int64)
    head = (tl.program_id(0) // subs).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, SUB)
    i = sub * SUB + r
    n = tl.arange(0, STATES).to(tl.int64)
    n_live = (n < states)[None, :]
    live = (i < rows)[:, None] & n_live
    cols = rows + REACH
    out_row = ((batch * heads + head) * rows + i)[:, None]

    weight = tl.full((SUB,), 1.0, dtype=tl.float32)
    if left is not None:
        weight = load(left, batch, i, head, 0, i < rows)
    square = tl.zeros((SUB, SUB), dtype=tl.float32)
    later = r[:, None] > r[None, :]
    for begin in range(0, states, PAIRS):
        m = begin + tl.arange(0, PAIRS).to(tl.int64)
        m_live = (i < rows)[:, None] & (m < states)[None, :]
        g = load(decay, batch, i[:, None], head, m[None, :], m_live)
        q = load(query, batch, i[:, None], head, m[None, :], m_live)
        k = load(key, batch, i[:, None], head, m[None, :], m_live)
        steps = tl.where(later[:, :, None], g[:, None, :], 0.0)
        pairs = q[:, None, :] * tl.exp(tl.cumsum(steps, 0)) * k[None, :, :]
        square += tl.sum(pairs, 2)
    alpha = tl.where(r[:, None] >= r[None, :], square * weight[:, None], 0.0)

    g = load(decay, batch, i[:, None], head, n[None, :], live)
    q = load(query, batch, i[:, None], head, n[None, :], live) * weight[:, None]
    since = tl.cumsum(g, 0)
    a = q * tl.exp(since)
    # Column 0 of the square is REACH tokens before token 0, so that of lag 0 is REACH columns after its token's number.
    zero = tl.zeros((SUB, SUB), dtype=tl.float32)
    first = sub * SUB
    if REACH > 0:
        after = product(alpha, _landing(taps, batch, first, rows, head, REACH - SUB, REACH), zero, PRECISION)
        p = (sub + 1) * SUB + r
        tl.store(near + out_row * cols + p[None, :], after, mask=(i < rows)[:, None] & (p < cols)[None, :])
    carry = product(alpha, _landing(taps, batch, first, rows, head, REACH, REACH), zero, PRECISION)
    crossed = tl.zeros((STATES,), dtype=tl.float32)
    for step in range(0, sub):
        first = (sub - 1 - step) * SUB
        j = first + r
        g = load(decay, batch, j[:, None], head, n[None, :], n_live)
        # The step of the next token, because a token's write decays only by the steps after it.
        following = load(decay, batch, j[:, None] + 1, head, n[None, :], (r < SUB - 1)[:, None] & n_live)
        k = load(key, batch, j[:, None], head, n[None, :], n_live)
        b = k * tl.exp(tl.cumsum(following, 0, reverse=True) + crossed[None, :])
        alpha = product(a, tl.trans(b), zero, PRECISION)
        crossed += tl.sum(g, 0)
        value = carry
        if REACH > 0:
            value = product(alpha, _landing(taps, batch, first, rows, head, REACH - SUB, REACH), carry, PRECISION)
        p = first + SUB + r
        tl.store(near + out_row * cols + p[None, :], value, mask=(i < rows)[:, None] & (p < cols)[None, :])
        carry = product(alpha, _landing(taps, batch, first, rows, head, REACH, REACH), zero, PRECISION)
    tl.store(near + out_row * cols + r[None, :], carry, mask=(i < rows)[:, None] & (r < cols)[None, :])
    tl.store(read + out_row * states + n[None, :], q * tl.exp(since + crossed[None, :]), mask=live)


@triton.jit
@no_type_check
def head_writes(
    key,
    decay,
    taps,
    crossed,
    write,
    heads,
    states,
    tokens,
    width,
    blocks,
    REACH: tl.constexpr,
    PRECISION: tl.constexpr,
    STATES: tl.constexpr,
):
    """Fill the writes of a head's columns into the state at a cut after some tokens, from the last to the first.

    `crossed` (batch, head, state) is the log-decay from after the last token to the cut, `taps` are (batch, token,
    head, lag), and `blocks` sub-blocks cover tokens and columns. A token's taps land in its sub-block of columns and in
    the one before.
    """
    SUB: tl.constexpr = 16
    head = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, SUB)
    n = tl.arange(0, STATES).to(tl.int64)
    n_live = (n < states)[None, :]
    total = load(crossed, batch, 0, head, n, n < states)
    carry = tl.zeros((SUB, STATES), dtype=tl.float32)
    zero = tl.zeros((SUB, STATES), dtype=tl.float32)
    for step in range(0, blocks):
        first = ((blocks - 1 - step) * SUB).to(tl.int64)
        j = first + r
        g = load(decay, batch, j[:, None], head, n[None, :], (j < tokens)[:, None] & n_live)
        inside = ((r < SUB - 1) & (j + 1 < tokens))[:, None] & n_live
        following = load(decay, batch, j[:, None] + 1, head, n[None, :], inside)
        k = load(key, batch, j[:, None], head, n[None, :], (j < tokens)[:, None] & n_live)
        faded = k * tl.exp(tl.cumsum(following, 0, reverse=True) + total[None, :])
        total += tl.sum(g, 0)
        weights = _landing(taps, batch, first, tokens, head, 0, REACH)
        value = product(tl.trans(weights), faded, carry, PRECISION)
        mask = (j < width)[:, None] & n_live
        tl.store(write + ((batch * heads + head) * width + j)[:, None] * states + n[None, :], value, mask=mask)
        if REACH > 0:
            before = _landing(taps, batch, first, tokens, head, SUB, REACH)
            carry = product(tl.trans(before), faded, zero, PRECISION)
