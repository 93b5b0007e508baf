"""`recorded_margins`: the distance of every comparison of the kit from its limit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Margin:
    """One comparison: its law, its description, the error, and the largest error that passes."""

    law: str
    what: str
    error: float
    limit: float


_open: list[list[Margin]] = []


@contextmanager
def recorded_margins() -> Iterator[list[Margin]]:
    """Collect every comparison of the kit inside the block, in order, passed or failed."""
    margins: list[Margin] = []
    _open.append(margins)
    try:
        yield margins
    finally:
        _open.pop()


def note_margin(law: str, what: str, error: float, limit: float) -> None:
    """Add a comparison to every open record."""
    for margins in _open:
        margins.append(Margin(law, what, error, limit))
