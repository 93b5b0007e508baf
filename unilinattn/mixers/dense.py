"""Dense: the matrix itself, such as softmax attention weights."""

from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.kernels.subnormal import flushed, flushed_, flushed_given
from unilinattn.mixers.base import ALL, CoreMixer, checked_factors


class Dense(CoreMixer):
    """Attention weights after the softmax, under any mask, window, sink or soft cap (HMA ACL Eq. 1).

    Every operation takes O(L_query L_key) time per channel.

    Args:
        weights: (batch, head, query, key); subnormal numbers are set to zero, in a copy.
    """

    structure = "dense"
    causal = False
    data_controlled = True

    def __init__(self, weights: Float[Tensor, "batch head query key"]) -> None:
        """Raise `FactorError` if `weights` has NaN or infinite entries."""
        (weights,) = checked_factors(weights=weights)
        self.weights: Tensor = flushed_given(weights)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        batch, heads, queries, keys = self.weights.shape
        return batch, heads, queries, keys

    @cached_property
    def is_lower_triangular(self) -> bool:
        """Whether all weights above the diagonal are zero."""
        return not bool(self.weights.triu(1).any())

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Multiply by the weights."""
        return torch.einsum("bhij,bjhp->bihp", self.weights, flushed(value))

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Multiply by the transposed weights."""
        # A product with the transposed matrix on the left takes longer than one with the matrix on the right.
        return (flushed(grad).permute(0, 2, 3, 1) @ self.weights).permute(0, 3, 1, 2)

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Gather rows of the weights."""
        _, heads, _, keys = self.shape
        return self.weights.gather(2, index[:, None, :, None].expand(-1, heads, -1, keys))

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Return a view of a block of the weights."""
        return self.weights[:, heads, rows, cols]

    def mean_map(self) -> Float[Tensor, "batch query key"]:
        """Read the weights once."""
        # The kernel of `sum` is faster than that of `mean`.
        return flushed_(self.weights.sum(1).div_(self.heads))

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return the weight of each token on itself."""
        return self.weights.diagonal(dim1=-2, dim2=-1)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""
        return self.weights.new_zeros(shape)
