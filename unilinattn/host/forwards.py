"""Replace the forwards of a model's modules for one run, or for a block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from unilinattn.call.entries import Entries
from unilinattn.host.isolation import LOCK, current_run, owned, release

Forward = Callable[..., Any]

Replace = Callable[[str, nn.Module, Forward], Forward | None]
"""Returns the replacement of a module's forward from its path, the module and the forward; None keeps it."""


@contextmanager
def replaced_forwards(model: nn.Module, replace: Replace) -> Iterator[None]:
    """Replace forwards of a model's modules, and restore them at the end, also after an exception.

    Inside an isolated run the replacements apply to that run only; other calls use the host's own forwards. Outside of
    one they apply to all threads, and runs in other threads wait for the end.
    """
    run, waits = current_run(), not owned()
    before = Entries(())

    def restore() -> None:
        # After an interrupt the garbage collector may call this, long after the run has ended.
        if current_run() is run:
            before.put_back()
        if waits:
            release()

    try:
        try:
            if waits:
                LOCK.acquire()
            made = [(module, replace(path, module, module.forward)) for path, module in model.named_modules()]
            replaced = [(module, forward) for module, forward in made if forward is not None]
            before = Entries((vars(module), "forward") for module, _ in replaced)
            for module, forward in replaced:
                module.forward = _within(run, forward, module.forward)
            yield
        finally:
            restore()
    finally:
        # An interrupt may have ended the first attempt early.
        restore()


def _within(run: object, replacement: Forward, host: Forward) -> Forward:
    """Return a forward that calls `replacement` in `run`, or everywhere if it is None, and `host` for other calls."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (replacement if run is None or current_run() is run else host)(*args, **kwargs)

    return forward
