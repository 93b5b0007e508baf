"""Delta rule: alpha = tril Khat(q, k) [I + diag(b) stril Khat(k, k)]^-1 diag(b), a memory that corrects itself."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.scan.chunks import Chunk, with_diagonal
from unilinattn.kernels.scan.pairs import from_token, pairs_of, to_token
from unilinattn.kernels.subnormal import decays, flushed_
from unilinattn.mixers.base import ALL, checked_factors
from unilinattn.mixers.chunked import Chunked


class DeltaRule(Chunked):
    """A memory that decays, then replaces the value stored under each token's key.

    S' = exp(g_t) S_{t-1}; S_t = S' + b_t k_t (v_t - S'^T k_t)^T; y_t = S_t^T q_t. Serves DeltaNet (no decay), Gated
    DeltaNet (a decay per head; Yang, Kautz and Hatamizadeh, ICLR 2025) and Kimi delta attention (a decay per
    coordinate; Kimi Linear, 2025). Strengths b up to 2 (negative eigenvalues) are allowed.

    `apply`, `adjoint` and `rows` take time O(L H (chunk + N)) per channel, after one unit-triangular solve per head and
    chunk.

    Args:
        query, key: (batch, length, group, state), after the host's normalisation and scaling; heads are a multiple of
            groups, and consecutive heads share one.
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
        """Raise `FactorError` if a factor has NaN or infinite entries."""
        query, key, strength, log_decay = checked_factors(query=query, key=key, strength=strength, log_decay=log_decay)
        decay = torch.zeros_like(strength) if log_decay is None else log_decay
        self.query, self.key, self.strength = query, key, strength
        self.log_decay = decay.unsqueeze(-1) if decay.ndim == 3 else decay

    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Solve for the corrected values of one chunk: u = X v - X_s S, X = diag(b) [I + stril Khat(k, k) diag(b)]^-1.

        Given u, the memory is a plain decayed one: y = tril Khat(q, k) u, and X_s = X diag(exp(G)) k. The transposed
        system is solved for the factors that read and write u, which takes one solve for both. The strengths multiply
        the keys that are written.
        """
        query, key, strength, decay = (repeat_groups(t, self.heads, 2)[:, :, heads] for t in factors)
        length, written = key.shape[1], key * strength.unsqueeze(-1)
        arriving, leaving = decays(to_token(decay)), decays(from_token(decay))
        (system,), (scores,) = pairs_of((key, query), (written,), decay)
        plain = torch.cat([scores, flushed_(written * leaving).permute(0, 2, 3, 1)], dim=-2)
        # `unitriangular` ignores the diagonal, and `upper=False` the entries above it.
        solved = torch.linalg.solve_triangular(system, plain, upper=False, left=False, unitriangular=True)
        within, write = flushed_(solved).split([length, key.shape[-1]], dim=-2)
        erased = flushed_(key * -arriving).transpose(1, 2)
        return Chunk(
            within=within,
            read=(within @ erased).add_((query * arriving).transpose(1, 2)),
            write=write,
            transition=with_diagonal(write @ erased, arriving[:, -1]),
        )

    @property
    def chunk_factors(self) -> tuple[Tensor, ...]:
        """Query, key, strength and log-decay."""
        return self.query, self.key, self.strength, self.log_decay

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return b_i (q_i . k_i)."""
        scores = repeat_groups((self.query * self.key).sum(-1), self.heads, 2)
        return (scores * self.strength).transpose(1, 2)
