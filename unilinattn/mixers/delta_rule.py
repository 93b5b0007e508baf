"""Delta rule: alpha = tril Khat(q, k) [I + diag(b) stril Khat(k, k)]^-1 diag(b), a memory that corrects itself."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.scan.chunks import Chunk
from unilinattn.kernels.scan.pairs import from_token, pairs_of, to_token
from unilinattn.kernels.subnormal import decays, flushed_
from unilinattn.mixers.base import ALL, check_factors
from unilinattn.mixers.chunked import Chunked


class DeltaRule(Chunked):
    """A memory that decays, then replaces what it holds under a key: what it held is read and taken away first.

    S' = exp(g_t) S_{t-1}; S_t = S' + b_t k_t (v_t - S'^T k_t)^T; y_t = S_t^T q_t. Serves DeltaNet (no decay), Gated
    DeltaNet (a decay a head; Yang, Kautz and Hatamizadeh, ICLR 2025) and Kimi delta attention (a decay a coordinate;
    Kimi Linear, 2025). Strengths b up to 2 (negative eigenvalues) are as good as any other.

    `apply`, `adjoint` and `rows` take O(L H (chunk + N)) time for each channel, after one unit-triangular solve a
    head and chunk.

    Args:
        query, key: (batch, length, group, state), as they enter the memory (normalised, scaled); heads a multiple
            of groups, consecutive heads share one.
        strength: b, (batch, length, head).
        log_decay: g, (batch, length, head) or (batch, length, head, state), at most 0; None for no decay.
    """

    structure = "delta rule"

    def __init__(
        self,
        query: Float[Tensor, "batch length group state"],
        key: Float[Tensor, "batch length group state"],
        strength: Float[Tensor, "batch length head"],
        log_decay: Float[Tensor, "batch length head *state"] | None = None,
    ) -> None:
        """Hold the factors; raise `FactorError` if one of them holds NaN or infinity."""
        check_factors(query=query, key=key, strength=strength, log_decay=log_decay)
        decay = torch.zeros_like(strength) if log_decay is None else log_decay
        self._query, self._key, self._strength = query, key, strength
        self._log_decay = decay.unsqueeze(-1) if decay.ndim == 3 else decay

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        batch, length, heads = self._strength.shape
        return batch, heads, length, length

    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Solve for the corrected values of one chunk: u = X v - X_s S, X = [I + diag(b) stril Khat(k, k)]^-1 diag(b).

        With u the memory is a plain decayed one, y = tril Khat(q, k) u, and X_s = X diag(exp(G)) k. What reads u and
        what writes it is solved for instead of u itself: both then take one solve.
        """
        query, key, strength, decay = (repeat_groups(t, self.heads, 2)[:, :, heads] for t in factors)
        strength = strength.transpose(1, 2)
        arriving, leaving = decays(to_token(decay)), decays(from_token(decay))
        among, scores = pairs_of((key, query), key, decay)
        plain = torch.cat([scores, flushed_(key * leaving).permute(0, 2, 3, 1)], dim=-2)
        # The solve reads below the diagonal only and takes the diagonal as one.
        system = flushed_(strength.unsqueeze(-1) * among)
        solved = torch.linalg.solve_triangular(system, plain, upper=False, left=False, unitriangular=True)
        within, write = flushed_(solved * strength.unsqueeze(-2)).split([key.shape[1], key.shape[-1]], dim=-2)
        held = flushed_(key * arriving).transpose(1, 2)
        return Chunk(
            within=within,
            read=(query * arriving).transpose(1, 2) - within @ held,
            write=write,
            decay=arriving[:, -1],
            transfer=-write @ held,
        )

    @property
    def _factors(self) -> tuple[Tensor, ...]:
        return self._query, self._key, self._strength, self._log_decay

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return b_i (q_i . k_i)."""
        own = repeat_groups((self._query * self._key).sum(-1), self.heads, 2)
        return (own * self._strength).transpose(1, 2)

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._query.new_zeros(shape)
