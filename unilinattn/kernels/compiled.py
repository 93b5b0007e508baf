"""Loops that Numba compiles, and their threads.

A stored loop is compiled again when its own file changes; after a change here, touch the files of all loops.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, no_type_check

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

TINY = np.finfo(np.float32).tiny

# Sums may be reordered, which vector registers need. NaN and infinite numbers stay what they are.
_FAST = {"contract", "reassoc", "nsz"}

inlined: Callable[[Any], Any] = njit(inline="always", fastmath=_FAST)
"""Makes a function part of each compiled loop that calls it."""


@inlined
@no_type_check
def flushed(x):
    """Return x, zero if it is subnormal; NaN stays NaN."""
    return np.float32(0) if abs(x) < TINY else x


def compiled(loop: Callable[..., None]) -> Any:
    """Compile a loop at its first call, and store it if a folder for it can be written."""
    try:
        return njit(nogil=True, cache=True, fastmath=_FAST)(loop)
    except RuntimeError:
        return njit(nogil=True, fastmath=_FAST)(loop)


def in_pieces(loop: Callable[..., None], count: int, *arrays: NDArray[Any]) -> None:
    """Call a compiled loop with `arrays` and each of `count` numbers, on as many threads as torch uses."""
    threads = min(torch.get_num_threads(), count)
    if threads == 1:
        for piece in range(count):
            loop(*arrays, piece)
    else:
        list(_pool(threads).map(partial(loop, *arrays), range(count)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="unilinattn")


# A forked process has no threads, but the memory of a pool that had them.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
