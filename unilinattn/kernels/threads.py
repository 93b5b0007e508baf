"""Threads of compiled loops: those of torch's OpenMP runtime where it can be called, else a pool.

Between two operations the threads of an OpenMP runtime spin for some milliseconds, each on a core. Threads of a pool
would have to share these cores with them.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray

_Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_forked = False


def in_pieces(loop: Callable[..., None], count: int, *arrays: NDArray[Any]) -> None:
    """Call a compiled loop with `arrays` and each of `count` numbers, on as many threads as torch uses.

    Raises the first error of a call; calls that have not begun by then are left out.
    """
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        for piece in range(count):
            loop(*arrays, piece)
        return
    pieces, errors = iter(range(count)), list[BaseException]()

    def work(_: Any) -> None:
        try:
            for piece in pieces:
                loop(*arrays, piece)
        except BaseException as error:
            # An exception cannot pass through the frames of the runtime.
            errors.append(error)
            list(pieces)

    parallel = None if _forked else _openmp()
    if parallel is None:
        list(_pool(threads).map(work, range(threads)))
    else:
        parallel(_Task(work), None, threads, 0)
    if errors:
        raise errors[0]


@cache
def _openmp() -> Callable[[Any, None, int, int], None] | None:
    """Return the function of torch's OpenMP runtime that calls a task on some threads.

    None if the runtime has another interface, and outside Linux, where it is not tested.
    """
    if sys.platform != "linux":
        return None
    try:
        # A symbol is looked up in the libraries that torch is linked to.
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    parallel.argtypes, parallel.restype = [_Task, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="unilinattn")


def _after_fork() -> None:
    """Use new threads in a forked process, which has the memory of the parent's threads without them."""
    global _forked
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
