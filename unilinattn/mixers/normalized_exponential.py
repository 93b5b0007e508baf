"""Normalised exponential: a softmax over the past whose scores decrease with distance, in linear time."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.scan.chunks import Chunk
from unilinattn.mixers.base import ALL, checked_factors
from unilinattn.mixers.chunked import Chunked


class NormalizedExponential(Chunked):
    """Exponential keys divided by their sum: alpha_i = softmax over j <= i of l_ij.

    l_ij = k_j + (i - 1 - j) g for j < i, and l_ii = k_i + u. Serves RWKV-4 (Peng et al., EMNLP Findings 2023),
    where g = -exp(w) and every channel is a head.

    Keys are unbounded, so logarithms of the running sums are carried and every factor is at most 1. `apply`, `adjoint`
    and `rows` take time O(L H chunk) per channel.

    Args:
        key: k, (batch, length, head), the logarithm of each token's weight; all factors are stored in float64.
        log_decay: g, (head), at most 0.
        bonus: u, (head).
    """

    structure = "normalised exponential"
    # Chunks are filled pair by pair for every head, while products join them.
    tokens = 16

    def __init__(
        self,
        key: Float[Tensor, "batch length head"],
        log_decay: Float[Tensor, " head"],
        bonus: Float[Tensor, " head"],
    ) -> None:
        """Compute the sum of each row; raise `FactorError` if a factor has NaN or infinite entries."""
        key, log_decay, bonus = checked_factors(key=key, log_decay=log_decay, bonus=bonus)
        self._dtype = key.dtype
        # Differences of large logarithms are exponentiated, for which float32 has too few digits.
        self.key, self.log_decay, self.bonus = key.double(), log_decay.double(), bonus.double()
        mass = torch.full_like(self.key[:, 0], -torch.inf)
        self.boundaries, totals = [mass.unsqueeze(1)], []
        for chunk_keys in self.key.split(self.tokens, dim=1):
            scores = self._scores(chunk_keys, ALL)
            totals.append(torch.logaddexp(scores.logsumexp(-1), self._arriving(mass, scores.shape[-1], ALL)))
            ending = self._leaving(chunk_keys, ALL).logsumexp(-1)
            mass = torch.logaddexp(mass + scores.shape[-1] * self.log_decay, ending)
            self.boundaries.append(mass.unsqueeze(1))
        self._total = torch.cat(totals, dim=-1).transpose(1, 2)

    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Return the normalised weights of one chunk; the state is divided by the running sum of weights."""
        key, total, entering, ending = (factor[:, :, heads] for factor in factors)
        total, entering, ending = total.transpose(1, 2), entering.squeeze(1), ending.squeeze(1)
        length = total.shape[-1]
        within = self._scores(key, heads) - total.unsqueeze(-1)
        read = self._arriving(entering, length, heads) - total
        write = self._leaving(key, heads) - ending.unsqueeze(-1)
        decay = entering + length * self.log_decay[heads] - ending
        return Chunk(
            within=within.exp().to(self._dtype),
            read=read.exp().to(self._dtype).unsqueeze(-1),
            write=write.exp().to(self._dtype).unsqueeze(-2),
            transition=decay.exp().to(self._dtype)[..., None, None],
        )

    @property
    def chunk_factors(self) -> tuple[Tensor, ...]:
        """The keys and the logarithm of each row's sum."""
        return self.key, self._total

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return the weight of each token on itself."""
        return ((self.key + self.bonus) - self._total).transpose(1, 2).exp().to(self._dtype)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""
        return self.key.new_zeros(shape, dtype=self._dtype)

    def _scores(self, key: Float[Tensor, "batch token head"], heads: slice) -> Float[Tensor, "batch head token token"]:
        """Return l_ij within a chunk, -inf for j > i."""
        key = key.transpose(1, 2)
        length = key.shape[-1]
        step = torch.arange(length, device=key.device)
        lag = (step[:, None] - step - 1).to(key.dtype)
        fading = key.unsqueeze(-2) + lag * self.log_decay[heads, None, None]
        current = torch.diag_embed(key + self.bonus[heads, None])
        diagonal = torch.eye(length, dtype=torch.bool, device=key.device)
        return torch.where(diagonal, current, fading).masked_fill(lag < -1, -torch.inf)

    def _arriving(self, mass: Tensor, length: int, heads: slice) -> Float[Tensor, "batch head token"]:
        """Return the logarithm of a chunk's initial running sum, decayed to each of its tokens."""
        step = torch.arange(length, device=mass.device, dtype=mass.dtype)
        return mass.unsqueeze(-1) + step * self.log_decay[heads, None]

    def _leaving(self, key: Float[Tensor, "batch token head"], heads: slice) -> Float[Tensor, "batch head token"]:
        """Return the logarithm of each token's weight, decayed to the chunk's end."""
        key = key.transpose(1, 2)
        step = torch.arange(key.shape[-1], device=key.device, dtype=key.dtype)
        return key + step.flip(0) * self.log_decay[heads, None]
