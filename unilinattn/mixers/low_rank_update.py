"""Diagonal plus low rank: a decayed memory whose transition also has a rank-one part."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.scan.chunks import Chunk, with_diagonal
from unilinattn.kernels.scan.pairs import before_token, from_token, next_token, pairs_of, read_before, to_token
from unilinattn.kernels.subnormal import decays, flushed_
from unilinattn.mixers.base import ALL, checked_factors
from unilinattn.mixers.chunked import Chunked


class LowRankUpdate(Chunked):
    """A memory whose transition is diagonal plus rank one; the rank-one part acts on the state before its decay.

    S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T; y_t = S_t^T q_t + (sum_n q_n rho_n k_n) v_t, so
    alpha = tril Khat(q, k) + tril Khat(q, b) [I - Khat-(a, b)]^-1 Khat-(a, k) + diag(sum_n q_n rho_n k_n), where
    Khat- reads the state before the decay of the reading step. Serves RWKV-7 (Peng et al., 2025) and Comba (Hu et al.,
    2025), whose erase key p gives a = p, b = -beta k, and key beta k.

    `apply`, `adjoint` and `rows` take time O(L H (chunk + N)) per channel, after one unit-triangular solve per head and
    chunk.

    Args:
        query, key, a, b: (batch, length, group, state); heads are a multiple of groups, consecutive heads share one.
        log_decay: g, (batch, length, head) or (batch, length, head, state), at most 0.
        bonus: rho, (head, state).
    """

    structure = "diagonal plus low rank"
    pairs = 13

    def __init__(
        self,
        query: Float[Tensor, "batch length groupq state"],
        key: Float[Tensor, "batch length groupk state"],
        log_decay: Float[Tensor, "batch length head *state"],
        a: Float[Tensor, "batch length groupa state"],
        b: Float[Tensor, "batch length groupb state"],
        *,
        bonus: Float[Tensor, "head state"] | None = None,
    ) -> None:
        """Raise `FactorError` if a factor has NaN or infinite entries."""
        query, key, log_decay, a, b, bonus = checked_factors(
            query=query, key=key, log_decay=log_decay, a=a, b=b, bonus=bonus
        )
        self.query, self.key, self.a, self.b, self.bonus = query, key, a, b, bonus
        self.log_decay = log_decay.unsqueeze(-1) if log_decay.ndim == 3 else log_decay

    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Solve for the state's products u with a in one chunk: u = X v + X_s S, [I - Khat-(a, b)] X = Khat-(a, k).

        The transposed system is solved for the factors that read and write u, which takes one solve for both.
        """
        query, key, a, b, decay = (repeat_groups(t, self.heads, 2)[:, :, heads] for t in factors)
        arriving, leaving = decays(to_token(decay)), decays(from_token(decay))
        erase = flushed_(a * decays(before_token(decay))).transpose(1, 2)
        write, rewrite = (flushed_(t * leaving).permute(0, 2, 3, 1) for t in (key, b))
        (read_b, read_key), (overlaps, written) = pairs_of((query, next_token(a)), (b, key), decay)
        reads = torch.cat([read_b, rewrite], dim=-2)
        # `unitriangular` ignores the diagonal, and `upper=False` the entries above it.
        system = -read_before(overlaps)
        solved = torch.linalg.solve_triangular(system, reads, upper=False, left=False, unitriangular=True)
        moved = flushed_(solved) @ torch.cat([read_before(written), erase], dim=-1)
        length = key.shape[1]
        within = read_key + moved[..., :length, :length]
        if self.bonus is not None:
            within = within + torch.diag_embed((query * self.bonus[heads] * key).sum(-1).transpose(1, 2))
        return Chunk(
            within=within,
            read=(query * arriving).transpose(1, 2) + moved[..., :length, length:],
            write=write + moved[..., length:, :length],
            transition=with_diagonal(moved[..., length:, length:].clone(), arriving[:, -1]),
        )

    @property
    def chunk_factors(self) -> tuple[Tensor, ...]:
        """Query, key, a, b and log-decay."""
        return self.query, self.key, self.a, self.b, self.log_decay

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return sum_n q_n (1 + rho_n) k_n."""
        query, key = (repeat_groups(t, self.heads, 2) for t in (self.query, self.key))
        weight = query if self.bonus is None else query * (1 + self.bonus)
        return (weight * key).sum(-1).transpose(1, 2)
