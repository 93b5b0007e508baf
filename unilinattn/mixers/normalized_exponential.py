"""Normalised exponential: a softmax over the past whose scores fade with distance, in linear time."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.scan.chunks import Chunk
from unilinattn.kernels.scan.tiled import CHUNK
from unilinattn.mixers.base import ALL, check_factors
from unilinattn.mixers.chunked import Chunked


class NormalizedExponential(Chunked):
    """Exponential keys divided by their sum: alpha_i = softmax over j <= i of l_ij.

    l_ij = k_j + (i - 1 - j) g for j < i, and l_ii = k_i + u. Serves RWKV-4 (Peng et al., EMNLP Findings 2023),
    where g = -exp(w) and every channel is a head.

    Keys are unbounded, so the logarithms of the running sums are carried, and every factor is at most one. `apply`,
    `adjoint` and `rows` take O(L H chunk) time for each channel.

    Args:
        key: k, (batch, length, head), the logarithm of each token's weight.
        log_decay: g, (head), at most 0.
        bonus: u, (head).
    """

    structure = "normalised exponential"

    def __init__(
        self,
        key: Float[Tensor, "batch length head"],
        log_decay: Float[Tensor, " head"],
        bonus: Float[Tensor, " head"],
    ) -> None:
        """Hold the factors and sum up the weights; raise `FactorError` for NaN or infinity."""
        check_factors(key=key, log_decay=log_decay, bonus=bonus)
        self._dtype = key.dtype
        # Logarithms as large as the keys leave no float32 digits to the differences that are exponentiated.
        self._key, self._log_decay, self._bonus = key.double(), log_decay.double(), bonus.double()
        mass = torch.full_like(self._key[:, 0], -torch.inf)
        self._entering, totals = [mass], []
        for part in self._key.split(CHUNK, dim=1):
            scores = self._scores(part, ALL)
            totals.append(torch.logaddexp(scores.logsumexp(-1), self._held(mass, scores.shape[-1], ALL)))
            ending = self._leaving(part, ALL).logsumexp(-1)
            mass = torch.logaddexp(mass + scores.shape[-1] * self._log_decay, ending)
            self._entering.append(mass)
        self._total = torch.cat(totals, dim=-1).transpose(1, 2)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        batch, length, heads = self._key.shape
        return batch, heads, length, length

    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Return the weights of one chunk, each divided by its row's sum; the one state is its own running sum."""
        key, total, entering, ending = factors
        key, total = key[:, :, heads], total[:, :, heads].transpose(1, 2)
        entering, ending = entering[:, heads], ending[:, heads]
        length = total.shape[-1]
        within = self._scores(key, heads) - total.unsqueeze(-1)
        read = self._held(entering, length, heads) - total
        write = self._leaving(key, heads) - ending.unsqueeze(-1)
        decay = entering + length * self._log_decay[heads] - ending
        return Chunk(
            within=within.exp().to(self._dtype),
            read=read.exp().to(self._dtype).unsqueeze(-1),
            write=write.exp().to(self._dtype).unsqueeze(-2),
            decay=decay.exp().to(self._dtype).unsqueeze(-1),
        )

    @property
    def _factors(self) -> tuple[Tensor, ...]:
        return self._key, self._total

    def _pieces(self, chunks: slice = ALL) -> list[tuple[Tensor, ...]]:
        found = zip(super()._pieces(chunks), self._entering[:-1][chunks], self._entering[1:][chunks], strict=True)
        return [(*factors, *masses) for factors, *masses in found]

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return each token's weight on itself."""
        return ((self._key + self._bonus) - self._total).transpose(1, 2).exp().to(self._dtype)

    def _scores(self, key: Float[Tensor, "batch token head"], heads: slice) -> Float[Tensor, "batch head token token"]:
        """Return l_ij within a chunk, -inf for j > i."""
        key = key.transpose(1, 2)
        length = key.shape[-1]
        step = torch.arange(length, device=key.device)
        lag = (step[:, None] - step - 1).to(key.dtype)
        fading = key.unsqueeze(-2) + lag * self._log_decay[heads, None, None]
        own = torch.diag_embed(key + self._bonus[heads, None])
        diagonal = torch.eye(length, dtype=torch.bool, device=key.device)
        return torch.where(diagonal, own, fading).masked_fill(lag < -1, -torch.inf)

    def _held(self, mass: Tensor, length: int, heads: slice) -> Float[Tensor, "batch head token"]:
        """Return what each token of a chunk finds of the weight that entered the chunk, as a logarithm."""
        step = torch.arange(length, device=mass.device, dtype=mass.dtype)
        return mass.unsqueeze(-1) + step * self._log_decay[heads, None]

    def _leaving(self, key: Float[Tensor, "batch token head"], heads: slice) -> Float[Tensor, "batch head token"]:
        """Return what the chunk's end finds of each token's weight, as a logarithm."""
        key = key.transpose(1, 2)
        step = torch.arange(key.shape[-1], device=key.device, dtype=key.dtype)
        return key + step.flip(0) * self._log_decay[heads, None]

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._key.new_zeros(shape, dtype=self._dtype)
