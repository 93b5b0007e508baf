"""How much memory a call takes at its peak, beside what it was given and what it returns."""

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unilinattn.testing.peak import Peak


def peak(call: Callable[[], Any], device: str) -> int:
    """Return the bytes that a call took at its peak beside inputs and result.

    Tensors that lived at the same time; on a GPU, what its allocator gave out.
    """
    gc.collect()
    if device == "cuda":
        # What a first call sets up for good, such as workspaces, is not this call's.
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - _size(result)
    with Peak() as counted:
        result = call()
    return counted.peak - _size(result)


def growth(call: Callable[[], Any]) -> int | None:
    """Return by how much this process grows while a call runs, beside its result; None where no system tells."""
    gc.collect()
    with suppress(OSError, AttributeError):
        # What glibc holds free from before would hide the growth.
        ctypes.CDLL(None).malloc_trim(0)
    if not _forget_peak():
        return None
    started = _resident("VmRSS")
    result = call()
    return max(0, _resident("VmHWM") - started - _size(result))


def _size(result: Any) -> int:
    storages = [t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _forget_peak() -> bool:
    """Let the system measure the peak of this process from now on; return whether it does."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
