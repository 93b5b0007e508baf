"""Diagonal decay: alpha_ij = sum_n q_in exp(G_in - G_jn) k_jn for j <= i, one decay a state coordinate."""

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.groups import of_heads
from unilinattn.kernels.reduced_map.dense import Taps, of_tokens
from unilinattn.kernels.reduced_map.tiled import Places, square
from unilinattn.kernels.row_product.naive import Sign
from unilinattn.kernels.scan.pairs import LEAF, from_token, pairs
from unilinattn.kernels.scan.tiled import STEPS, diagonal_factors
from unilinattn.kernels.subnormal import decays, flushed_
from unilinattn.memory import allowed
from unilinattn.mixers.base import ALL, Block, CoreMixer, check_factors

SQUARES = 128
"""Heads whose squares of a block of rows are filled at once."""

PAIR_BUDGET = 1 << 22
"""Most elements that a product over (head, state) holds at once in `tile` and `rows`, whatever is allowed."""


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
        self._raw = (query, key, log_decay, key_scale, rate, reset)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        batch, length, heads, _ = self._log_decay.shape
        return batch, heads, length, length

    def factors(self, tokens: slice = ALL, heads: slice = ALL) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key, log-decay of some tokens and heads, broadcastable to (batch, token, head, state).

        The log-decay is -inf where a segment begins.
        """
        return diagonal_factors(*self._raw, tokens, heads)

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Run the recurrence forward in time: O(L H N) for each channel."""
        return implementation("scan", self._log_decay).diagonal_scan(*self._raw, value)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the recurrence backward in time, reading with the keys what the queries wrote."""
        return implementation("scan", self._log_decay).diagonal_scan_adjoint(*self._raw, grad)

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Carry one-hot vectors backward in time, some at once: O(L H N) for each row."""
        batch, heads, length, _ = self.shape
        step = max(1, self._budget // max(1, batch * min(length, STEPS) * heads * self._query.shape[-1]))
        return torch.cat([super(DiagonalDecay, self).rows(part) for part in index.split(step, dim=1)], dim=2)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Fill a block: what lies before its first row by one product a head, the rest by halves."""
        row, col = (range(self.shape[2])[part] for part in (rows, cols))
        if not row or not col:
            return self._like((self.shape[0], len(range(self.heads)[heads]), len(row), len(col)))
        hull = slice(row[0], row[-1] + 1), slice(col[0], col[-1] + 1)
        size = LEAF * len(row) + len(col)
        block = torch.cat([self._block(*hull, part) for part in self._parts(size, heads)], dim=1)
        return block[:, :, :: row.step, :: col.step]

    def weighted_blocks(self, rows: int, left: Tensor | None, taps: Taps) -> Iterator[tuple[slice, Block]]:
        """Yield left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c] as `blocks`; where c is a head, by products."""
        if any(tap.shape[2] != self.heads for tap in taps.values()):
            yield from super().weighted_blocks(rows, left, taps)
            return
        for start in range(0, self.shape[2], rows):
            part = slice(start, min(start + rows, self.shape[2]))
            near, read = self._squares(part, left, taps)
            yield part, partial(self._near_and_far, part, near, read, taps)

    def _squares(
        self, tokens: slice, left: Tensor | None, taps: Taps
    ) -> tuple[Float[Tensor, "batch head row landed"], Float[Tensor, "batch head row state"]]:
        """Return `square` of each head by itself, some heads at a time."""
        batch, count = self.shape[0], tokens.stop - tokens.start
        near = self._like((batch, self.heads, count, count + max(taps)))
        read = self._like((batch, self.heads, count, self._query.shape[-1]))
        places = Places()
        for first in range(0, self.heads, SQUARES):
            heads = slice(first, min(first + SQUARES, self.heads))
            query, key, decay = self.factors(tokens, heads)
            here = decay.shape[:3]
            weights = {lag: of_tokens(tap, tokens)[..., heads].expand(here) for lag, tap in taps.items()}
            weighing = None if left is None else of_tokens(left, tokens)[..., heads].expand(here)
            found = square(
                _head_by_head(query.expand_as(decay)),
                _head_by_head(key.expand_as(decay)),
                _head_by_head(decay),
                None if weighing is None else _head_by_head(weighing),
                {lag: _head_by_head(weight) for lag, weight in weights.items()},
                places=places,
            )
            near[:, heads], read[:, heads] = (t.unflatten(0, (batch, -1)) for t in found)
        return near, read

    def _near_and_far(
        self,
        part: slice,
        near: Float[Tensor, "batch head row landed"],
        read: Float[Tensor, "batch head row state"],
        taps: Taps,
        cols: slice,
    ) -> Float[Tensor, "batch head row col"]:
        """Return columns of a block of rows: one product for what lands before it, and what lands inside."""
        reach, width = max(taps), cols.stop - cols.start
        total: Tensor | None = None
        if cols.start < part.start:
            faded = self._written(slice(cols.start, min(cols.stop + reach, part.start)), part.start)
            write = faded.new_zeros(faded.shape[0], width, *faded.shape[2:])
            for lag, tap in taps.items():
                landed = of_tokens(tap, slice(cols.start + lag, min(cols.stop + lag, part.start))).unsqueeze(-1)
                there = faded[:, lag : lag + width]
                write[:, : there.shape[1]].addcmul_(there, landed)
            total = read @ flushed_(write).permute(0, 2, 3, 1)
        # The square's columns begin `reach` tokens before its rows; what is later than its last row is zero.
        begun, stop = part.start - reach, min(cols.stop, part.stop)
        first = max(cols.start, begun)
        if total is None:
            total = near.new_zeros(*near.shape[:3], width)
        if first < stop:
            total[..., first - cols.start : stop - cols.start] += near[..., first - begun : stop - begun]
        return total

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
        for _, block in implementation("reduced_map", self._log_decay).reduced_rows(
            self.factors, shape, left, taps, rows=rows
        ):
            yield block

    def row_product(
        self,
        row: Float[Tensor, "batch query"],
        weight: Float[Tensor, "batch query"],
        sign: Sign,
        rows: int,
        left: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Float[Tensor, "batch key"]:
        """Return sum_i row_i sign(weight_i m_ij) for the map m of `reduced_rows`, which is never held."""
        weights = [*(taps or {}).values(), *([] if left is None else [left])]
        if any(factor.shape[2] != self.heads for factor in weights):
            return super().row_product(row, weight, sign, rows, left, taps)
        batch, heads, length, _ = self.shape
        shape = batch, length, heads, self._query.shape[-1]
        kernel = implementation("row_product", self._log_decay).row_product
        found: Tensor = kernel(self.factors, shape, row, weight, left, taps, sign=sign, rows=rows)
        return found

    def _block(self, rows: slice, cols: slice, heads: slice) -> Float[Tensor, "batch head row col"]:
        cut, parts = rows.start, []
        query, _, decay = self.factors(rows, heads)
        batch, _, heads_here, _ = decay.shape
        if cols.start < cut:
            read = flushed_(decays(decay.cumsum(1)) * query)
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
        key = of_heads(self._key[:, tokens], heads, self.heads)
        if self._key_scale is not None:
            key = key * self._key_scale[:, tokens, heads, None]
        crossed = self._log_decay[:, tokens.stop : cut, heads].sum(1, keepdim=True)
        exponent = from_token(self._log_decay[:, tokens, heads]) + crossed
        # One number a head is summed before the rates of its coordinates multiply it.
        left = decays(exponent if self._rate is None else exponent * self._rate[heads])
        if self._reset is not None:
            later = self._reset[:, tokens.start : cut].flip(1).cumsum(1).flip(1)[:, 1:] > 0
            forgotten = torch.nn.functional.pad(later, (0, 1))[:, : key.shape[1]]
            left = left.masked_fill(forgotten[..., None, None], 0)
        return flushed_(left * key)

    @property
    def _budget(self) -> int:
        """Elements that a product over (head, state) holds at once: an eighth of what `max_memory` allows, at most."""
        return min(PAIR_BUDGET, allowed() // (8 * self._query.element_size()))

    def _parts(self, size: int, heads: slice = ALL) -> list[slice]:
        """Split heads so that so many vectors over (batch, head, state) stay within the budget."""
        chosen = range(self.heads)[heads]
        step = max(1, self._budget // max(1, self.shape[0] * size * self._query.shape[-1]))
        # One empty part for no heads at all, so that there is a block to return.
        parts = [chosen[start : start + step] for start in range(0, max(1, len(chosen)), step)]
        return [slice(part.start, part.stop, part.step) for part in parts]

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return q_i . k_i: no decay stands between a token and itself."""
        query, key, _ = self.factors()
        return (query * key).sum(-1).transpose(1, 2).expand(-1, self.heads, -1)

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._query.new_zeros(shape)


def _head_by_head(factor: Float[Tensor, "batch token head *state"]) -> Float[Tensor, "batchhead token 1 *state"]:
    """Move heads into the batch: (batch, token, head, ...) to (batch x head, token, 1, ...)."""
    return factor.transpose(1, 2).flatten(0, 1).unsqueeze(2)
