"""Norms over the channels of a tile of vectors: sums of the whole tile, no copy of it put in order first."""

import torch
from jaxtyping import Float
from torch import Tensor


def norms(vectors: Float[Tensor, "batch out row col"], order: float) -> Float[Tensor, "batch row col"]:
    """Return (sum_d abs(v_d)^p)^(1/p) of each pair, the largest for infinity (LaTIM Eq. 5)."""
    if order == 1:
        return vectors.abs().sum(1)
    if order == 2:
        return vectors.square().sum(1).sqrt()
    if order == float("inf"):
        return vectors.abs().amax(1)
    return torch.linalg.vector_norm(vectors, ord=order, dim=1)
