"""l2 norms of W v without the vectors: ||W v||^2 = v^T (W^T W) v, for fewer channels than outputs."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def serves(vectors: Tensor, weight: Tensor | None) -> bool:
    """Return whether Gram matrices are the shorter way, their products twice as long as the numbers that come in.

    The square loses half the digits where parts of a vector cancel; those of float64 are more than float32 has.
    """
    return weight is not None and vectors.dtype != torch.float64 and 2 * weight.shape[2] <= weight.shape[1]


def norms(
    vectors: Float[Tensor, "group channel row col"], weight: Float[Tensor, "#group out channel"]
) -> Float[Tensor, "group row col"]:
    """Return ||W v||_2 of each pair: channels^2 multiplications, in float64, instead of channels x outputs."""
    w, v = weight.double(), vectors.double().flatten(2)
    squared = ((w.mT @ w) @ v).mul_(v).sum(1)
    return squared.clamp_min_(0).sqrt_().unflatten(1, vectors.shape[2:]).to(vectors.dtype)


def held_numbers(shape: Sequence[int], outs: int) -> int:
    """Return how many numbers of the vectors' own size `norms` holds, 0 where it does not serve."""
    groups, channels, rows, cols = shape
    return 2 * groups * channels * (2 * rows * cols + channels + outs) if 2 * channels <= outs else 0
