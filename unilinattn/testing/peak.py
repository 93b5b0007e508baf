"""Peak memory and multiplications of an operation on the CPU, for which torch keeps no statistics."""

import weakref
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from unilinattn.call.nested import tensors

IN_PLACE = {torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
"""Products that work in place, mapped to the allocating variant that torch's counter knows."""

ELEMENTWISE = ("mul", "mul_", "addcmul", "addcmul_")
"""Elementwise operations that cost one multiplication per element of their result."""


class Peak(TorchDispatchMode):
    """Counts the bytes of live tensors created inside the block, the multiplications and the calls.

    A storage counts from the operation that creates it until its last reference is gone. Workspace inside an operation
    of torch is not counted.

    Attributes:
        live, peak: bytes now, and their maximum.
        made: bytes of all created tensors, freed ones included.
        calls: operations of torch, views included.
        multiplications: those of matrix products (half the count of `torch.utils.flop_counter`), of triangular solves,
            of elementwise products, and of Fourier transforms (log2 of the length per element).
        through_frequencies: whether a Fourier transform ran, by which every input affects every output through
            rounding.
    """

    def __init__(self) -> None:
        """Start with all counts at zero."""
        super().__init__()
        self.live = self.peak = self.made = self.calls = self.multiplications = 0
        self.through_frequencies = False
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        """Run the operation and count its new tensors and multiplications."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls += 1
        old = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        for tensor in tensors(result):
            if tensor.untyped_storage()._cdata not in old:
                self._note(tensor.untyped_storage())
        packet = IN_PLACE.get(func._overloadpacket, func._overloadpacket)
        if packet in flop_registry:
            self.multiplications += flop_registry[packet](*args, **kwargs, out_val=result) // 2
        elif packet is torch.ops.aten.linalg_solve_triangular:
            self.multiplications += prod(result.shape) * args[0].shape[-1] // 2
        elif packet.__name__ in ELEMENTWISE:
            self.multiplications += prod(result.shape)
        elif packet.__name__.startswith("_fft"):
            self.through_frequencies = True
            self.multiplications += prod(result.shape) * result.shape[args[1][-1]].bit_length()
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages or not size or storage.device.type == "meta":
            return
        self._storages[key] = weakref.ref(storage, partial(self._gone, key, size))
        self.live += size
        self.made += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int, _: object) -> None:
        if self._storages.pop(key, None) is not None:
            self.live -= size


def peak_of(run: Callable[[], Any]) -> Peak:
    """Run a function without gradients and return its counts; its result is included."""
    with torch.no_grad(), Peak() as counted:
        run()
    return counted
