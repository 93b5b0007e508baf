"""Memory and operations of a call."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.resident import size
from unilinattn.testing.peak import Peak


@dataclass(frozen=True)
class Usage:
    """Memory and operations of one call.

    Attributes:
        result: what the call returned.
        peak: bytes at the peak, excluding inputs and result.
        kept: bytes that stay allocated after the call, excluding the result, such as caches of its inputs.
        calls: operations of torch, views included.
    """

    result: Any
    peak: int
    kept: int
    calls: int


def usage(call: Callable[[], Any], device: str) -> Usage:
    """Run a call, on a GPU three times, and count its memory and its operations.

    Memory is that of live tensors; on a GPU, the allocated bytes of torch's allocator.
    """
    if device == "cuda":
        # It compiles and tunes kernels and allocates workspaces that persist; neither is counted.
        call()
    gc.collect()
    with Peak() as counted:
        result = call()
    result_size = size(result)
    if device != "cuda":
        return Usage(result, counted.peak - result_size, counted.live - result_size, counted.calls)
    del result
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak, kept = (n - before - result_size for n in (torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()))
    return Usage(result, peak, kept, counted.calls)
