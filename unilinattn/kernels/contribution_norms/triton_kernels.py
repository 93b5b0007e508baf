"""The Triton kernel of the contribution norms: a product W v whose columns are reduced in registers."""

from typing import no_type_check

import triton
import triton.language as tl

from unilinattn.kernels.launch import product, tuned

OUT = 128
"""Outputs per program; each block of outputs writes one number per pair."""


@tuned(
    [
        {"PAIRS": 64, "CHANNELS": 32, "num_warps": 4, "num_stages": 3},
        {"PAIRS": 128, "CHANNELS": 32, "num_warps": 8, "num_stages": 3},
        {"PAIRS": 128, "CHANNELS": 32, "num_warps": 4, "num_stages": 4},
        {"PAIRS": 128, "CHANNELS": 64, "num_warps": 8, "num_stages": 3},
        {"PAIRS": 64, "CHANNELS": 16, "num_warps": 4, "num_stages": 4},
    ],
    key=["channels", "outs", "PRECISION", "KIND"],
)
@triton.jit
@no_type_check
def pair_norms(
    vectors,
    weight,
    reference,
    out,
    pairs,
    per_row,
    channels,
    outs,
    per_sequence,
    p,
    v_group,
    v_channel,
    v_row,
    v_col,
    w_group,
    w_out,
    w_channel,
    y_batch,
    y_row,
    y_out,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    OUT: tl.constexpr,
    PAIRS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write the partial norms of some pairs over a block of outputs of W v; pairs run over the columns of each row.

    The kind "alti and l1" writes both numbers of a pair, those of l1 after all of "alti".
    """
    group = tl.program_id(2).to(tl.int64)
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    d = tl.program_id(1).to(tl.int64) * OUT + tl.arange(0, OUT)
    here, wanted = pair < pairs, d < outs
    row, col = pair // per_row, pair % per_row
    vectors += group * v_group + row[None, :] * v_row + col[None, :] * v_col
    weight += group * w_group + d[:, None] * w_out
    acc = tl.zeros((OUT, PAIRS), dtype=tl.float32)
    for start in range(0, channels, CHANNELS):
        c = start + tl.arange(0, CHANNELS).to(tl.int64)
        live = c < channels
        w = tl.load(weight + c[None, :] * w_channel, mask=wanted[:, None] & live[None, :], other=0.0).to(tl.float32)
        v = tl.load(vectors + c[:, None] * v_channel, mask=live[:, None] & here[None, :], other=0.0).to(tl.float32)
        acc = product(w, v, acc, PRECISION)
    if KIND == "alti" or KIND == "alti and l1" or KIND == "dot":
        offset = group // per_sequence * y_batch + row[None, :] * y_row + d[:, None] * y_out
        y = tl.load(reference + offset, mask=wanted[:, None] & here[None, :], other=0.0).to(tl.float32)
    if KIND == "l1":
        total = tl.sum(tl.abs(acc), 0)
    if KIND == "l2":
        total = tl.sum(acc * acc, 0)
    if KIND == "lp":
        # log 0 is -inf, and exp of that is 0 again.
        total = tl.sum(tl.exp(p * tl.log(tl.abs(acc))), 0)
    if KIND == "max":
        total = tl.max(tl.abs(acc), 0)
    if KIND == "alti" or KIND == "alti and l1":
        along = tl.where(y < 0, -acc, acc)
        total = tl.sum(tl.minimum(along, 2 * tl.abs(y) - along), 0)
    if KIND == "dot":
        total = tl.sum(acc * y, 0)
    offset = (tl.program_id(1).to(tl.int64) * tl.num_programs(2) + group) * pairs + pair
    tl.store(out + offset, total, mask=here)
    if KIND == "alti and l1":
        second = out + tl.num_programs(1).to(tl.int64) * tl.num_programs(2) * pairs
        tl.store(second + offset, tl.sum(tl.abs(acc), 0), mask=here)
