"""Growth of the resident memory of a process; imports torch only, so that other tools' environments can run it."""

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def growth(call: Callable[[], Any]) -> int | None:
    """Return the growth of this process during a call, excluding its result; None where Linux's /proc is missing."""
    gc.collect()
    with suppress(OSError, AttributeError):
        # Free memory that glibc holds would hide the growth.
        ctypes.CDLL(None).malloc_trim(0)
    if not _forget_peak():
        return None
    started = _resident("VmRSS")
    result = call()
    return max(0, _resident("VmHWM") - started - size(result))


def size(result: Any) -> int:
    """Return the bytes of the tensors in a result."""
    storages = [t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _forget_peak() -> bool:
    """Reset the kernel's record of this process's peak; return whether that is possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
