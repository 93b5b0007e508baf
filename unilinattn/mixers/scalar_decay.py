"""Scalar decay: alpha_ij = (q_i . k_j) exp(G_i - G_j) for j <= i, one decay a head."""

from collections.abc import Iterator
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.reduced_map.dense import Taps
from unilinattn.kernels.subnormal import decays
from unilinattn.mixers.base import ALL, CoreMixer, check_factors
from unilinattn.mixers.diagonal_decay import DiagonalDecay


class ScalarDecay(CoreMixer):
    """The state-space dual's hidden attention: linear attention whose memory fades by one number a head and token.

    Serves Mamba-2 / SSD (query = C and key = B in groups that consecutive heads share, key_scale = delta),
    RetNet, lightning and plain linear attention. LaTIM Eq. 13, Eq. 18.

    `apply` and `adjoint` take O(L H (chunk + N)) time for each channel, `rows` O(L (N + H)) a row.

    Args:
        query, key: (batch, length, group, state); heads a multiple of groups.
        log_decay: (batch, length, head), at most 0.
        key_scale: (batch, length, head), multiplies each head's key.
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
        """Hold the factors; raise `FactorError` if one of them holds NaN or infinity."""
        check_factors(query=query, key=key, log_decay=log_decay, key_scale=key_scale)
        self._query, self._key, self._log_decay = query, key, log_decay
        self._key_scale = torch.ones_like(log_decay) if key_scale is None else key_scale

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        batch, length, heads = self._log_decay.shape
        return batch, heads, length, length

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Run the chunked recurrence forward in time."""
        scaled = value * self._key_scale.unsqueeze(-1)
        return implementation("scan", self._log_decay).scalar_scan(self._query, self._key, self._log_decay, scaled)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the chunked recurrence backward in time."""
        passed = implementation("scan", self._log_decay).scalar_scan_adjoint(
            self._query, self._key, self._log_decay, grad
        )
        return passed * self._key_scale.unsqueeze(-1)

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Fill selected rows from the closed form: O(L (N + H)) for each."""
        query = self._query.gather(1, index[:, :, None, None].expand(-1, -1, *self._query.shape[2:]))
        scores = repeat_groups(torch.einsum("bign,bjgn->bgij", query, self._key), self.heads, 1)
        hidden = torch.arange(self.shape[2], device=index.device) > index[:, :, None]
        # From each key to the row: a sum of the steps between them, never a difference of two longer sums.
        between = self._log_decay[:, None].masked_fill(hidden[..., None], 0)
        exponent = torch.nn.functional.pad(between[:, :, 1:].flip(2).cumsum(2).flip(2), (0, 0, 0, 1))
        decay = decays(exponent.masked_fill(hidden[..., None], -torch.inf)) * self._key_scale[:, None]
        return scores * decay.permute(0, 3, 1, 2)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Fill a block by one product of queries and keys a group, scaled by each head's decays."""
        row, col = (range(self.shape[2])[part] for part in (rows, cols))
        if not row or not col:
            return self._like((self.shape[0], len(range(self.heads)[heads]), len(row), len(col)))
        hull = slice(row[0], row[-1] + 1), slice(col[0], col[-1] + 1)
        block = self._fading.tile(*hull, heads)
        owner = torch.arange(self.heads, device=block.device)[heads] // (self.heads // self._query.shape[2])
        first, last = int(owner[0]), int(owner[-1])
        scores = self._scores(*hull, slice(first, last + 1))
        block = block * (scores if first == last else scores[:, owner - first])
        return block[:, :, :: row.step, :: col.step]

    def reduced_rows(
        self, rows: int, left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Float[Tensor, "batch row key"]]:
        """Yield sum_c left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c], a group's product times reduced decays.

        The inner dimension is N a group, and one a head or, with weights, a channel.
        """
        length, groups = self.shape[2], self._query.shape[2]
        factors = [*(taps or {}).values(), *([] if left is None else [left])]
        channels = max((factor.shape[2] for factor in factors), default=self.heads)
        lags = {0: None} if taps is None else taps
        parts = [
            [
                self._fading_of(group, channels).reduced_rows(rows, *_of_group(group, groups, left, tap))
                for tap in lags.values()
            ]
            for group in range(groups)
        ]
        for start in range(0, length, rows):
            part = slice(start, min(start + rows, length))
            scores = self._scores(part, ALL)
            total = scores.new_zeros(())
            for group, by_lag in enumerate(parts):
                for lag, fading in zip(lags, by_lag, strict=True):
                    landed = scores[:, group] * next(fading)
                    total = total + torch.nn.functional.pad(landed[..., lag:], (0, min(lag, length)))
            yield total

    def _scores(self, rows: slice, cols: slice, groups: slice = ALL) -> Float[Tensor, "batch group row col"]:
        return torch.einsum("bign,bjgn->bgij", self._query[:, rows, groups], self._key[:, cols, groups])

    @cached_property
    def _fading(self) -> DiagonalDecay:
        """exp(G_i - G_j) times the key's scale, for each head."""
        return self._fading_of(None, self.heads)

    def _fading_of(self, group: int | None, channels: int) -> DiagonalDecay:
        """Return the decays of all heads or of a group's, repeated for the channels that a head serves."""
        groups = self._query.shape[2]
        step = self.heads // groups
        heads = ALL if group is None else slice(group * step, (group + 1) * step)
        decay, scale = (
            t[:, :, heads].repeat_interleave(channels // self.heads, dim=2) for t in (self._log_decay, self._key_scale)
        )
        one = decay.new_ones(1, 1, 1, 1).expand(*decay.shape[:2], 1, 1)
        return DiagonalDecay(one, one, decay.unsqueeze(-1), key_scale=scale)

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return (q_i . k_i) times the key's scale."""
        own = repeat_groups((self._query * self._key).sum(-1), self.heads, 2)
        return (own * self._key_scale).transpose(1, 2)

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._query.new_zeros(shape)


def _of_group(group: int, groups: int, left: Tensor | None, tap: Tensor | None) -> tuple[Tensor | None, Taps | None]:
    """Return the weights of a group's channels."""
    left, tap = (None if t is None else t.unflatten(2, (groups, -1))[:, :, group] for t in (left, tap))
    return left, None if tap is None else {0: tap}
