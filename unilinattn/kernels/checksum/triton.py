"""The checksum on a GPU: each word is read once, and its factor computed in registers; see README.md."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int64
from torch import Tensor

from unilinattn.kernels.checksum import naive
from unilinattn.kernels.checksum.tiled import chained
from unilinattn.kernels.launch import on

FIRST = tl.constexpr(naive.FIRST - naive.MODULUS)
SECOND = tl.constexpr(naive.SECOND)


def checksum(words: Int64[Tensor, " word"]) -> Int64[Tensor, ""]:
    """Return `naive.checksum`, on the device of the words and without waiting for it."""
    sums = torch.empty(-(-len(words) // naive.CHUNK), dtype=torch.int64, device=words.device)
    with on(words):
        chunk_sums[(len(sums),)](words, sums, len(words), CHUNK=naive.CHUNK, BLOCK=1024)
    return chained(sums)


@triton.jit
@no_type_check
def chunk_sums(words, sums, count, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of one chunk's words, mixed and times their factors; products wrap modulo 2^64."""
    chunk = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, CHUNK, BLOCK):
        k = start + tl.arange(0, BLOCK).to(tl.int64)
        word = tl.load(words + chunk * CHUNK + k, mask=chunk * CHUNK + k < count, other=0)
        number = (k + 1) * FIRST
        factor = ((number ^ (number >> 31)) * SECOND) | 1
        total += (word ^ (word >> 32)) * factor
    tl.store(sums + chunk, tl.sum(total, 0))
