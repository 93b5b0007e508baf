"""mLSTM: a scalar-decay memory with exponential input gates and a normaliser."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.scan.chunks import Chunk
from unilinattn.kernels.scan.pairs import between, from_token, to_token
from unilinattn.kernels.scan.tiled import cut
from unilinattn.mixers.base import ALL, checked_factors
from unilinattn.mixers.chunked import Chunked


class MLSTM(Chunked):
    """xLSTM's matrix memory in its stabilised form; the normaliser is frozen like the other factors.

    alpha_ij = w_ij / (max(abs(sum_j w_ij), exp(-m_i)) + eps) with w_ij = (q_i . k_j) exp(G_i - G_j + l_j - m_i) and
    m_i = max(m_{i-1} + g_i, l_i), m_0 = 0 included (Beck et al., NeurIPS 2024).

    Input gates are unbounded, so a running maximum is carried and every decay is at most 1. `apply`, `adjoint` and
    `rows` take time O(L H (chunk + N)) per channel.

    Args:
        query, key: (batch, length, head, state); the caller scales the query, by state ** -0.5 in the paper.
        log_forget: g, (batch, length, head), at most 0: logsigmoid of the forget gate; stored in float64.
        log_input: l, (batch, length, head): the input gate before its exponential; stored in float64.
        eps: the host's addition to the normaliser.
    """

    structure = "mLSTM"

    def __init__(
        self,
        query: Float[Tensor, "batch length head state"],
        key: Float[Tensor, "batch length head state"],
        log_forget: Float[Tensor, "batch length head"],
        log_input: Float[Tensor, "batch length head"],
        *,
        eps: float,
    ) -> None:
        """Compute the normaliser of each row; raise `FactorError` if a factor has NaN or infinite entries."""
        query, key, log_forget, log_input = checked_factors(
            query=query, key=key, log_forget=log_forget, log_input=log_input
        )
        self.query, self.key = query, key
        # Differences of large gates are exponentiated, for which float32 has too few digits.
        self.log_forget, self.log_input = log_forget.double(), log_input.double()
        # Weights are relative to the largest weight of the tokens and not to m, whose initial value of 0 makes all of
        # them underflow if every input gate is strongly negative.
        peak = torch.full_like(self.log_input[:, :1], -torch.inf)
        self.boundaries, peaks = [peak], []
        for forget, gate in cut(self.tokens, self.log_forget.unsqueeze(-1), self.log_input):
            weights = between(forget).squeeze(-1) + gate.unsqueeze(1)
            peaks.append(torch.maximum(weights.amax(2), peak + to_token(forget).squeeze(-1)))
            peak = peaks[-1][:, -1:]
            self.boundaries.append(peak)
        self._peak = torch.cat(peaks, dim=1)
        self._scale = torch.ones_like(log_input)
        total = self.apply(torch.ones_like(log_input).unsqueeze(-1)).squeeze(-1)
        m = torch.maximum(self._peak, self.log_forget.cumsum(1))
        # Numerator and denominator are multiplied by exp(min(m, 0)), because exp(-m) overflows for a forgotten past.
        low = m.clamp_max(0)
        numerator = (low + self._peak - m).exp()
        floor = torch.maximum(total.abs() * numerator, (low - m).exp())
        self._scale = (numerator / (floor + eps * low.exp())).to(query.dtype)

    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Return the weights of one chunk relative to the running maxima, and the scale of each row."""
        query, key, forget, log_input, peak, scale, entering, ending = (t[:, :, heads] for t in factors)
        weight = between(forget).squeeze(-1) + log_input.unsqueeze(1) - peak.unsqueeze(2)
        scores = torch.einsum("bihn,bjhn->bhij", query, key) * weight.exp().permute(0, 3, 1, 2).to(query.dtype)
        arriving, leaving = to_token(forget).squeeze(-1), from_token(forget).squeeze(-1)
        read = query * (arriving + entering - peak).exp().to(query.dtype).unsqueeze(-1)
        write = key * (leaving + log_input - ending).exp().to(key.dtype).unsqueeze(-1)
        return Chunk(
            within=scores,
            read=read.transpose(1, 2),
            write=write.permute(0, 2, 3, 1),
            transition=(arriving[:, -1:] + entering - ending).exp().transpose(1, 2).unsqueeze(-1).to(key.dtype),
            scale=scale.transpose(1, 2),
        )

    @property
    def chunk_factors(self) -> tuple[Tensor, ...]:
        """Query, key, both gates, the running maximum and the scale of each row."""
        return self.query, self.key, self.log_forget.unsqueeze(-1), self.log_input, self._peak, self._scale

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return the weight of each token on itself."""
        weight = (self.query * self.key).sum(-1) * (self.log_input - self._peak).exp().to(self.key.dtype)
        return (weight * self._scale).transpose(1, 2)
