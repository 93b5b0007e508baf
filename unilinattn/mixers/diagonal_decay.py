"""Diagonal decay: alpha_ij = sum_n q_in exp(G_in - G_jn) k_jn for j <= i, one decay a state coordinate."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.kernels.scan.tiled import CHUNK, recur
from unilinattn.mixers.base import ALL, CoreMixer, check_factors

PAIR_BUDGET = 1 << 22
"""Elements of the (row, key, head, state) product that `tile` and `rows` hold at once."""


class DiagonalDecay(CoreMixer):
    """The selective state space's hidden attention: a state vector a head, each coordinate with its own decay.

    Serves S6 / Mamba-1 (heads = channels, query = C and key = B shared by all heads, key_scale = delta,
    log_decay = delta with rate = A), GLA, HGRN2 and, with one state, RG-LRU. HMA ACL Eq. 14-16.

    `apply`, `adjoint` and `rows` take O(L H N) time and hold the states of one chunk of tokens.

    Args:
        query, key: (batch, length, group, state); heads a multiple of groups, consecutive heads share one.
        log_decay: (batch, length, head, state), or (batch, length, head, 1) with a `rate`; at most 0 after `rate`.
        key_scale: (batch, length, head), multiplies the key.
        rate: (head, state), multiplies `log_decay`.
        reset: (batch, length), true where a segment begins: a decay of exactly zero, all before it is forgotten.
    """

    structure = "diagonal decay"
    causal = True
    data_controlled = True

    def __init__(
        self,
        query: Float[Tensor, "batch length groupq state"],
        key: Float[Tensor, "batch length groupk state"],
        log_decay: Float[Tensor, "batch length head staten"],
        *,
        key_scale: Float[Tensor, "batch length head"] | None = None,
        rate: Float[Tensor, "head state"] | None = None,
        reset: Bool[Tensor, "batch length"] | None = None,
    ) -> None:
        """Hold the factors; raise `FactorError` if one of them holds NaN or infinity."""
        check_factors(query=query, key=key, log_decay=log_decay, key_scale=key_scale, rate=rate)
        self._query, self._key, self._log_decay = query, key, log_decay
        self._key_scale, self._rate, self._reset = key_scale, rate, reset

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        batch, length, heads, _ = self._log_decay.shape
        return batch, heads, length, length

    def factors(self, tokens: slice = ALL, heads: slice = ALL) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key, log-decay of some tokens and heads, broadcastable to (batch, token, head, state)."""
        query, key = (_of_heads(factor[:, tokens], heads, self.heads) for factor in (self._query, self._key))
        decay = self._log_decay[:, tokens, heads]
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
            states = recur(state, self._kept(decay, tokens), key.unsqueeze(-1) * value[:, tokens].unsqueeze(-2))
            outputs.append((query.unsqueeze(-2) @ states).squeeze(-2))
            state = states[:, -1]
        return torch.cat(outputs, dim=1)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the recurrence backward in time, reading with the keys what the queries wrote."""
        state = grad.new_zeros(1, 1, 1, 1)
        later = self._log_decay.new_ones(1, 1, 1, 1)
        outputs = []
        for tokens in reversed(self._chunks()):
            query, key, decay = self.factors(tokens)
            kept = self._kept(decay, tokens)
            first, rest = kept[:, :1], kept[:, 1:]
            reverse = torch.cat([rest, later.expand_as(first)], dim=1).flip(1)
            states = recur(state, reverse, (query.unsqueeze(-1) * grad[:, tokens].unsqueeze(-2)).flip(1))
            outputs.append((key.unsqueeze(-2) @ states.flip(1)).squeeze(-2))
            state, later = states[:, -1], first
        return torch.cat(outputs[::-1], dim=1)

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Fill selected rows from the closed form: O(L H N) for each."""
        return torch.cat([self._pairs(index, part) for part in self._parts(index.shape[1])], dim=1)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Fill a block row by row, O(rows x cols x heads x state): R_i = exp(g_i) R_{i-1}, products of at most 1."""
        first, last, step = rows.indices(self.shape[2])
        filled = torch.cat([self._descend(first, last, part) for part in self._parts(1, heads)], dim=1)
        return filled[:, :, ::step, cols]

    def _kept(self, log_decay: Tensor, tokens: slice = ALL) -> Float[Tensor, "batch token head state"]:
        """Return what each step keeps of the state: exp(g), nothing where a segment begins."""
        kept = log_decay.exp()
        return kept if self._reset is None else kept.masked_fill(self._reset[:, tokens, None, None], 0)

    def _pairs(self, index: Int[Tensor, "batch row"], heads: slice) -> Float[Tensor, "batch head row key"]:
        query, key, decay = self.factors(heads=heads)
        hidden = torch.arange(self.shape[2], device=index.device) > index[:, :, None]
        if self._reset is not None:
            segment = self._reset.cumsum(1)
            hidden = hidden | (segment.gather(1, index).unsqueeze(2) != segment.unsqueeze(1))
        # A float32 sum over thousands of tokens loses the digits that its difference is made of.
        running = decay.double().cumsum(1)
        exponent = (_at(running, index).unsqueeze(2) - running[:, None]).to(query.dtype)
        decayed = exponent.masked_fill(hidden[..., None, None], -torch.inf).exp() * key[:, None]
        return (_at(query, index).unsqueeze(2) * decayed).sum(-1).permute(0, 3, 1, 2)

    def _descend(self, first: int, last: int, heads: slice) -> Float[Tensor, "batch head row key"]:
        query, key, decay = self.factors(heads=heads)
        batch, length, count, state = decay.shape
        factor, key = self._kept(decay), key.expand(-1, -1, count, -1)
        query = query.expand(-1, -1, count, -1)
        memory = key.new_zeros(batch, count, state, 0)
        rows = [key.new_zeros(batch, count, 0, length)]
        for i in range(last):
            memory = torch.cat([memory * factor[:, i, ..., None], key[:, i, ..., None]], dim=-1)
            if i >= first:
                row = (query[:, i].unsqueeze(-2) @ memory).squeeze(-2)
                rows.append(torch.nn.functional.pad(row, (0, length - i - 1)).unsqueeze(2))
        return torch.cat(rows, dim=2)

    def _parts(self, rows: int, heads: slice = ALL) -> list[slice]:
        """Split heads so that (row, key, head, state) products stay within the budget."""
        batch, total, length, _ = self.shape
        chosen = range(total)[heads]
        step = max(1, PAIR_BUDGET // max(1, batch * rows * length * self._query.shape[-1]))
        # One empty part for no heads at all, so that there is a block to return.
        parts = [chosen[start : start + step] for start in range(0, max(1, len(chosen)), step)]
        return [slice(part.start, part.stop, part.step) for part in parts]

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return q_i . k_i: no decay stands between a token and itself."""
        query, key, _ = self.factors()
        return (query * key).sum(-1).transpose(1, 2).expand(-1, self.heads, -1)

    def _chunks(self) -> list[slice]:
        length = self.shape[2]
        return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._query.new_zeros(shape)


def _of_heads(factor: Float[Tensor, "batch token group state"], heads: slice, total: int) -> Tensor:
    """Pick a factor's heads, of which each group serves consecutive ones; one group is left to broadcast."""
    groups = factor.shape[2]
    if groups == 1:
        return factor
    if groups == total:
        return factor[:, :, heads]
    return factor[:, :, torch.arange(total, device=factor.device)[heads] // (total // groups)]


def _at(factor: Tensor, index: Int[Tensor, "batch row"]) -> Tensor:
    """Gather the tokens of a factor (batch, token, head, state)."""
    return factor.gather(1, index[:, :, None, None].expand(-1, -1, *factor.shape[2:]))
