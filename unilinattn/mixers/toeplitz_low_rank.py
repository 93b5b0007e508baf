"""Toeplitz times low rank: alpha_ij = K[i - j] (q_i . k_j), a fixed convolution between two data-controlled sides."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.kernels.groups import of_heads, repeat_groups
from unilinattn.mixers.base import ALL, CoreMixer, check_factors
from unilinattn.mixers.toeplitz import Toeplitz


class ToeplitzLowRank(CoreMixer):
    """A convolution over outer products of keys and values, read by queries: multi-head H3 and Hyena.

    alpha_ij = K[i - j] (q_i . k_j) for j <= i. H3: Fu et al., ICLR 2023; multi-head Hyena: Massaroli et al.,
    NeurIPS 2023.

    `apply` and `adjoint` convolve once for each coordinate of the rank: O(L taps N) time for each channel up to
    `Toeplitz`'s direct taps, O(N L log L) above; `rows` takes O(L N).

    Args:
        kernel: K, (head, tap), tap t the weight of the token t steps back.
        query, key: (batch, length, group, rank); heads a multiple of groups, consecutive heads share one.
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
        """Hold the factors; raise `FactorError` if one of them holds NaN or infinity."""
        check_factors(kernel=kernel, query=query, key=key)
        batch, length = query.shape[:2]
        self._toeplitz = Toeplitz(kernel, batch=batch, length=length)
        self._query, self._key = query, key

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        return self._toeplitz.shape

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Convolve the outer products of keys and values, and read them with the queries."""
        return _contract(self._query, self._toeplitz.apply(_outer(self._key, value)))

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Correlate the outer products of queries and vectors, and read them with the keys."""
        return _contract(self._key, self._toeplitz.adjoint(_outer(self._query, grad)))

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Multiply the convolution's rows by the products of their queries with all keys."""
        query = self._query.gather(1, index[:, :, None, None].expand(-1, -1, *self._query.shape[2:]))
        scores = torch.einsum("bign,bjgn->bgij", query, self._key)
        return self._toeplitz.rows(index) * repeat_groups(scores, self.heads, 1)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Multiply the convolution's block by one product of queries and keys a group."""
        query, key = (of_heads(t, heads, self.heads) for t in (self._query[:, rows], self._key[:, cols]))
        return self._toeplitz.tile(rows, cols, heads) * torch.einsum("bihn,bjhn->bhij", query, key)

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return K[0] (q_i . k_i)."""
        own = repeat_groups((self._query * self._key).sum(-1), self.heads, 2)
        return self._toeplitz.diagonal() * own.transpose(1, 2)

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._query.new_zeros(shape)


def _outer(vector: Tensor, value: Tensor) -> Float[Tensor, "batch length head product"]:
    """Return each head's outer product of a factor and a value, flat."""
    return (repeat_groups(vector, value.shape[2], 2).unsqueeze(-1) * value.unsqueeze(-2)).flatten(3)


def _contract(vector: Tensor, product: Tensor) -> Float[Tensor, "batch length head channel"]:
    """Sum flat outer products over the factor's coordinates."""
    vector = repeat_groups(vector, product.shape[2], 2)
    return (vector.unsqueeze(-1) * product.unflatten(3, (vector.shape[-1], -1))).sum(-2)
