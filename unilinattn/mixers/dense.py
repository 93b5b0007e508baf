"""Dense: every weight its own number, as a softmax leaves them."""

from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.kernels.subnormal import flushed, flushed_given
from unilinattn.mixers.base import ALL, CoreMixer, check_factors


class Dense(CoreMixer):
    """Attention weights as a softmax leaves them, under any mask, window, sink or cap (HMA ACL Eq. 1).

    Weights below the smallest normal number of their dtype are set to zero, in a copy.

    Every operation takes O(L_query L_key) time for each channel; the weights are held.

    Args:
        weights: (batch, head, query, key).
    """

    structure = "dense"
    causal = False
    data_controlled = True

    def __init__(self, weights: Float[Tensor, "batch head query key"]) -> None:
        """Hold the weights; raise `FactorError` if they hold NaN or infinity."""
        check_factors(weights=weights)
        self._weights = flushed_given(weights)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        batch, heads, queries, keys = self._weights.shape
        return batch, heads, queries, keys

    @cached_property
    def is_lower_triangular(self) -> bool:
        """Whether no weight stands above the diagonal, as under a causal mask."""
        return not bool(self._weights.triu(1).any())

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Multiply by the weights."""
        return torch.einsum("bhij,bjhp->bihp", self._weights, flushed(value))

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Multiply by the transposed weights."""
        return torch.einsum("bhij,bihp->bjhp", self._weights, flushed(grad))

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Gather the rows that are held."""
        _, heads, _, keys = self.shape
        return self._weights.gather(2, index[:, None, :, None].expand(-1, heads, -1, keys))

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Slice the weights that are held."""
        return self._weights[:, heads, rows, cols]

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return each token's weight on itself."""
        return self._weights.diagonal(dim1=-2, dim2=-1)

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._weights.new_zeros(shape)
