"""Exclusive read with bonus: a memory that is read before each write, plus a bonus for the current token."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.scan.chunks import Chunk
from unilinattn.kernels.scan.pairs import before_token, exclusive_pairs, from_token, to_token
from unilinattn.kernels.subnormal import decays
from unilinattn.mixers.base import ALL, checked_factors
from unilinattn.mixers.chunked import Chunked


class ExclusiveBonus(Chunked):
    """A decayed memory that is read before each step: alpha_ij = sum_n q_in exp(G_{i-1,n} - G_jn) k_jn for j < i.

    On the diagonal, alpha_ii = sum_n q_in u_n k_in. Serves RWKV-5 and RWKV-6 (Eagle and Finch; Peng et al., 2024):
    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, y_t = (S_{t-1} + diag(u) k_t v_t^T)^T q_t.

    `apply`, `adjoint` and `rows` take time O(L H (chunk + N)) per channel.

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
        """Raise `FactorError` if a factor has NaN or infinite entries."""
        query, key, log_decay, bonus = checked_factors(query=query, key=key, log_decay=log_decay, bonus=bonus)
        self.query, self.key, self.log_decay, self.bonus = query, key, log_decay, bonus

    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Return the matrices of a plain decayed memory, read exclusively, with the bonus on the diagonal."""
        query, key, decay = (t[:, :, heads] for t in factors)
        diagonal = (query * self.bonus[heads] * key).sum(-1).transpose(1, 2)
        return Chunk(
            within=exclusive_pairs(query, key, decay) + torch.diag_embed(diagonal),
            read=(query * decays(before_token(decay))).transpose(1, 2),
            write=(key * decays(from_token(decay))).permute(0, 2, 3, 1),
            transition=decays(to_token(decay)[:, -1]).unsqueeze(-1),
        )

    @property
    def chunk_factors(self) -> tuple[Tensor, ...]:
        """Query, key and log-decay."""
        return self.query, self.key, self.log_decay

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return sum_n q_in u_n k_in."""
        return (self.query * self.bonus * self.key).sum(-1).transpose(1, 2)
