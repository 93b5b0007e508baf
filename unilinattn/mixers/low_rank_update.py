"""Diagonal plus low rank: a decayed memory that also moves what it holds under one vector to another."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.scan.chunks import Chunk
from unilinattn.kernels.scan.pairs import before_token, exclusive_pairs, from_token, pairs, to_token
from unilinattn.kernels.subnormal import decays, flushed_
from unilinattn.mixers.base import ALL, check_factors
from unilinattn.mixers.chunked import Chunked


class LowRankUpdate(Chunked):
    """A memory whose transition is diagonal plus rank one, the rank-one part acting on the undecayed state.

    S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T; y_t = S_t^T q_t + (sum_n q_n rho_n k_n) v_t, so
    alpha = tril Khat(q, k) + tril Khat(q, b) [I - Khat-(a, b)]^-1 Khat-(a, k) + diag(sum_n q_n rho_n k_n), where
    Khat- reads the state before a step's own decay. Serves RWKV-7 (Peng et al., 2025) and Comba (Hu et al., 2025),
    whose erase key p makes a = p, b = -beta k, k = beta k.

    `apply`, `adjoint` and `rows` take O(L H (chunk + N)) time for each channel, after one unit-triangular solve a
    head and chunk.

    Args:
        query, key, a, b: (batch, length, group, state); heads a multiple of groups, consecutive heads share one.
        log_decay: g, (batch, length, head) or (batch, length, head, state), at most 0.
        bonus: rho, (head, state).
    """

    structure = "diagonal plus low rank"

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
        """Hold the factors; raise `FactorError` if one of them holds NaN or infinity."""
        check_factors(query=query, key=key, log_decay=log_decay, a=a, b=b, bonus=bonus)
        self._query, self._key, self._a, self._b, self._bonus = query, key, a, b, bonus
        self._log_decay = log_decay.unsqueeze(-1) if log_decay.ndim == 3 else log_decay

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        batch, length, heads, _ = self._log_decay.shape
        return batch, heads, length, length

    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Solve for what one chunk reads under a: u = X v + X_s S, [I - Khat-(a, b)] X = Khat-(a, k).

        What reads u and what writes it is solved for instead of u itself: both then take one solve.
        """
        query, key, a, b, decay = (repeat_groups(t, self.heads, 2)[:, :, heads] for t in factors)
        arriving, leaving = decays(to_token(decay)), decays(from_token(decay))
        held = flushed_(a * decays(before_token(decay))).transpose(1, 2)
        write, rewrite = (flushed_(t * leaving).permute(0, 2, 3, 1) for t in (key, b))
        using = torch.cat([pairs(query, b, decay), rewrite], dim=-2)
        # The solve reads below the diagonal only and takes the diagonal as one.
        system = -exclusive_pairs(a, b, decay)
        solved = torch.linalg.solve_triangular(system, using, upper=False, left=False, unitriangular=True)
        moved = flushed_(solved) @ torch.cat([exclusive_pairs(a, key, decay), held], dim=-1)
        length = key.shape[1]
        within = pairs(query, key, decay) + moved[..., :length, :length]
        if self._bonus is not None:
            within = within + torch.diag_embed((query * self._bonus[heads] * key).sum(-1).transpose(1, 2))
        return Chunk(
            within=within,
            read=(query * arriving).transpose(1, 2) + moved[..., :length, length:],
            write=write + moved[..., length:, :length],
            decay=arriving[:, -1],
            transfer=moved[..., length:, length:],
        )

    @property
    def _factors(self) -> tuple[Tensor, ...]:
        return self._query, self._key, self._a, self._b, self._log_decay

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return sum_n q_n (1 + rho_n) k_n."""
        query, key = (repeat_groups(t, self.heads, 2) for t in (self._query, self._key))
        weight = query if self._bonus is None else query * (1 + self._bonus)
        return (weight * key).sum(-1).transpose(1, 2)

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._query.new_zeros(shape)
