"""Peak memory of a call, excluding its inputs and its result."""

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
    """Sums the bytes of all live tensors that are created while it is active.

    A tensor counts from the operation that returns it until its storage is freed. Workspace inside an operation, such
    as that of a Fourier transform, is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        """Run the operation and count the storages that were not among its arguments."""
        result = func(*args, **(kwargs or {}))
        arguments = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            at = storage._cdata
            if at not in arguments and at not in self.live:
                self.live[at] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, at).atexit = False
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, at: int) -> None:
        self.now -= self.live.pop(at)


def peak(call: Callable[[], Any], device: str) -> int:
    """Return the peak memory of a call in bytes, excluding inputs and result.

    Counts live tensors; on a GPU, the allocated bytes of torch's allocator.
    """
    gc.collect()
    if device == "cuda":
        # The first call allocates workspaces that persist; they are not counted.
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
    """Return the growth of this process during a call, excluding its result; None where Linux's /proc is missing."""
    gc.collect()
    with suppress(OSError, AttributeError):
        # Free memory that glibc holds would hide the growth.
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
    """Reset the kernel's record of this process's peak; return whether that is possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
