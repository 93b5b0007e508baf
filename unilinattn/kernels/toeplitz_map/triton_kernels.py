"""The Triton kernel of the reduced map of convolutions."""

from typing import no_type_check

import triton
import triton.language as tl

from unilinattn.kernels.launch import load, tuned

CONFIGS = [
    {"ROWS": 64, "COLS": 64, "num_warps": 8},
    {"ROWS": 32, "COLS": 64, "num_warps": 4},
    {"ROWS": 32, "COLS": 32, "num_warps": 4},
]


@tuned(CONFIGS, key=["heads", "rank", "each", "length"], restore=["out"])
@triton.jit
@no_type_check
def weighted_tiles(
    kernel,
    left,
    tap,
    query,
    key,
    out,
    heads,
    per_group,
    rank,
    each,
    taps,
    rows,
    start,
    length,
    lag,
    out_batch,
    out_row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Add one tap to a tile of the map; a token's column is `lag` before it, and `each` channels share a head.

    `query` and `key` may both be None, for a convolution without scores.
    """
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    i, landed = start + row, col + lag
    i_live, j_live = row < rows, landed < length
    last = start + tl.program_id(1).to(tl.int64) * ROWS + ROWS
    if tl.program_id(0).to(tl.int64) * COLS + lag < last:
        back = i[:, None] - landed[None, :]
        seen = (back >= 0) & (back < taps) & i_live[:, None] & j_live[None, :]
        reading = left.data + batch * left.batch + i * left.token
        landing = tap.data + batch * tap.batch + landed * tap.token
        window = kernel.data + back * kernel.last
        total = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for head in range(0, heads):
            pairs = tl.zeros((ROWS, COLS), dtype=tl.float32)
            for _ in range(0, each):
                x = tl.load(reading, mask=i_live, other=0.0).to(tl.float32)
                y = tl.load(landing, mask=j_live, other=0.0).to(tl.float32)
                pairs += x[:, None] * y[None, :]
                reading += left.last
                landing += tap.last
            if query is not None:
                scores = tl.zeros((ROWS, COLS), dtype=tl.float32)
                group = head // per_group
                for nth in range(0, rank):
                    x = load(query, batch, i, group, nth, i_live)
                    y = load(key, batch, landed, group, nth, j_live)
                    scores += x[:, None] * y[None, :]
                pairs *= scores
            total += tl.load(window, mask=seen, other=0.0).to(tl.float32) * pairs
            window += kernel.head
        target = out + batch * out_batch + row[:, None] * out_row + col[None, :]
        tl.store(target, tl.load(target, mask=seen, other=0.0) + total, mask=seen)
