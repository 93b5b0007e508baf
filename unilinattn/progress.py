"""Progress bars on long work: only where someone looks on, only after a while, and gone when the work is done."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

DELAY = 2.0
"""Seconds of work before a bar appears."""


class _Scope(threading.local):
    """What `bars` allows in this thread, and the bars that were opened inside it."""

    shown = False
    inside = False

    def __init__(self) -> None:
        self.open: list[_Bar] = []


class _Bar(tqdm):
    # The monitor is a thread that would outlive the work.
    monitor_interval = 0


_scope = _Scope()


@contextmanager
def bars(shown: bool = True) -> Iterator[None]:
    """Let `progress` and `counter` show bars inside, unless `shown` or another `bars` around this one says no.

    Outside of it there are none. Every bar that was opened inside is gone afterwards, whatever happens.
    """
    before = _scope.shown, _scope.inside, _scope.open
    _scope.shown = shown and (_scope.shown or not _scope.inside)
    _scope.inside, _scope.open = True, []
    try:
        yield
    finally:
        # A loop that an exception left holds its bar for as long as the traceback lives.
        for bar in reversed(_scope.open):
            bar.close()
        _scope.shown, _scope.inside, _scope.open = before


def progress(items: Iterable[Item], what: str, *, total: int | None = None) -> Iterator[Item]:
    """Yield the items of a loop, with a bar named `what` once it has taken `DELAY` seconds; `total` items if known.

    The bar shows inside `bars` alone, and only on a terminal or in a notebook.
    """
    known = len(items) if total is None and isinstance(items, Sized) else total
    with counter(what, known) as step:
        for item in items:
            yield item
            step()


@contextmanager
def counter(what: str, total: int | None = None) -> Iterator[Callable[[], object]]:
    """Give a function to call after each of `total` steps, for work that is no loop; the bar is that of `progress`."""
    hidden = not (_scope.shown and _watched())
    bar = _Bar(desc=what, total=total, delay=DELAY, leave=False, miniters=1, file=sys.stderr, disable=hidden)
    _scope.open.append(bar)
    try:
        yield bar.update
    finally:
        bar.close()


def _watched() -> bool:
    """Tell whether standard error is a terminal, or belongs to a notebook, whose stream is none."""
    if sys.stderr is not None and sys.stderr.isatty():
        return True
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
