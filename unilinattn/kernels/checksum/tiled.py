"""The checksum in numpy on a CPU, which computes it in one buffer, and in torch elsewhere; see README.md."""

from functools import cache

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.checksum.naive import CHUNK, FIRST, MODULUS, PRIME, SECOND

PIECE = 1 << 23
"""Words multiplied at once by torch."""


def checksum(words: Int64[Tensor, " word"]) -> Int64[Tensor, ""]:
    """Return `naive.checksum`, on the device of the words and without waiting for it."""
    return torch.tensor(_on_cpu(words.numpy()), device="cpu") if words.device.type == "cpu" else in_pieces(words)


def in_pieces(words: Int64[Tensor, " word"]) -> Int64[Tensor, ""]:
    """Return `naive.checksum` by torch, many chunks at a time."""
    factors = _factors(words.device)
    sums = []
    for piece in words.split(PIECE):
        chunks = functional.pad(piece, (0, -len(piece) % CHUNK)).view(-1, CHUNK)
        # A dot product of integers, which makes no tensor of the products, exists on a CPU only.
        sums.append((chunks >> 32).bitwise_xor_(chunks).mul_(factors).sum(1))
    return chained(torch.cat(sums))


def chained(sums: Int64[Tensor, " chunk"]) -> Int64[Tensor, ""]:
    """Return the checksum from the sums of the chunks."""
    powers = torch.full_like(sums, PRIME)
    powers[:1] = 1
    return (sums.flip(0) * powers.cumprod(0)).sum()


def _on_cpu(words: NDArray[np.int64]) -> int:
    total, every = 0, _factors_on_cpu()
    buffer = np.empty(min(len(words), CHUNK), dtype=np.int64)
    for start in range(0, len(words), CHUNK):
        chunk = words[start : start + CHUNK]
        mixed = buffer[: len(chunk)]
        np.right_shift(chunk, 32, out=mixed)
        np.bitwise_xor(mixed, chunk, out=mixed)
        total = (total * PRIME + int(np.dot(mixed, every[: len(chunk)]))) % MODULUS
    return total - MODULUS if total >= MODULUS // 2 else total


@cache
def _factors(device: torch.device) -> Int64[Tensor, " word"]:
    numbers = torch.arange(1, CHUNK + 1, device=device) * (FIRST - MODULUS)
    return (numbers ^ (numbers >> 31)) * SECOND | 1


@cache
def _factors_on_cpu() -> NDArray[np.int64]:
    factors: NDArray[np.int64] = _factors(torch.device("cpu")).numpy()
    return factors
