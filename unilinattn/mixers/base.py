"""What every token-mixing structure offers, whatever its algebra."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

from unilinattn.errors import FactorError
from unilinattn.kernels.reduced_map.dense import Taps, reduced, weighted
from unilinattn.kernels.row_product.naive import Sign, apply_sign
from unilinattn.kernels.subnormal import flushed_

ALL = slice(None)

Block = Callable[[slice], Tensor]
"""From columns to those of some rows of the matrix: (batch, head, row, col)."""


class CoreMixer(ABC):
    """An (L_query x L_key) matrix for each head, held by its factors and never as the matrix.

    A subclass gives `apply`, `adjoint`, `tile`, `diagonal` and its shape; rows and the whole matrix follow.
    Values carry `channel` columns a head: a head's matrix acts on each of them alike.
    """

    structure: ClassVar[str]
    """The algebraic structure's name, as the coverage table prints it."""
    causal: ClassVar[bool]
    """Whether the matrix is lower triangular for every input."""
    data_controlled: ClassVar[bool]
    """Whether the matrix depends on the input at all (HMA ACL Theorem 1)."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""

    @abstractmethod
    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Mix values along the key axis: y_i = sum_j alpha_ij v_j for each head."""

    @abstractmethod
    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Apply each head's transposed matrix: z_j = sum_i alpha_ij g_i."""

    @abstractmethod
    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Materialize the block of the matrix that three slices name."""

    @abstractmethod
    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return alpha_ii in linear time."""

    @property
    def heads(self) -> int:
        """Number of heads, each with its own matrix."""
        return self.shape[1]

    @property
    def is_lower_triangular(self) -> bool:
        """Whether this matrix is lower triangular: always where the structure is causal."""
        return self.causal

    @property
    def is_complex(self) -> bool:
        """Whether it mixes complex values."""
        return self._like(()).is_complex()

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Return selected rows (each sequence its own) by one adjoint pass over one-hot vectors: linear time."""
        batch, heads, queries, _ = self.shape
        probe = self._like((batch, queries, 1, index.shape[1]))
        probe.scatter_(1, index[:, None, None, :], 1.0)
        columns = self.adjoint(probe.expand(-1, -1, heads, -1))
        return columns.permute(0, 2, 3, 1)

    def materialize(self) -> Inexact[Tensor, "batch head query key"]:
        """Return the whole matrix of every head; memory grows with batch x heads x queries x keys."""
        return self.tile()

    def blocks(self, rows: int) -> Iterator[tuple[slice, Block]]:
        """Yield the matrix from its first row to its last, at most so many at a time, as functions of their columns."""
        queries = self.shape[2]
        for start in range(0, queries, rows):
            part = slice(start, min(start + rows, queries))
            yield part, partial(self.tile, part)

    def weighted_blocks(self, rows: int, left: Tensor | None, taps: Taps) -> Iterator[tuple[slice, Block]]:
        """Yield left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c] as `blocks`: (batch, channel, row, col).

        left: (batch|1, length|1, channel); taps: lag to the same.
        """
        for part, block in self.blocks(rows):
            yield part, partial(self._weighted, part, block, left, taps)

    def _weighted(self, part: slice, block: Block, left: Tensor | None, taps: Taps, cols: slice) -> Tensor:
        landed = slice(cols.start, min(cols.stop + max(taps), self.shape[3]))
        return weighted(block(landed), part, landed, cols.stop - cols.start, left, taps)

    def reduced_rows(
        self, rows: int, left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Float[Tensor, "batch row key"]]:
        """Yield sum_c left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c], exactly so many rows i at a time.

        Without left and taps it is the sum over heads. Time grows with heads x queries x keys.
        """
        for part, block in self.blocks(rows):
            yield reduced(block(ALL), part, left, taps)

    def row_product(
        self,
        row: Float[Tensor, "batch query"],
        weight: Float[Tensor, "batch query"],
        sign: Sign,
        rows: int,
        left: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Float[Tensor, "batch key"]:
        """Return sum_i row_i sign(weight_i m_ij) for the map m of `reduced_rows`, which is never held."""
        total = row.new_zeros(row.shape[0], self.shape[3])
        start = 0
        for block in self.reduced_rows(rows, left, taps):
            part = slice(start, start + block.shape[1])
            scaled = flushed_(apply_sign(sign, block * weight[:, part, None]))
            total = total + torch.einsum("bi,bij->bj", row[:, part], scaled)
            start = part.stop
        return total

    @abstractmethod
    def _like(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros of a shape in the factors' dtype and on their device."""


def check_factors(**factors: Tensor | None) -> None:
    """Refuse factors with NaN or infinity, by name; a log-decay may be -inf nowhere either: it would hide a reset.

    Factors on several devices are refused too.
    """
    places = {name: str(factor.device) for name, factor in factors.items() if factor is not None}
    if len(set(places.values())) > 1:
        named = ", ".join(f"{name!r} on {place}" for name, place in places.items())
        raise FactorError(f"factors lie on several devices: {named}; one is needed.")
    for name, factor in factors.items():
        # One sum is finite only if every number is; the other way round it may have overflowed.
        if factor is None or torch.isfinite(factor.sum()):
            continue
        if not torch.isfinite(factor).all():
            bad = int((~torch.isfinite(factor)).sum())
            raise FactorError(
                f"factor {name!r} of shape {tuple(factor.shape)} holds {bad} NaN or infinite numbers; "
                "finite numbers are needed. Check the model's weights and its inputs for NaN."
            )
