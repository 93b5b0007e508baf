"""Segments of the linear-time passes on a GPU: their length, and the states between them."""

from collections.abc import Iterator
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.launch import on, power
from unilinattn.kernels.scan.triton_diagonal import carry

CHUNK = 32
"""Tokens, and largest number of columns, of a scalar memory's products; larger ones with 128 states spill registers."""

LEAST = 64
"""Tokens of the shortest segment, so that there are far fewer states between segments than tokens."""

PROGRAMS = 8
"""Programs per multiprocessor, from which the number of segments follows."""


def carry_over(states: Float[Tensor, "batch segment head channel state"], total: Tensor) -> None:
    """Replace each segment's final state by its initial state, in place."""
    batch, segments, heads, columns, width = states.shape
    size = heads * columns * width
    block = min(256, power(size))
    with on(states):
        carry[(-(-size // block), batch)](states, total, segments, size, columns, width, total.shape[3], SIZE=block)


def segment_length(length: int, programs: int, like: Tensor, unit: int) -> int:
    """Return the tokens per segment, a multiple of `unit`: the largest that still fills the device."""
    wanted = max(1, PROGRAMS * _processors(like.device) // programs)
    return -(-max(LEAST, -(-length // wanted)) // unit) * unit


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1 << 20


def block_columns(columns: int) -> int:
    """Return the columns of a block of a scalar memory's products."""
    return min(power(columns, 16), CHUNK)


def same_groups(query: Tensor, key: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return queries and keys with equally many groups: unchanged, or one per head."""
    if query.shape[2] == key.shape[2]:
        return query, key
    return repeat_groups(query, heads, 2), repeat_groups(key, heads, 2)


def cast_like(gradients: tuple[Tensor | None, ...], like: list[Tensor | None]) -> Iterator[Tensor | None]:
    """Yield each gradient in the dtype of its factor, None where either is missing."""
    for gradient, factor in zip(gradients, like, strict=True):
        yield None if gradient is None or factor is None else gradient.to(factor.dtype)
