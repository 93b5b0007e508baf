"""Gather: each query reads one token, as in shifts, padding, pooling windows, and tokens in another order."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.mixers.base import ALL, CoreMixer


class Gather(CoreMixer):
    """Row i is the unit vector of the token `index[i]`, or zero where the index is -1.

    Every operation takes O(L_query) time per channel; a tile takes the time of its entries.

    Args:
        index: the token that each query reads, (batch, query); -1 for none.
        keys: number of tokens.
        like: a tensor of the dtype and device of the matrix.
    """

    structure = "gather"
    causal = False
    data_controlled = False

    def __init__(self, index: Int[Tensor, "batch query"], keys: int, *, like: Tensor) -> None:
        """Keep the index."""
        self.index, self._keys, self._like = index, keys, like.new_empty(0)
        self._real = (index >= 0).to(like)[:, :, None, None] if bool((index < 0).any()) else None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, 1, queries, keys)."""
        batch, queries = self.index.shape
        return batch, 1, queries, self._keys

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Read each query's token."""
        places = self.index.clamp_min(0)[:, :, None, None].expand(-1, -1, *value.shape[2:])
        read = value.gather(1, places)
        return read if self._real is None else read * self._real

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Add each query's gradient to its token."""
        places = self.index.clamp_min(0)[:, :, None, None].expand(-1, -1, *grad.shape[2:])
        total = grad.new_zeros(grad.shape[0], self._keys, *grad.shape[2:])
        return total.scatter_add_(1, places, grad if self._real is None else grad * self._real)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Compare the index with the columns."""
        columns = torch.arange(self._keys, device=self.index.device)[cols]
        block = (self.index[:, rows, None] == columns).to(self._like)
        return block[:, None].expand(-1, len(range(1)[heads]), -1, -1)

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Compare the index with each query's position."""
        positions = torch.arange(self.index.shape[1], device=self.index.device)
        return (self.index == positions).to(self._like)[:, None]

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""
        return self._like.new_zeros(shape)
