"""Factors shared by groups of consecutive heads or channels."""

import torch
from jaxtyping import Inexact
from torch import Tensor


def of_heads(factor: Inexact[Tensor, "batch token group state"], heads: slice, total: int) -> Tensor:
    """Return a factor for some of `total` heads; each group serves consecutive heads, a single group broadcasts."""
    groups = factor.shape[2]
    if groups == 1:
        return factor
    if groups == total:
        return factor[:, :, heads]
    return factor[:, :, torch.arange(total, device=factor.device)[heads] // (total // groups)]


def repeat_groups(per_group: Tensor, count: int, dim: int = -1) -> Tensor:
    """Repeat the factor of each group for its `count // groups` consecutive heads or channels, along `dim`."""
    groups = per_group.shape[dim]
    return per_group if groups == count else per_group.repeat_interleave(count // groups, dim=dim)
