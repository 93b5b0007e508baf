"""Scalar decay: alpha_ij = (q_i . k_j) exp(G_i - G_j) for j <= i, one decay per head."""

from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.backend import implementation, uses_triton
from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.reduced_map.dense import Taps
from unilinattn.kernels.scalar_map.tiled import scalar_map
from unilinattn.kernels.scan.memories import Diagonal, Scalar
from unilinattn.kernels.subnormal import decays, flushed_
from unilinattn.mixers.base import ALL, checked_factors
from unilinattn.mixers.continued import Continued, extended
from unilinattn.mixers.diagonal_decay import DiagonalDecay


class ScalarDecay(Continued):
    """The hidden attention of the state-space dual: linear attention with one decay per head and token.

    Serves Mamba-2 / SSD (query = C and key = B in groups that consecutive heads share, key_scale = delta),
    RetNet, lightning and plain linear attention. LaTIM Eq. 13, Eq. 18.

    `apply` and `adjoint` take time O(L H (chunk + N)) per channel, `rows` takes O(L (N + H)) per row.

    Args:
        query, key: (batch, length, group, state); heads are a multiple of groups, and consecutive heads share one.
        log_decay: (batch, length, head), at most 0.
        key_scale: (batch, length, head), multiplies the key; None for 1.
    """

    structure = "scalar decay"
    causal = True
    data_controlled = True

    def __init__(
        self,
        query: Float[Tensor, "batch length group state"],
        key: Float[Tensor, "batch length group state"],
        log_decay: Float[Tensor, "batch length head"],
        *,
        key_scale: Float[Tensor, "batch length head"] | None = None,
    ) -> None:
        """Raise `FactorError` if a factor has NaN or infinite entries."""
        query, key, log_decay, key_scale = checked_factors(
            query=query, key=key, log_decay=log_decay, key_scale=key_scale
        )
        self.query, self.key, self.log_decay = query, key, log_decay
        self.key_scale = torch.ones_like(log_decay) if key_scale is None else key_scale

    @property
    def _memory(self) -> Scalar:
        return Scalar(self.query, self.key, self.log_decay, self.key_scale)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        batch, length, heads = self.log_decay.shape
        return batch, heads, length, length

    def factors(self, tokens: slice = ALL, heads: slice = ALL) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, scaled key and log-decay, broadcastable to (batch, token, head, state)."""
        return Diagonal(self.query, self.key, self.log_decay.unsqueeze(-1), self.key_scale).at(tokens, heads)

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Run the chunked recurrence forward in time."""
        return implementation("scan", self.log_decay).scalar_scan(self._memory, value)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the transposed recurrence backward in time."""
        return implementation("scan", self.log_decay).scalar_scan_adjoint(self._memory, grad)

    def with_ends(self) -> "ScalarDecay":
        """Return the mixer with tokens at the start that write the state, and at the end that read it."""
        size = self.state_size
        units = torch.eye(size, device=self.query.device)
        return ScalarDecay(
            extended(self.query, first=0.0, last=units, size=size),
            extended(self.key, first=units, last=0.0, size=size),
            extended(self.log_decay, first=0.0, last=0.0, size=size),
            key_scale=extended(self.key_scale, first=1.0, last=1.0, size=size),
        )

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Return the rows at the positions `index`, from the closed form."""
        query = self.query.gather(1, index[:, :, None, None].expand(-1, -1, *self.query.shape[2:]))
        scores = repeat_groups(torch.einsum("bign,bjgn->bgij", query, self.key), self.heads, 1)
        later = torch.arange(self.shape[2], device=index.device) > index[:, :, None]
        # The steps between a key and the row are summed directly: a difference of two longer sums loses digits.
        steps = self.log_decay[:, None].masked_fill(later[..., None], 0)
        exponent = functional.pad(steps[:, :, 1:].flip(2).cumsum(2).flip(2), (0, 0, 0, 1))
        decay = decays(exponent.masked_fill(later[..., None], -torch.inf)) * self.key_scale[:, None]
        return scores * decay.permute(0, 3, 1, 2)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Return a block: one product of queries and keys per group, times the decays of each head."""

        def fill(rows: slice, cols: slice) -> Tensor:
            block = self.decay_mixer.tile(rows, cols, heads)
            group = torch.arange(self.heads, device=block.device)[heads] // (self.heads // self.query.shape[2])
            first, last = int(group[0]), int(group[-1])
            groups = slice(first, last + 1)
            scores = torch.einsum("bign,bjgn->bgij", self.query[:, rows, groups], self.key[:, cols, groups])
            return block * (scores if first == last else scores[:, group - first])

        return self._block(rows, cols, heads, fill)

    def mean_map(self) -> Float[Tensor, "batch query key"] | None:
        """Write products of scores and decays; None on a GPU."""
        if uses_triton(self.log_decay):
            return None
        return flushed_(scalar_map(self._memory._replace(key_scale=self.key_scale / self.heads)))

    def reduced_parts(
        self, blocks: Iterable[slice], left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Float[Tensor, "batch row key"]]:
        """Yield `CoreMixer.reduced_parts`: products of the groups' scores and of the heads' decays."""
        kernel = implementation("scalar_map", self.log_decay).scalar_rows
        yield from kernel(self._memory, left, taps, blocks=blocks)

    @cached_property
    def decay_mixer(self) -> DiagonalDecay:
        """The mixer of the decays only: exp(G_i - G_j) times the key's scale."""
        unit = self.log_decay.new_ones(1, 1, 1, 1).expand(*self.log_decay.shape[:2], 1, 1)
        return DiagonalDecay(unit, unit, self.log_decay.unsqueeze(-1), key_scale=self.key_scale)

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return (q_i . k_i) times the key's scale."""
        scores = repeat_groups((self.query * self.key).sum(-1), self.heads, 2)
        return (scores * self.key_scale).transpose(1, 2)
