"""mLSTM: a scalar-decay memory with exponential input gates and a normaliser of its own."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.scan.chunks import Chunk
from unilinattn.kernels.scan.pairs import between, from_token, to_token
from unilinattn.kernels.scan.tiled import CHUNK, cut
from unilinattn.mixers.base import ALL, check_factors
from unilinattn.mixers.chunked import Chunked


class MLSTM(Chunked):
    """xLSTM's matrix memory in its stabilised form, the normaliser frozen with the rest.

    alpha_ij = w_ij / (max(abs(sum_j w_ij), exp(-m_i)) + eps) with w_ij = (q_i . k_j) exp(G_i - G_j + l_j - m_i) and
    m_i = max(m_{i-1} + g_i, l_i), m_0 = 0 included (Beck et al., NeurIPS 2024).

    Input gates are unbounded, so the running maximum m is carried, and every decay is at most one. `apply`,
    `adjoint` and `rows` take O(L H (chunk + N)) time for each channel.

    Args:
        query, key: (batch, length, head, state); the query is scaled by the caller, state ** -0.5 in the paper.
        log_forget: g, (batch, length, head), at most 0: logsigmoid of the forget gate.
        log_input: l, (batch, length, head): the input gate before its exponential.
        eps: what the host adds to the normaliser.
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
        """Hold the factors and sum up each row; raise `FactorError` for NaN or infinity."""
        check_factors(query=query, key=key, log_forget=log_forget, log_input=log_input)
        self._query, self._key = query, key
        # Gates as large as their inputs leave no float32 digits to the differences that are exponentiated.
        self._log_forget, self._log_input = log_forget.double(), log_input.double()
        # Weights are relative to the largest of the tokens, not to m, which begins at 0: where every input gate is
        # far below, all of them would be too small to multiply.
        peak = torch.full_like(self._log_input[:, 0], -torch.inf)
        self._entering, peaks = [peak], []
        for forget, entered in cut(CHUNK, self._log_forget.unsqueeze(-1), self._log_input):
            found = between(forget).squeeze(-1) + entered.unsqueeze(1)
            peaks.append(torch.maximum(found.amax(2), peak.unsqueeze(1) + to_token(forget).squeeze(-1)))
            peak = peaks[-1][:, -1]
            self._entering.append(peak)
        self._peak = torch.cat(peaks, dim=1)
        self._scale = torch.ones_like(log_input)
        total = self.apply(torch.ones_like(log_input).unsqueeze(-1)).squeeze(-1)
        m = torch.maximum(self._peak, self._log_forget.cumsum(1))
        # Numerator and denominator share exp(min(m, 0)): exp(-m) itself overflows where everything was forgotten.
        low = m.clamp_max(0)
        numerator = (low + self._peak - m).exp()
        floor = torch.maximum(total.abs() * numerator, (low - m).exp())
        self._scale = (numerator / (floor + eps * low.exp())).to(query.dtype)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        batch, length, heads = self._log_input.shape
        return batch, heads, length, length

    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Return the weights of one chunk relative to the running maxima, and what normalises each row of them."""
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
            decay=(arriving[:, -1:] + entering - ending).exp().transpose(1, 2).to(key.dtype),
            scale=scale.transpose(1, 2),
        )

    @property
    def _factors(self) -> tuple[Tensor, ...]:
        return self._query, self._key, self._log_forget.unsqueeze(-1), self._log_input, self._peak, self._scale

    def _pieces(self, chunks: slice = ALL) -> list[tuple[Tensor, ...]]:
        peaks = [peak.unsqueeze(1) for peak in self._entering]
        found = zip(super()._pieces(chunks), peaks[:-1][chunks], peaks[1:][chunks], strict=True)
        return [(*factors, *ends) for factors, *ends in found]

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return each token's weight on itself."""
        own = (self._query * self._key).sum(-1) * (self._log_input - self._peak).exp().to(self._key.dtype)
        return (own * self._scale).transpose(1, 2)

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._query.new_zeros(shape)
