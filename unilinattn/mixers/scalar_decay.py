"""Scalar decay: alpha_ij = (q_i . k_j) exp(G_i - G_j) for j <= i, one decay a head."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.kernels.scan.tiled import scalar_scan, scalar_scan_adjoint, spread
from unilinattn.mixers.base import ALL, CoreMixer, check_factors


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
        return scalar_scan(self._query, self._key, self._log_decay, value * self._key_scale.unsqueeze(-1))

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the chunked recurrence backward in time."""
        passed = scalar_scan_adjoint(self._query, self._key, self._log_decay, grad)
        return passed * self._key_scale.unsqueeze(-1)

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Fill selected rows from the closed form: O(L (N + H)) for each."""
        return self._block(index, ALL, ALL)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Fill a block by one product of queries and keys a group, scaled by each head's decays."""
        batch, _, length, _ = self.shape
        position = torch.arange(length, device=self._query.device)[rows]
        return self._block(position.expand(batch, -1), cols, heads)

    def _block(self, index: Int[Tensor, "batch row"], cols: slice, heads: slice) -> Float[Tensor, "batch head row col"]:
        query = self._query.gather(1, index[:, :, None, None].expand(-1, -1, *self._query.shape[2:]))
        scores = torch.einsum("bign,bjgn->bgij", query, self._key[:, cols])
        scores = spread(scores, self.heads, 1)[:, heads]
        # A float32 sum over thousands of tokens loses the digits that its difference is made of.
        running = self._log_decay[:, :, heads].double().cumsum(1).transpose(1, 2)
        at_row = running.gather(2, index[:, None, :].expand(-1, running.shape[1], -1))
        exponent = at_row.unsqueeze(-1) - running[:, :, None, cols]
        position = torch.arange(self.shape[2], device=scores.device)[cols]
        future = position > index[:, None, :, None]
        decay = exponent.masked_fill(future, -torch.inf).to(scores.dtype).exp()
        return scores * decay * self._key_scale[:, cols, heads].transpose(1, 2).unsqueeze(-2)

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return (q_i . k_i) times the key's scale."""
        own = spread((self._query * self._key).sum(-1), self.heads, 2)
        return (own * self._key_scale).transpose(1, 2)

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._query.new_zeros(shape)
