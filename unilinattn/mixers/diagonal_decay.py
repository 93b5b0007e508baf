"""Diagonal decay: alpha_ij = sum_n q_in exp(G_in - G_jn) k_jn for j <= i, one decay per state coordinate."""

from collections.abc import Iterable, Iterator
from functools import partial
from types import ModuleType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.reduced_map.dense import Taps
from unilinattn.kernels.reduced_map.tiled import HeadMap
from unilinattn.kernels.row_product.naive import Sign
from unilinattn.kernels.scan.memories import Diagonal
from unilinattn.kernels.scan.pairs import pairs
from unilinattn.kernels.scan.tiled import STEPS
from unilinattn.kernels.subnormal import decays, flushed_
from unilinattn.kernels.weighted_map.tiled import decayed_keys
from unilinattn.memory import allowed, parts
from unilinattn.mixers.base import ALL, Block, checked_factors, split_heads
from unilinattn.mixers.continued import Continued, extended

VECTORS = 8
"""Number of state vectors per row and head that are held while a square on the diagonal is filled."""

PAIR_BUDGET = 1 << 22
"""Most elements of a product over (head, state) in `tile` and `rows`, however much memory is allowed."""


class DiagonalDecay(Continued):
    """The hidden attention of a selective state space: a state vector per head with a decay per coordinate.

    Serves S6 / Mamba-1 (heads = channels, query = C and key = B shared by all heads, key_scale = delta,
    log_decay = delta with rate = A), GLA, HGRN2 and, with one state, RG-LRU. HMA ACL Eq. 14-16.

    `apply`, `adjoint` and `rows` take time O(L H N) per channel and hold the states of one chunk of tokens.

    Args:
        query, key: (batch, length, group, state); heads are a multiple of groups, and consecutive heads share one.
        log_decay: (batch, length, head, state), or (batch, length, head, 1) with a `rate`; at most 0 after `rate`.
        key_scale: (batch, length, head), multiplies the key.
        rate: (head, state), multiplies `log_decay`.
        reset: (batch, length), true where a segment begins: a decay of exactly 0 there.
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
        """Raise `FactorError` if a factor has NaN or infinite entries."""
        query, key, log_decay, key_scale, rate = checked_factors(
            query=query, key=key, log_decay=log_decay, key_scale=key_scale, rate=rate
        )
        self.query, self.key, self.log_decay = query, key, log_decay
        self.key_scale, self.rate, self.reset = key_scale, rate, reset

    @property
    def _memory(self) -> Diagonal:
        return Diagonal(self.query, self.key, self.log_decay, self.key_scale, self.rate, self.reset)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        batch, length, heads, _ = self.log_decay.shape
        return batch, heads, length, length

    def factors(self, tokens: slice = ALL, heads: slice = ALL) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, scaled key and log-decay, broadcastable to (batch, token, head, state).

        The log-decay is -inf where a segment begins.
        """
        return self._memory.at(tokens, heads)

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Run the recurrence forward in time."""
        return implementation("scan", self.log_decay).diagonal_scan(self._memory, value)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the transposed recurrence backward in time, which writes with the queries and reads with the keys."""
        return implementation("scan", self.log_decay).diagonal_scan_adjoint(self._memory, grad)

    def with_ends(self) -> "DiagonalDecay":
        """Return the mixer with tokens at the start that write the state, and at the end that read it."""
        size = self.state_size
        units = torch.eye(size, device=self.query.device)
        return DiagonalDecay(
            extended(self.query, first=0.0, last=units, size=size),
            extended(self.key, first=units, last=0.0, size=size),
            extended(self.log_decay, first=0.0, last=0.0, size=size),
            key_scale=None if self.key_scale is None else extended(self.key_scale, first=1.0, last=1.0, size=size),
            rate=self.rate,
            reset=None if self.reset is None else torch.nn.functional.pad(self.reset, (size, size)),
        )

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Return the rows at the positions `index` by adjoint passes over some one-hot vectors at a time."""
        batch, heads, length, _ = self.shape
        step = max(1, self.product_elements // max(1, batch * min(length, STEPS) * heads * self.state_size))
        return torch.cat([super(DiagonalDecay, self).rows(positions) for positions in index.split(step, dim=1)], dim=2)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Return a block: columns before its first row by one product per head, the others by recursive halving."""

        def fill(rows: slice, cols: slice) -> Tensor:
            row_count, col_count = rows.stop - rows.start, cols.stop - cols.start
            block = self.zeros((self.shape[0], len(range(self.heads)[heads]), row_count, col_count))
            at_once = self.heads_at_once(VECTORS * row_count + col_count)
            for nth, some_heads in enumerate(split_heads(heads, self.heads, at_once)):
                self._fill(block[:, nth * at_once : (nth + 1) * at_once], rows, cols, some_heads)
            return block

        return self._block(rows, cols, heads, fill)

    def weighted_blocks(self, rows: int, left: Tensor | None, taps: Taps) -> Iterator[tuple[slice, Block]]:
        """Yield the blocks of `CoreMixer.weighted_blocks`, by products if each head has one channel."""
        if not self._is_per_head(None, taps):
            yield from super().weighted_blocks(rows, left, taps)
            return
        for tokens in parts(self.shape[2], rows):
            near, read = self._weighted_map.squares(self._memory, tokens, left, taps)
            yield tokens, partial(self._near_and_far, tokens, near, read, taps)

    @property
    def _weighted_map(self) -> ModuleType:
        """The implementation of `kernels.weighted_map`."""
        return implementation("weighted_map", self.log_decay)

    def _near_and_far(
        self,
        tokens: slice,
        near: Float[Tensor, "batch head row landed"],
        read: Float[Tensor, "batch head row state"],
        taps: Taps,
        cols: slice,
    ) -> Float[Tensor, "batch head row col"]:
        """Return columns of a block of rows: one product for taps that land before its rows, squares for the rest."""
        reach, width = max(taps), cols.stop - cols.start
        total: Tensor | None = None
        if cols.start < tokens.start:
            before = slice(cols.start, min(cols.stop + reach, tokens.start))
            write = self._weighted_map.writes(self._memory, before, tokens.start, taps, width)
            total = read @ write.mT
        # The square's columns begin `reach` tokens before its rows; columns after its last row are zero.
        origin, stop = tokens.start - reach, min(cols.stop, tokens.stop)
        first = max(cols.start, origin)
        if total is None:
            total = near.new_zeros(*near.shape[:3], width)
        if first < stop:
            total[..., first - cols.start : stop - cols.start] += near[..., first - origin : stop - origin]
        return total

    def reduced_parts(
        self, blocks: Iterable[slice], left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Float[Tensor, "batch row key"]]:
        """Yield `CoreMixer.reduced_parts`, by products with inner dimension H N if weights are per head."""
        if not self._is_per_head(left, taps):
            yield from super().reduced_parts(blocks, left, taps)
            return
        kernel = implementation("reduced_map", self.log_decay).reduced_rows
        for _, block in kernel(HeadMap(self.factors, self.scan_shape, left, taps), blocks):
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
        """Return sum_i row_i sign(weight_i m_ij) for the map m of `reduced_rows`, in the memory of `rows` rows of m."""
        if not self._is_per_head(left, taps):
            return super().row_product(row, weight, sign, rows, left, taps)
        kernel = implementation("row_product", self.log_decay).row_product
        product: Tensor = kernel(HeadMap(self.factors, self.scan_shape, left, taps), row, weight, sign=sign, rows=rows)
        return product

    @property
    def product_elements(self) -> int:
        """Most elements of a product over (head, state): an eighth of what `max_memory` allows, up to `PAIR_BUDGET`."""
        return min(PAIR_BUDGET, allowed() // (8 * self.query.element_size()))

    def heads_at_once(self, vectors: int) -> int:
        """Number of heads whose `vectors` state vectors per sequence fit in `product_elements`; at least 1."""
        return max(1, self.product_elements // max(1, self.shape[0] * vectors * self.state_size))

    def _is_per_head(self, left: Tensor | None, taps: Taps | None) -> bool:
        """Whether weights have one channel per head."""
        weights = [*(taps or {}).values(), *([] if left is None else [left])]
        return all(weight.shape[2] == self.heads for weight in weights)

    @property
    def scan_shape(self) -> tuple[int, int, int, int]:
        """(batch, length, heads, state), as the kernels take it."""
        batch, heads, length, _ = self.shape
        return batch, length, heads, self.state_size

    def _fill(self, block: Float[Tensor, "batch head row col"], rows: slice, cols: slice, heads: slice) -> None:
        cut = rows.start
        if cols.start < cut:
            query, _, decay = self.factors(rows, heads)
            read = flushed_(decays(decay.cumsum(1)) * query)
            write = decayed_keys(self._memory, slice(cols.start, min(cols.stop, cut)), cut, heads)
            block[..., : cut - cols.start] = torch.einsum("bihn,bjhn->bhij", read, write)
        start = max(cols.start, cut)
        if start < min(rows.stop, cols.stop):
            query, key, decay = self.factors(slice(start, rows.stop), heads)
            causal = pairs(query.expand_as(decay), key.expand_as(decay), decay)[..., : cols.stop - start]
            block[:, :, start - cut :, start - cols.start :][..., : causal.shape[-1]] = causal

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return q_i . k_i."""
        query, key, _ = self.factors()
        return (query * key).sum(-1).transpose(1, 2).expand(-1, self.heads, -1)
