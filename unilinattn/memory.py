"""How much memory an operation may take beside its inputs and its result, and the error when that is too little."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

from unilinattn.errors import MemoryLimitError, OptionError

DEFAULT = 1 << 30
"""Bytes that an operation may take where nobody says otherwise: 1 GiB."""

_limit: ContextVar[int] = ContextVar("max_memory", default=DEFAULT)
_reserved: ContextVar[int] = ContextVar("reserved", default=0)


@contextmanager
def max_memory(limit: int | None) -> Iterator[None]:
    """Bound what each operation inside takes beside its inputs and its result, in bytes; None changes nothing.

    Blocks and tiles follow from it. Raises `OptionError` for what is no positive number of bytes.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
        raise OptionError(f"max_memory={limit!r}; give a positive number of bytes, such as {DEFAULT} for 1 GiB.")
    token = _limit.set(_limit.get() if limit is None else limit)
    try:
        yield
    finally:
        _limit.reset(token)


def allowed() -> int:
    """Return the bytes that an operation may take now: what is reserved has gone from them."""
    return _limit.get() - _reserved.get()


def require(size: int, what: str, instead: str) -> None:
    """Raise `MemoryLimitError` if so many bytes are more than is allowed, before they are allocated."""
    if size > allowed():
        held = f" beside {in_words(_reserved.get())} that are held already" if _reserved.get() else ""
        raise MemoryLimitError(
            f"{what} takes {in_words(size)}{held}, and max_memory allows {in_words(_limit.get())}; {instead}, or allow "
            f"more with max_memory={size + _reserved.get()}."
        )


@contextmanager
def reserved(size: int, what: str, instead: str) -> Iterator[None]:
    """Take so many bytes off what operations inside may take; raise as `require` does if they are not there."""
    require(size, what, instead)
    with without(size):
        yield


@contextmanager
def without(size: int) -> Iterator[None]:
    """Take so many bytes off what operations inside may take, be they there or not: to estimate."""
    token = _reserved.set(_reserved.get() + size)
    try:
        yield
    finally:
        _reserved.reset(token)


def require_result(shape: tuple[int, ...], width: int, what: str, instead: str) -> None:
    """Raise `MemoryLimitError` for a result of so many numbers, `width` bytes each, that is larger than allowed."""
    sizes = " x ".join(map(str, shape))
    require(prod(shape) * width, f"{what}, {sizes} numbers of {width} bytes,", instead)


def rows_within(size: Callable[[int], int], most: int, what: str | None) -> int:
    """Return the largest power of two of rows, at most `most`, that takes no more bytes than allowed.

    Raises `MemoryLimitError` if not even one row of `what` fits; without a name it returns 1, to estimate.
    """
    rows = 1
    if what is not None:
        require(size(rows), f"one row of {what}", "take fewer sequences or a shorter one")
    while 2 * rows <= most and size(2 * rows) <= allowed():
        rows *= 2
    return rows


def in_words(size: int) -> str:
    """Return a number of bytes as people read it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
