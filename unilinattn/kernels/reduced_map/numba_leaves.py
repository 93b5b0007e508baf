"""Leaves of the reduced map on a CPU, compiled by Numba: row by row, with the memory of their columns in cache."""

from typing import no_type_check

import numpy as np

from unilinattn.kernels.compiled import compiled, flushed

LANES = 256
"""(head, state) pairs whose memory of all columns of a block stays in the first cache."""


@compiled
@no_type_check
def fill(steps, query, entering, write, read, passed, leaves, block):
    """Fill one block of `tiled.fill_leaves`; (head, state) is one axis of every array."""
    tokens, inner = steps.shape[1:]
    reach = entering.shape[2] - 1
    leaf = leaves[block]
    leaf[:] = 0
    write[block] = 0
    for first in range(0, inner, LANES):
        last = min(first + LANES, inner)
        crossed = passed[block, first:last]
        crossed[:] = 1
        for i in range(tokens):
            step, reader = steps[block, i, first:last], query[block, i, first:last]
            for col in range(i + reach + 1):
                memory = write[block, col, first:last]
                total = np.float32(0)
                if col < i:
                    for lane in range(len(memory)):
                        decayed = flushed(memory[lane] * step[lane])
                        memory[lane] = decayed
                        total += decayed * reader[lane]
                else:
                    landing = entering[block, i, col - i, first:last]
                    for lane in range(len(memory)):
                        written = flushed(memory[lane] * step[lane] + landing[lane])
                        memory[lane] = written
                        total += written * reader[lane]
                leaf[i, col] += total
            reading = read[block, i, first:last]
            for lane in range(len(crossed)):
                across = flushed(crossed[lane] * step[lane])
                crossed[lane] = across
                reading[lane] = flushed(reader[lane] * across)
