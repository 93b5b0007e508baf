"""Random halves of the tokens of a stream, which a search for mixers perturbs one after the other."""

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float, Int
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


def order_of(first: Float[Tensor, "batch token channel"], after: Float[Tensor, "*axes"]) -> Int[Tensor, " row"] | None:
    """Return the row of `first` that each row of `after` has, of all sequences; None unless another order is all.

    Equal rows keep their order. The rows a b c sorted as b c a give 1 2 0.
    """
    if first.shape != after.shape or torch.equal(first, after):
        return None
    if not torch.equal(*(x[..., 0].flatten().sort().values for x in (first, after))):
        return None
    rows = torch.cat([first.flatten(0, 1), after.flatten(0, 1)]).cpu()
    groups = torch.unique(rows, dim=0, return_inverse=True)[1].unflatten(0, (2, -1))
    groups, places = groups.sort(stable=True)
    if not torch.equal(*groups):
        return None
    order = torch.empty_like(places[0])
    order[places[1]] = places[0]
    return order
