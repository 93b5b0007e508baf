"""The limit on an operation's memory in addition to its inputs and result, and the error raised above it."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from math import inf, prod

from unilinattn.errors import MemoryLimitError, OptionError

DEFAULT = 1 << 30
"""Default memory limit of an operation in bytes: 1 GiB."""

_limit: ContextVar[int] = ContextVar("unilinattn.max_memory", default=DEFAULT)
_reserved: ContextVar[int] = ContextVar("unilinattn.reserved", default=0)


@contextmanager
def max_memory(limit: int | None) -> Iterator[None]:
    """Limit each operation in this context to `limit` bytes in addition to its inputs and result.

    The sizes of blocks and tiles follow from the limit. None keeps the current limit.

    Raises `OptionError` if `limit` is neither None nor a positive integer.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
        raise OptionError(f"max_memory={limit!r}; give a positive number of bytes, such as {DEFAULT} for 1 GiB.")
    token = _limit.set(_limit.get() if limit is None else limit)
    try:
        yield
    finally:
        _limit.reset(token)


def allowed() -> int:
    """Return the bytes that an operation may take now: the limit less the reserved bytes."""
    return _limit.get() - _reserved.get()


def require(size: int, what: str, instead: str) -> None:
    """Raise `MemoryLimitError` if `size` bytes are more than allowed; call it before they are allocated.

    The message names `what` needs them and suggests `instead`.
    """
    if size > allowed():
        occupied = f" in addition to {in_words(_reserved.get())} already in use" if _reserved.get() else ""
        raise MemoryLimitError(
            f"{what} takes {in_words(size)}{occupied}, and max_memory allows {in_words(_limit.get())}; {instead}, or "
            f"allow more with max_memory={size + _reserved.get()}."
        )


@contextmanager
def reserved(size: int, what: str, instead: str) -> Iterator[None]:
    """Reserve `size` bytes of the limit in this context; raise `MemoryLimitError` as `require` does."""
    require(size, what, instead)
    with without(size):
        yield


@contextmanager
def without(size: int) -> Iterator[None]:
    """Reserve `size` bytes in this context even if they are more than allowed, for an estimate."""
    token = _reserved.set(_reserved.get() + size)
    try:
        yield
    finally:
        _reserved.reset(token)


def require_result(shape: tuple[int, ...], width: int, what: str, instead: str) -> None:
    """Raise `MemoryLimitError` if a result of `shape`, with elements of `width` bytes, is larger than allowed."""
    sizes = " x ".join(map(str, shape))
    require(prod(shape) * width, f"{what}, {sizes} numbers of {width} bytes,", instead)


def rows_within(size: Callable[[int], int], most: int, what: str | None) -> int:
    """Return the largest power of two of rows, at most `most`, whose `size` in bytes is allowed.

    Raises `MemoryLimitError` if a single row of `what` does not fit; returns 1 if `what` is None, for an estimate.
    """
    rows = 1
    if what is not None:
        require(size(rows), f"one row of {what}", "take fewer sequences or a shorter one")
    while 2 * rows <= most and size(2 * rows) <= allowed():
        rows *= 2
    return rows


def parts(length: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of `size` positions of `length`, the last one of the rest."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


SLACK = 64 << 20
"""Bytes by which a process may grow before free pages are returned; a small pass soon faults them in again."""

_least_resident = inf
"""The smallest size of the process, in bytes, since free pages were last returned."""


def return_free_pages() -> None:
    """Return the pages of freed tensors to the operating system, if the process has grown by more than `SLACK`.

    Growth counts from the smallest size since the last return. Does nothing unless the C library is glibc. Otherwise
    the free parts of glibc's heap add up over repeated passes, such as the segments of a backward pass: a process takes
    1.7 GiB for tensors of 0.3 GiB.
    """
    global _least_resident
    if (trim := _malloc_trim()) is None:
        return
    if _resident() > _least_resident + SLACK:
        trim(0)
        _least_resident = inf
    _least_resident = min(_least_resident, _resident())


def _resident() -> int:
    """Return the bytes of the process in memory; 0 where Linux' record of them is missing."""
    try:
        with open("/proc/self/statm") as record:
            return int(record.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None
    return trim


def in_words(size: int) -> str:
    """Return a number of bytes as text in GiB, MiB, KiB or bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
