"""The Triton kernel of the states between chunks."""

from typing import no_type_check

import triton
import triton.language as tl

from unilinattn.kernels.launch import product


@triton.jit
@no_type_check
def carry_chunks(
    transition,
    states,
    chunks,
    heads,
    size,
    channels,
    t_batch,
    t_chunk,
    t_head,
    t_row,
    t_column,
    s_batch,
    s_chunk,
    s_head,
    DIAGONAL: tl.constexpr,
    STATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Add to each written state the transition of the one before, from the initial one on, along the given strides."""
    p = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.program_id(1).to(tl.int64) * STATES + tl.arange(0, STATES)
    head = tl.program_id(2).to(tl.int64) % heads
    batch = tl.program_id(2).to(tl.int64) // heads
    transition += batch * t_batch + head * t_head
    states += batch * s_batch + head * s_head
    entry = n[:, None] * channels + p[None, :]
    live = (n < size)[:, None] & (p < channels)[None, :]
    for _ in range(0, chunks):
        target = states + s_chunk
        state = tl.load(target + entry, mask=live, other=0.0)
        if DIAGONAL:
            decay = tl.load(transition + n * t_row, mask=n < size, other=0.0).to(tl.float32)
            state += decay[:, None] * tl.load(states + entry, mask=live, other=0.0)
        else:
            for first in range(0, size, INNER):
                m = first + tl.arange(0, INNER).to(tl.int64)
                mask = (n < size)[:, None] & (m < size)[None, :]
                moves = tl.load(transition + n[:, None] * t_row + m[None, :] * t_column, mask=mask, other=0.0)
                mask = (m < size)[:, None] & (p < channels)[None, :]
                before = tl.load(states + m[:, None] * channels + p[None, :], mask=mask, other=0.0)
                state = product(moves.to(tl.float32), before, state, "ieee")
        tl.store(target + entry, state, mask=live)
        # The next chunk's products read coordinates that other threads of this program have stored.
        tl.debug_barrier()
        states = target
        transition += t_chunk
