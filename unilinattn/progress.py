"""Progress bars of long work: on a terminal or in a notebook, after a delay, and removed when the work ends."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

DELAY = 2.0
"""Seconds of work before a bar appears."""


class _Scope(threading.local):
    """The settings of `bars` in this thread, and the progress bars opened inside the innermost one."""

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
    """Let `progress` and `counter` show bars in this context, unless `shown` is False here or in an enclosing `bars`.

    Outside of any `bars` nothing is shown. The bars opened in this context are closed at its end, also after an error.
    """
    before = _scope.shown, _scope.inside, _scope.open
    _scope.shown = shown and (_scope.shown or not _scope.inside)
    _scope.inside, _scope.open = True, []
    try:
        yield
    finally:
        # After an exception the loop, and with it its bar, lives as long as the traceback.
        for bar in reversed(_scope.open):
            bar.close()
        _scope.shown, _scope.inside, _scope.open = before


def scope() -> dict[str, Any]:
    """Return the dictionary of this thread's `bars` settings, which a run restores after an interrupt."""
    return vars(_scope)


def progress(items: Iterable[Item], what: str, *, total: int | None = None) -> Iterator[Item]:
    """Yield the `items` of a loop, with a bar named `what` after `DELAY` seconds.

    `total` is the number of items, by default their length if they have one. The bar is shown only inside `bars`, and
    only on a terminal or in a notebook.
    """
    count = len(items) if total is None and isinstance(items, Sized) else total
    with counter(what, count) as step:
        for item in items:
            yield item
            step()


@contextmanager
def counter(what: str, total: int | None = None) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each of `total` steps, for work that is not a loop, with the bar of `progress`."""
    hidden = not (_scope.shown and watched())
    bar = _Bar(desc=what, total=total, delay=DELAY, leave=False, miniters=1, file=sys.stderr, disable=hidden)
    _scope.open.append(bar)
    try:
        yield bar.update
    finally:
        bar.close()


def watched() -> bool:
    """Tell whether standard error is a terminal or belongs to a notebook, whose stream is not a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        return True
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
