"""Detect changes of a module's parameters and buffers since a run, by checksums of their bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor, nn

from unilinattn.errors import ModelStateError

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Words multiplied at once; on a CPU they and their factors fit its second cache."""

PRIME = 0x100000001B3
"""The factor of the words before a chunk."""

Checksum = tuple[torch.Size, torch.dtype, int | None]
"""Shape, dtype and checksum of a tensor; None in place of the checksum of a tensor whose bytes cannot be read."""


class Checksums:
    """Checksums of tensors that the `Weights` of a model and of its layers share.

    Attributes:
        by_id: the checksum of each tensor by its id.
        is_compared: whether nothing compares the weights now (see `Weights.compared`).
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.by_id: dict[int, Checksum] = {}
        self.is_compared = False


class Weights:
    """Checksums of every parameter and buffer of a module.

    Writes through `.data` do not change a tensor's version counter, so the bytes themselves are compared. Cost: one
    pass over the bytes of the weights at construction and one for each comparison.
    """

    def __init__(self, module: nn.Module, checksums: Checksums | None = None) -> None:
        """Compute the checksums that are not in `checksums`, and add them to it."""
        self._shared = Checksums() if checksums is None else checksums
        self._before = _checksums(module, self._shared.by_id)

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Let nothing compare the module or its layers inside the block: one call compares once, just before."""
        before, self._shared.is_compared = self._shared.is_compared, True
        try:
            yield
        finally:
            self._shared.is_compared = before

    def require_same(self, module: nn.Module, name: str, otherwise: str) -> None:
        """Compare a module with the one that the checksums were computed from.

        Raises:
            ModelStateError: if a parameter or buffer changed, was added or was removed; the message ends in
                `otherwise`.
        """
        if self._shared.is_compared:
            return
        now = _checksums(module, {})
        changed = [key for key in {**self._before, **now} if self._before.get(key) != now.get(key)]
        if changed:
            raise ModelStateError(
                f"the weights of {name} changed since the trace ({changed[0]}), so {otherwise}; trace the model again."
            )


def _checksums(module: nn.Module, by_id: dict[int, Checksum]) -> dict[str, Checksum]:
    """Return the checksum of each parameter and buffer by its name; a shared tensor is read once."""
    checksums = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in by_id:
                by_id[id(tensor)] = tensor.shape, tensor.dtype, _checksum(tensor.detach())
            checksums[f"{path}.{name}" if path else name] = by_id[id(tensor)]
    return checksums


def _checksum(tensor: Tensor) -> int | None:
    """Return sum_k w_k mixed(word_k) modulo 2^64 over a tensor's bytes, w scattered odd numbers: their order counts.

    A word's high half is mixed into its low half: twice a float64 differs in bits above the 51st only, whose sums
    modulo 2^64 are equal for many tensors.
    """
    if tensor.device.type == "meta" or type(tensor) not in (Tensor, nn.Parameter):
        # Offloaded weights are loaded for each call only, and torch cannot read other packages' packed formats.
        return None
    if not tensor.numel():
        return 0
    words = _words(tensor)
    if words.device.type == "cpu":
        return _sum_on_cpu(words.numpy())
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    factors = _factors(min(len(words), CHUNK.get(words.device.type, CHUNK["cpu"])), words.device)
    for chunk in words.split(len(factors)):
        mixed = (chunk >> 32).bitwise_xor_(chunk)
        # A dot product of integers, which makes no tensor of the products, exists on a CPU only.
        total = total * PRIME + (mixed * factors[: len(chunk)]).sum()
    return int(total)


def _sum_on_cpu(words: NDArray[np.int64]) -> int:
    """Return the sum of `_checksum`: numpy computes it in one buffer, in two thirds of the time of torch."""
    total, every = 0, _factors_on_cpu()
    buffer = np.empty(min(len(words), len(every)), dtype=np.int64)
    for start in range(0, len(words), len(every)):
        chunk = words[start : start + len(every)]
        mixed = buffer[: len(chunk)]
        np.right_shift(chunk, 32, out=mixed)
        np.bitwise_xor(mixed, chunk, out=mixed)
        total = (total * PRIME + int(np.dot(mixed, every[: len(chunk)]))) % (1 << 64)
    return total


def _factors(count: int, device: torch.device) -> Int64[Tensor, " word"]:
    """Return the odd factors of a chunk's words, scattered by two multiplications (as in SplitMix64)."""
    numbers = torch.arange(1, count + 1, device=device) * (0x9E3779B97F4A7C15 - (1 << 64))
    return (numbers ^ (numbers >> 31)) * 0x2545F4914F6CDD1D | 1


@cache
def _factors_on_cpu() -> NDArray[np.int64]:
    factors: NDArray[np.int64] = _factors(CHUNK["cpu"], torch.device("cpu")).numpy()
    return factors


def _words(tensor: Tensor) -> Int64[Tensor, " word"]:
    """Return a tensor's bytes as 64-bit integers, the last one padded with zeros."""
    # A tensor of one element may have any stride and count as contiguous; a part of a buffer may begin inside a word.
    is_copied = tensor.numel() == 1 or tensor.storage_offset() * tensor.element_size() % 8
    raw = tensor.reshape(-1).clone(memory_format=torch.contiguous_format) if is_copied else tensor
    raw = raw.contiguous().reshape(-1).view(torch.uint8)
    rest = -len(raw) % 8
    return (torch.nn.functional.pad(raw, (0, rest)) if rest else raw).view(torch.int64)
