"""Diagonal decay: alpha_ij = sum_n q_in exp(G_in - G_jn) k_jn for j <= i, one decay a state coordinate."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.kernels.reduced_map.dense import Taps, of_tokens
from unilinattn.kernels.reduced_map.tiled import held_numbers, reduced_rows
from unilinattn.kernels.scan.pairs import LEAF, from_token, pairs
from unilinattn.kernels.scan.tiled import CHUNK, recur
from unilinattn.mixers.base import ALL, Block, CoreMixer, Cost, check_factors

PAIR_BUDGET = 1 << 22
"""Elements that a product over (head, state) holds at once in `tile` and `rows`."""


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
        """Return query, key, log-decay of some tokens and heads, broadcastable to (batch, token, head, state).

        The log-decay is -inf where a segment begins.
        """
        query, key = (_of_heads(factor[:, tokens], heads, self.heads) for factor in (self._query, self._key))
        decay = self._log_decay[:, tokens, heads]
        if self._key_scale is not None:
            key = key * self._key_scale[:, tokens, heads, None]
        if self._rate is not None:
            decay = decay * self._rate[heads]
        if self._reset is not None:
            decay = decay.masked_fill(self._reset[:, tokens, None, None], -torch.inf)
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
        later = self._log_decay.new_ones(1, 1, 1, 1)
        outputs = []
        for tokens in reversed(self._chunks()):
            query, key, decay = self.factors(tokens)
            kept = decay.exp()
            first, rest = kept[:, :1], kept[:, 1:]
            reverse = torch.cat([rest, later.expand_as(first)], dim=1).flip(1)
            states = recur(state, reverse, (query.unsqueeze(-1) * grad[:, tokens].unsqueeze(-2)).flip(1))
            outputs.append((key.unsqueeze(-2) @ states.flip(1)).squeeze(-2))
            state, later = states[:, -1], first
        return torch.cat(outputs[::-1], dim=1)

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Fill selected rows from the closed form: O(L H N) for each."""
        length = self.shape[2]
        return torch.cat([self._pairs(index, part) for part in self._parts(index.shape[1] * length)], dim=1)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Fill a block: what lies before its first row by one product a head, the rest by halves."""
        row, col = (range(self.shape[2])[part] for part in (rows, cols))
        if not row or not col:
            return self._like((self.shape[0], len(range(self.heads)[heads]), len(row), len(col)))
        hull = slice(row[0], row[-1] + 1), slice(col[0], col[-1] + 1)
        size = LEAF * len(row) + len(col)
        block = torch.cat([self._block(*hull, part) for part in self._parts(size, heads)], dim=1)
        return block[:, :, :: row.step, :: col.step]

    def weighted(
        self, part: slice, block: Block, cols: slice, left: Tensor | None, taps: Taps
    ) -> Float[Tensor, "batch channel row col"]:
        """Return left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c]: where c is a head and j is far, one product."""
        reach = max(taps)
        if cols.stop + reach > part.start or {t.shape[2] for t in taps.values()} != {self.heads}:
            return super().weighted(part, block, cols, left, taps)
        query, _, decay = self.factors(part)
        read = decay.cumsum(1).exp_().mul_(query)
        read = read if left is None else read * of_tokens(left, part).unsqueeze(-1)
        faded, width = self._written(slice(cols.start, cols.stop + reach), part.start), cols.stop - cols.start
        write = torch.zeros_like(faded[:, :width])
        for lag, tap in taps.items():
            tap = of_tokens(tap, slice(cols.start + lag, cols.stop + lag)).unsqueeze(-1)
            write = torch.addcmul(write, faded[:, lag : lag + width], tap)
        return read.transpose(1, 2) @ write.permute(0, 2, 3, 1)

    def reduced_rows(
        self, rows: int, left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Float[Tensor, "batch row key"]]:
        """Yield sum_c left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c] as products with an inner H N."""
        weights = [*(taps or {}).values(), *([] if left is None else [left])]
        if any(weight.shape[2] != self.heads for weight in weights):
            yield from super().reduced_rows(rows, left, taps)
            return
        batch, heads, length, _ = self.shape
        shape = (batch, length, heads, self._query.shape[-1])
        for _, block in reduced_rows(self.factors, shape, left, taps, rows=rows):
            yield block

    def reduced_size(self, rows: int, channels: int) -> int:
        """Return how many numbers `reduced_rows` holds: the factors of one tile of heads."""
        batch, heads, length, _ = self.shape
        if channels not in (1, heads):
            return super().reduced_size(rows, channels)
        return held_numbers(rows, (batch, length, heads, self._query.shape[-1]))

    def _block(self, rows: slice, cols: slice, heads: slice) -> Float[Tensor, "batch head row col"]:
        cut, parts = rows.start, []
        query, _, decay = self.factors(rows, heads)
        batch, _, heads_here, _ = decay.shape
        if cols.start < cut:
            read = decay.cumsum(1).exp() * query
            write = self._written(slice(cols.start, min(cols.stop, cut)), cut, heads)
            parts.append(torch.einsum("bihn,bjhn->bhij", read, write))
        if cols.stop > cut:
            start = max(cols.start, cut)
            near = query.new_zeros(batch, heads_here, rows.stop - cut, cols.stop - start)
            if start < rows.stop:
                query, key, decay = self.factors(slice(start, rows.stop), heads)
                square = pairs(query.expand_as(decay), key.expand_as(decay), decay)[..., : cols.stop - start]
                near[:, :, start - cut :, : square.shape[-1]] = square
            parts.append(near)
        return torch.cat(parts, dim=-1)

    def _written(self, tokens: slice, cut: int, heads: slice = ALL) -> Float[Tensor, "batch token head state"]:
        """Return what is left at the beginning of token `cut` of the keys written before it."""
        _, key, decay = self.factors(tokens, heads)
        exponent = from_token(decay)
        if cut > tokens.stop:
            exponent = exponent + self._faded(slice(tokens.stop, cut), heads)
        return exponent.exp() * key

    def _faded(self, tokens: slice, heads: slice) -> Float[Tensor, "batch 1 head state"]:
        """Return the log-decay across tokens."""
        total = self._log_decay[:, tokens, heads].sum(1, keepdim=True)
        total = total if self._rate is None else total * self._rate[heads]
        return (
            total
            if self._reset is None
            else total.masked_fill(self._reset[:, tokens, None, None].any(1, True), -torch.inf)
        )

    def _pairs(self, index: Int[Tensor, "batch row"], heads: slice) -> Float[Tensor, "batch head row key"]:
        query, key, decay = self.factors(heads=heads)
        hidden = torch.arange(self.shape[2], device=index.device) > index[:, :, None]
        # From each key to the row: a sum of the steps between them, never a difference of two longer sums.
        between = decay[:, None].masked_fill(hidden[..., None, None], 0)
        exponent = torch.nn.functional.pad(between[:, :, 1:].flip(2).cumsum(2).flip(2), (0, 0, 0, 0, 0, 1))
        decayed = exponent.masked_fill(hidden[..., None, None], -torch.inf).exp() * key[:, None]
        return (_at(query, index).unsqueeze(2) * decayed).sum(-1).permute(0, 3, 1, 2)

    def _parts(self, size: int, heads: slice = ALL) -> list[slice]:
        """Split heads so that so many vectors over (batch, head, state) stay within the budget."""
        chosen = range(self.heads)[heads]
        step = max(1, PAIR_BUDGET // max(1, self.shape[0] * size * self._query.shape[-1]))
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

    def rows_cost(self, rows: int) -> Cost:
        """Return what `rows` costs: a few vectors over (token, head, state) for each row, some heads at a time."""
        batch, heads, length, _ = self.shape
        every = batch * rows * length * heads * self.state_size
        return Cost(6 * min(every, PAIR_BUDGET) + 2 * batch * rows * heads * length, 2 * every)

    def map_operations(self, channels: int) -> int:
        """Return how much `reduced_rows` multiplies: half of one product with an inner H N."""
        batch, heads, length, _ = self.shape
        if channels not in (1, heads):
            return super().map_operations(channels)
        return batch * length * (length + 64) // 2 * heads * self.state_size


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
