"""Exclusive read with bonus: the memory is read before a token enters it, and the token weighs itself apart."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.scan.chunks import Chunk
from unilinattn.kernels.scan.pairs import before_token, exclusive_pairs, from_token, to_token
from unilinattn.kernels.subnormal import decays
from unilinattn.mixers.base import ALL, check_factors
from unilinattn.mixers.chunked import Chunked


class ExclusiveBonus(Chunked):
    """A decayed memory read before each step: alpha_ij = sum_n q_in exp(G_{i-1,n} - G_jn) k_jn for j < i.

    On the diagonal stands alpha_ii = sum_n q_in u_n k_in. Serves RWKV-5 and RWKV-6 (Eagle and Finch; Peng et al.,
    2024): S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, y_t = (S_{t-1} + diag(u) k_t v_t^T)^T q_t.

    `apply`, `adjoint` and `rows` take O(L H (chunk + N)) time for each channel.

    Args:
        query, key: (batch, length, head, state).
        log_decay: g, (batch, length, head, state), at most 0.
        bonus: u, (head, state).
    """

    structure = "exclusive read with bonus"

    def __init__(
        self,
        query: Float[Tensor, "batch length head state"],
        key: Float[Tensor, "batch length head state"],
        log_decay: Float[Tensor, "batch length head state"],
        bonus: Float[Tensor, "head state"],
    ) -> None:
        """Hold the factors; raise `FactorError` if one of them holds NaN or infinity."""
        check_factors(query=query, key=key, log_decay=log_decay, bonus=bonus)
        self._query, self._key, self._log_decay, self._bonus = query, key, log_decay, bonus

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        batch, length, heads, _ = self._log_decay.shape
        return batch, heads, length, length

    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Return Khat- with the bonus on its diagonal, and the plain decayed memory's passage of states."""
        query, key, decay = (t[:, :, heads] for t in factors)
        own = (query * self._bonus[heads] * key).sum(-1).transpose(1, 2)
        return Chunk(
            within=exclusive_pairs(query, key, decay) + torch.diag_embed(own),
            read=(query * decays(before_token(decay))).transpose(1, 2),
            write=(key * decays(from_token(decay))).permute(0, 2, 3, 1),
            decay=decays(to_token(decay)[:, -1]),
        )

    @property
    def _factors(self) -> tuple[Tensor, ...]:
        return self._query, self._key, self._log_decay

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return sum_n q_in u_n k_in."""
        return (self._query * self._bonus * self._key).sum(-1).transpose(1, 2)

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._query.new_zeros(shape)
