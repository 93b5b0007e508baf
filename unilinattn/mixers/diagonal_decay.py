"""Diagonal decay: alpha_ij = sum_n q_in exp(G_in - G_jn) k_jn for j <= i, one decay a state coordinate."""

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.scan.tiled import CHUNK, recur
from unilinattn.mixers.base import ALL, CoreMixer, check_factors

PAIR_BUDGET = 1 << 24
"""Elements of the (row, col, head, state) product that `tile` holds at once."""


class DiagonalDecay(CoreMixer):
    """The selective state space's hidden attention: a state vector a head, each coordinate with its own decay.

    Serves S6 / Mamba-1 (heads = channels, query = C and key = B shared by all heads, key_scale = delta,
    log_decay = delta with rate = A), GLA and HGRN2. HMA ACL Eq. 14-16.

    `apply`, `adjoint` and `rows` take O(L H N) time and hold the states of one chunk of tokens.

    Args:
        query, key: (batch, length, head or 1, state).
        log_decay: (batch, length, head, state), or (batch, length, head, 1) with a `rate`; at most 0 after `rate`.
        key_scale: (batch, length, head), multiplies the key.
        rate: (head, state), multiplies `log_decay`.
    """

    structure = "diagonal decay"
    causal = True
    data_controlled = True

    def __init__(
        self,
        query: Float[Tensor, "batch length headq state"],
        key: Float[Tensor, "batch length headk state"],
        log_decay: Float[Tensor, "batch length head staten"],
        *,
        key_scale: Float[Tensor, "batch length head"] | None = None,
        rate: Float[Tensor, "head state"] | None = None,
    ) -> None:
        """Hold the factors; raise `FactorError` if one of them holds NaN or infinity."""
        check_factors(query=query, key=key, log_decay=log_decay, key_scale=key_scale, rate=rate)
        self._query, self._key, self._log_decay = query, key, log_decay
        self._key_scale, self._rate = key_scale, rate

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        batch, length, heads, _ = self._log_decay.shape
        return batch, heads, length, length

    def factors(self, tokens: slice = ALL, heads: slice = ALL) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key, log-decay of some tokens and heads, broadcastable to (batch, token, head, state)."""
        query = self._query if self._query.shape[2] == 1 else self._query[:, :, heads]
        key = self._key if self._key.shape[2] == 1 else self._key[:, :, heads]
        query, key, decay = query[:, tokens], key[:, tokens], self._log_decay[:, tokens, heads]
        if self._key_scale is not None:
            key = key * self._key_scale[:, tokens, heads, None]
        if self._rate is not None:
            decay = decay * self._rate[heads]
        return query, key, decay

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Run the recurrence forward in time: O(L H N) for each channel."""
        state = value.new_zeros(1, 1, 1, 1)
        outputs = []
        for tokens in self._chunks():
            query, key, decay = self.factors(tokens)
            states = recur(state, decay.exp(), key.unsqueeze(-1) * value[:, tokens].unsqueeze(-2))
            outputs.append((query.unsqueeze(-2) @ states).squeeze(-2))
            state = states[:, -1]
        return torch.cat(outputs, dim=1)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the recurrence backward in time, reading with the keys what the queries wrote."""
        state = grad.new_zeros(1, 1, 1, 1)
        later = self._log_decay.new_zeros(1, 1, 1, 1)
        outputs = []
        for tokens in reversed(self._chunks()):
            query, key, decay = self.factors(tokens)
            first, rest = decay[:, :1], decay[:, 1:]
            reverse = torch.cat([rest, later.expand_as(first)], dim=1).flip(1).exp()
            states = recur(state, reverse, (query.unsqueeze(-1) * grad[:, tokens].unsqueeze(-2)).flip(1))
            outputs.append((key.unsqueeze(-2) @ states.flip(1)).squeeze(-2))
            state, later = states[:, -1], first
        return torch.cat(outputs[::-1], dim=1)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Fill a block pair by pair, O(rows x cols x heads x state), a bounded number of heads at a time."""
        batch, total, length, _ = self.shape
        row, col = (torch.arange(length, device=self._query.device)[s] for s in (rows, cols))
        future = col[None, :] > row[:, None]
        selected = range(total)[heads]
        step = max(1, PAIR_BUDGET // max(1, batch * len(row) * len(col) * self._query.shape[-1]))
        blocks = [self._query.new_zeros(batch, 0, len(row), len(col))]
        for start in range(selected.start, selected.stop, step):
            part = slice(start, min(start + step, selected.stop))
            query, key, decay = self.factors(heads=part)
            # A float32 sum over thousands of tokens loses the digits that its difference is made of.
            running = decay.double().cumsum(1)
            exponent = running[:, row, None] - running[:, None, col]
            exponent = exponent.masked_fill(future[None, :, :, None, None], -torch.inf).to(query.dtype)
            pairs = query[:, row, None] * exponent.exp() * key[:, None, col]
            blocks.append(pairs.sum(-1).permute(0, 3, 1, 2))
        return torch.cat(blocks, dim=1)

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return q_i . k_i: no decay stands between a token and itself."""
        query, key, _ = self.factors()
        return (query * key).sum(-1).transpose(1, 2)

    def _chunks(self) -> list[slice]:
        length = self.shape[2]
        return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._query.new_zeros(shape)
