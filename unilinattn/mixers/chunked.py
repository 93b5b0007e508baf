"""Chunked: what every causal memory shares whose chunks are four small matrices a head."""

from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.scan.chunks import Chunk, backward, fill, forward
from unilinattn.kernels.scan.tiled import CHUNK
from unilinattn.mixers.base import ALL, CoreMixer


class Chunked(CoreMixer):
    """A causal memory, linear in its values, given by its chunks of tokens.

    A subclass gives `chunk`, `diagonal` and its shape. `apply`, `adjoint` and `rows` then take time linear in
    length, and `tile` time linear in its columns' distance to its rows; each holds one chunk's matrices at a time.
    """

    causal = True
    data_controlled = True

    @abstractmethod
    def chunk(self, tokens: slice, heads: slice = ALL) -> Chunk:
        """Return the matrices of some heads for one of the chunks that `CHUNK` cuts the sequence into."""

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Run the memory forward in time, chunk by chunk."""
        return forward((self.chunk(tokens) for tokens in self._chunks()), value)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the memory backward in time, chunk by chunk."""
        return backward((self.chunk(tokens) for tokens in reversed(self._chunks())), grad)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Fill a block column by column, each carried as a state from its own chunk to the last row's."""
        batch, total, length, _ = self.shape
        row, col = range(length)[rows], range(length)[cols]
        if not row or not col or col[0] > row[-1]:
            return self._like((batch, len(range(total)[heads]), len(row), len(col)))
        touched = [tokens for tokens in self._chunks() if tokens.stop > col[0] and tokens.start <= row[-1]]
        device = self._like(()).device
        return fill(
            (self.chunk(tokens, heads) for tokens in touched),
            touched[0].start,
            torch.tensor(row, device=device),
            torch.tensor(col, device=device),
        )

    def _chunks(self) -> list[slice]:
        length = self.shape[2]
        return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
