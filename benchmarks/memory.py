"""How much memory a call takes at its peak, beside what it was given and what it returns."""

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Adds up the bytes of tensors that are made while it is entered and live at the same time.

    A tensor counts from the operation that returns it until its storage is freed. What an operation takes inside
    itself, such as the workspace of a Fourier transform, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        """Run the operation and count the storages that were not among its arguments."""
        result = func(*args, **(kwargs or {}))
        known = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            at = storage._cdata
            if at not in known and at not in self.live:
                self.live[at] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, at).atexit = False
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, at: int) -> None:
        self.now -= self.live.pop(at)


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
    with PeakBytes() as counted:
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


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    return (t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor))


def _size(result: Any) -> int:
    return sum({storage._cdata: storage.nbytes() for storage in _storages(result)}.values())


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
