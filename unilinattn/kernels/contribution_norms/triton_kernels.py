"""The Triton kernel of the contribution norms: a tile of pairs, their vectors in registers, times W, reduced."""

from typing import no_type_check

import triton
import triton.language as tl

from unilinattn.kernels.launch import product, tuned


@tuned(
    [
        {"ROWS": 8, "COLS": 8, "OUT": 64, "CHANNELS": 32, "num_warps": 4, "num_stages": 2},
        {"ROWS": 8, "COLS": 16, "OUT": 64, "CHANNELS": 32, "num_warps": 8, "num_stages": 2},
        {"ROWS": 8, "COLS": 16, "OUT": 128, "CHANNELS": 32, "num_warps": 8, "num_stages": 2},
        {"ROWS": 8, "COLS": 16, "OUT": 256, "CHANNELS": 32, "num_warps": 8, "num_stages": 1},
        {"ROWS": 16, "COLS": 16, "OUT": 128, "CHANNELS": 16, "num_warps": 8, "num_stages": 2},
    ],
    key=["channels", "states", "outs", "PRECISION", "MAPPED"],
)
@triton.jit
@no_type_check
def pair_norms(
    read,
    write,
    alpha,
    weight,
    reference,
    out,
    rows,
    cols,
    channels,
    states,
    outs,
    per_head,
    p,
    r_batch,
    r_row,
    r_channel,
    r_state,
    w_batch,
    w_col,
    w_channel,
    w_state,
    a_batch,
    a_head,
    a_row,
    a_col,
    m_out,
    m_channel,
    y_batch,
    y_row,
    y_out,
    MAPPED: tl.constexpr,
    LEFT: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    OUT: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Fill a tile of norms: W by the vectors of its pairs, some outputs at a time, each reduced where it stands.

    The vectors are made again for each block of outputs: `states` multiplications, against OUT in the product.
    """
    PAIRS: tl.constexpr = ROWS * COLS
    across = (cols + COLS - 1) // COLS
    program = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    i = program // across * ROWS + tl.arange(0, ROWS)
    j = program % across * COLS + tl.arange(0, COLS)
    i_live, j_live = i < rows, j < cols
    read += batch * r_batch
    write += batch * w_batch
    alpha += batch * a_batch
    reference += batch * y_batch
    total = tl.zeros((PAIRS,), dtype=tl.float32)
    for first in range(0, outs, OUT):
        d = first + tl.arange(0, OUT).to(tl.int64)
        acc = tl.zeros((OUT, PAIRS), dtype=tl.float32)
        for start in range(0, channels, CHANNELS):
            c = start + tl.arange(0, CHANNELS).to(tl.int64)
            live = c < channels
            at = weight + d[:, None] * m_out + c[None, :] * m_channel
            w = tl.load(at, mask=(d < outs)[:, None] & live[None, :], other=0.0).to(tl.float32)
            reads = read + c[:, None] * r_channel + i[None, :] * r_row
            writes = write + c[:, None] * w_channel + j[None, :] * w_col
            r_live = live[:, None] & i_live[None, :]
            w_live = live[:, None] & j_live[None, :]
            if MAPPED:
                at = (c // per_head)[:, None, None] * a_head + i[None, :, None] * a_row + j[None, None, :] * a_col
                v = tl.load(alpha + at, mask=r_live[:, :, None] & w_live[:, None, :], other=0.0).to(tl.float32)
                v *= tl.load(writes, mask=w_live, other=0.0).to(tl.float32)[:, None, :]
                if LEFT:
                    v *= tl.load(reads, mask=r_live, other=0.0).to(tl.float32)[:, :, None]
            else:
                v = tl.zeros((CHANNELS, ROWS, COLS), dtype=tl.float32)
                for _ in range(0, states):
                    one = tl.load(reads, mask=r_live, other=0.0).to(tl.float32)
                    other = tl.load(writes, mask=w_live, other=0.0).to(tl.float32)
                    v += one[:, :, None] * other[:, None, :]
                    reads += r_state
                    writes += w_state
            acc = product(w, tl.reshape(v, (CHANNELS, PAIRS)), acc, PRECISION)
        if KIND == "l1":
            total += tl.sum(tl.abs(acc), 0)
        if KIND == "l2":
            total += tl.sum(acc * acc, 0)
        if KIND == "lp":
            # log 0 is -inf, and exp of that is 0 again.
            total += tl.sum(tl.exp(p * tl.log(tl.abs(acc))), 0)
        if KIND == "max":
            total = tl.maximum(total, tl.max(tl.abs(acc), 0))
        if KIND == "alti":
            at = d[:, None] * y_out + i[None, :] * y_row
            y = tl.load(reference + at, mask=(d < outs)[:, None] & i_live[None, :], other=0.0).to(tl.float32)
            each = tl.broadcast_to(y[:, :, None], (OUT, ROWS, COLS))
            each = tl.reshape(each, (OUT, PAIRS))
            total += tl.sum(tl.abs(each) - tl.abs(each - acc), 0)
        if KIND == "dot":
            y = tl.load(reference + d * y_out, mask=d < outs, other=0.0).to(tl.float32)
            total += tl.sum(acc * y[:, None], 0)
    if KIND == "l2":
        total = tl.sqrt(total)
    if KIND == "lp":
        total = tl.exp(tl.log(total) / p)
    found = tl.reshape(total, (ROWS, COLS))
    at = (batch * rows + i[:, None]) * cols + j[None, :]
    tl.store(out + at, found, mask=i_live[:, None] & j_live[None, :])
