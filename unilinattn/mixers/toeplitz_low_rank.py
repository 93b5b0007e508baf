"""Toeplitz times low rank: alpha_ij = K[i - j] (q_i . k_j), a fixed convolution of outer products."""

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.groups import of_heads, repeat_groups
from unilinattn.kernels.reduced_map.dense import Taps
from unilinattn.mixers.base import ALL, CoreMixer, checked_factors
from unilinattn.mixers.toeplitz import Toeplitz


class ToeplitzLowRank(CoreMixer):
    """A convolution over outer products of keys and values, read by queries: multi-head H3 and Hyena.

    alpha_ij = K[i - j] (q_i . k_j) for j <= i. H3: Fu et al., ICLR 2023; multi-head Hyena: Massaroli et al.,
    NeurIPS 2023.

    `apply` and `adjoint` take one convolution per coordinate of the rank N: time O(N L taps) per channel for short
    kernels (see `Toeplitz`), else O(N L log L). `rows` takes O(L N) per row.

    Args:
        kernel: K, (head, tap); tap t weights the token t steps back.
        query, key: (batch, length, group, rank); heads are a multiple of groups, and consecutive heads share one.

    Attributes:
        convolution: the mixer of the kernel.
    """

    structure = "Toeplitz x low rank"
    causal = True
    data_controlled = True

    def __init__(
        self,
        kernel: Float[Tensor, "head tap"],
        query: Float[Tensor, "batch length group rank"],
        key: Float[Tensor, "batch length group rank"],
    ) -> None:
        """Raise `FactorError` if a factor has NaN or infinite entries."""
        kernel, query, key = checked_factors(kernel=kernel, query=query, key=key)
        batch, length = query.shape[:2]
        self.convolution = Toeplitz(kernel, batch=batch, length=length)
        self.query, self.key = query, key

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        return self.convolution.shape

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Convolve the outer products of keys and values, and read them with the queries."""
        return _contract(self.query, self.convolution.apply(_outer(self.key, value)))

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Correlate the outer products of queries and vectors, and read them with the keys."""
        return _contract(self.key, self.convolution.adjoint(_outer(self.query, grad)))

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Multiply rows of the convolution by the products of their queries with all keys."""
        query = self.query.gather(1, index[:, :, None, None].expand(-1, -1, *self.query.shape[2:]))
        scores = torch.einsum("bign,bjgn->bgij", query, self.key)
        return self.convolution.rows(index) * repeat_groups(scores, self.heads, 1)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Multiply a block of the convolution by the products of queries and keys."""
        query, key = (of_heads(t, heads, self.heads) for t in (self.query[:, rows], self.key[:, cols]))
        return self.convolution.tile(rows, cols, heads) * torch.einsum("bihn,bjhn->bhij", query, key)

    def reduced_parts(
        self, blocks: Iterable[slice], left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Float[Tensor, "batch row key"]]:
        """Yield `CoreMixer.reduced_parts`."""
        batch, _, _, length = self.shape
        kernel = implementation("toeplitz_map", self.query).toeplitz_rows
        weights = self.convolution.taps
        yield from kernel(weights, left, taps, self.query, self.key, batch=batch, length=length, blocks=blocks)

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return K[0] (q_i . k_i)."""
        scores = repeat_groups((self.query * self.key).sum(-1), self.heads, 2)
        return self.convolution.diagonal() * scores.transpose(1, 2)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""
        return self.query.new_zeros(shape)


def _outer(vector: Tensor, value: Tensor) -> Float[Tensor, "batch length head product"]:
    """Return the outer products of each head's factor and value, flattened."""
    return (repeat_groups(vector, value.shape[2], 2).unsqueeze(-1) * value.unsqueeze(-2)).flatten(3)


def _contract(vector: Tensor, product: Tensor) -> Float[Tensor, "batch length head channel"]:
    """Contract flattened outer products with a factor."""
    vector = repeat_groups(vector, product.shape[2], 2)
    return (vector.unsqueeze(-1) * product.unflatten(3, (vector.shape[-1], -1))).sum(-2)
