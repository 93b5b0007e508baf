"""How much memory an operation may take beside its inputs and its result, and the error when that is too little."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from unilinattn.errors import MemoryLimitError, OptionError

DEFAULT = 1 << 30
"""Bytes that an operation may take where nobody says otherwise: 1 GiB."""

_limit: ContextVar[int] = ContextVar("max_memory", default=DEFAULT)


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
    """Return the bytes that an operation may take now."""
    return _limit.get()


def require(size: int, what: str, instead: str) -> None:
    """Raise `MemoryLimitError` if so many bytes are more than is allowed, before they are allocated."""
    if size > allowed():
        raise MemoryLimitError(
            f"{what} takes {in_words(size)}, and max_memory allows {in_words(allowed())}; {instead}, or allow more "
            f"with max_memory={size}."
        )


def rows_within(size: Callable[[int], int], most: int, what: str) -> int:
    """Return the largest power of two of rows, at most `most`, that takes no more bytes than allowed.

    Raises `MemoryLimitError` if not even one row fits.
    """
    rows = 1
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
