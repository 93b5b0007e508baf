"""Random halves of the tokens of a stream, which a search for mixers perturbs one after the other."""

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

COPIES = 4
"""Fewest distinct tokens among which equal ones count as copies, as a share of all: one over this."""


def half_of(
    shape: tuple[int, int], windows: Float[Tensor, "batch token channel"] | None = None
) -> Bool[Tensor, "batch token"]:
    """Return a random half of the tokens of all sequences, so that mixing over the batch is seen too.

    Equal vectors of `windows` are copies of one token, such as a class token in each window, and lie in one half: what
    a model computes of all copies is no mixing of tokens.
    """
    count = shape[0] * shape[1]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0), device="cpu")
    half = order < count // 2
    if windows is not None:
        distinct, groups = torch.unique(windows.flatten(0, 1).cpu(), dim=0, return_inverse=True)
        if len(distinct) * COPIES >= count:
            first = torch.full((len(distinct),), count, device="cpu")
            first.scatter_reduce_(0, groups, torch.arange(count, device="cpu"), "amin")
            half = half[first[groups]]
    return half.reshape(shape)


def windows_of(
    entered: Iterable[Tensor | None], batch: int | None
) -> dict[tuple[int, int], Float[Tensor, "window token channel"]]:
    """Return the first tensor of each (number of windows, tokens) among those that layers read.

    Rows of (row, token, channel) are windows where there are more of them than sequences.
    """
    vectors: dict[tuple[int, int], Tensor] = {}
    for x in entered:
        if x is not None and x.ndim == 3 and batch and x.shape[0] > batch:
            vectors.setdefault((x.shape[0], x.shape[1]), x)
    return vectors
