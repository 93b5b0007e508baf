"""Softmax: attention weights from queries and keys, computed a block of queries at a time."""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._guards import detect_fake_mode

from unilinattn.kernels.subnormal import flushed, flushed_, flushed_given
from unilinattn.memory import allowed, parts
from unilinattn.mixers.base import ALL, Block, CoreMixer, checked_factors

BLOCK = {"cpu": 2**18, "cuda": 2**28}
"""Bytes of a block of weights: on a CPU it fits the cache, on a GPU it is a few launches."""

FEWEST = 32
"""Fewest queries of a block that memory allows, since products with fewer rows are slow."""

LOWEST = torch.finfo(torch.float16).min / 2
"""A bias below which a weight is zero beside any other: masks that are added have the lowest number of a dtype."""


class _Weights(NamedTuple):
    """The weights of some queries on the keys up to the last one that any of them attends to.

    Attributes:
        queries: the queries.
        keys: the number of keys.
        values: (batch, head, query, key).
    """

    queries: slice
    keys: int
    values: Tensor


class Softmax(CoreMixer):
    """Softmax attention under any mask, window, soft cap or position bias (HMA ACL Eq. 1): softmax(q k^T scale + bias).

    Every operation takes O(L_query L_key) time per channel in the memory of a block, and computes the weights of these
    queries; a causal mask halves the time. Queries and keys are constants: no gradient reaches them.

    Args:
        query, key: (batch, head, query, channel) and (batch, group, key, channel); consecutive heads share a group.
        scale: the factor of the scores.
        mask: the keys that each query may attend to, (batch or 1, head or 1, query or 1, key); None for all. A query
            without any key has weights of zero.
        bias: added to the scores, of the same shape; such as a position bias, or a mask that is large and negative.
        cap: the scores before the bias are cap tanh(q k^T scale / cap); None for no soft cap.
        causal: whether a query attends to no later key, for a mask of None.
        unchanged: raises an error if queries, keys or the mask were written into.
    """

    structure = "dense"
    causal = False
    data_controlled = True

    def __init__(
        self,
        query: Float[Tensor, "batch head query channel"],
        key: Float[Tensor, "batch group key channel"],
        *,
        scale: float,
        mask: Bool[Tensor, "#batch #head #query key"] | None = None,
        bias: Float[Tensor, "#batch #head #query key"] | None = None,
        cap: float | None = None,
        causal: bool = False,
        unchanged: Callable[[], None] | None = None,
    ) -> None:
        """Raise `FactorError` if queries or keys have NaN or infinite entries."""
        self._query, self._key = map(flushed_given, checked_factors(query=query, key=key))
        self._scale, self._cap = scale, cap
        # Either may have one row for all queries.
        pairs = query.shape[2], key.shape[2]
        self._mask, self._bias = (None if x is None else x.expand(-1, -1, *pairs) for x in (mask, bias))
        self._is_causal, self._unchanged = causal and mask is None, unchanged

    def __getstate__(self) -> dict[str, Any]:
        """Copy and store queries and keys, which nothing else writes into then."""
        return {**vars(self), "_unchanged": None}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        return *self._query.shape[:3], self._key.shape[2]

    @cached_property
    def is_lower_triangular(self) -> bool:
        """Whether no query may attend to a later key."""
        attended = _attended(self._mask, self._bias)
        if self._is_causal or attended is None:
            return self._is_causal or self._key.shape[2] == 1
        return not bool(attended.triu(1).any())

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Multiply by the weights."""
        batch, heads, queries, _ = self.shape
        if detect_fake_mode() is not None:
            # A run on fake tensors asks for shapes.
            return value.new_empty(batch, queries, heads, value.shape[3])
        by_head = flushed(value).transpose(1, 2)
        mixed = [weights @ by_head[:, :, :keys] for _, keys, weights in self._weights()]
        return torch.cat(mixed, 2).transpose(1, 2)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Multiply by the transposed weights."""
        batch, heads, _, total = self.shape
        if detect_fake_mode() is not None:
            return grad.new_empty(batch, total, heads, grad.shape[3])
        by_head = flushed(grad).transpose(1, 2)
        summed = by_head.new_zeros(batch, heads, total, by_head.shape[3])
        for queries, keys, weights in self._weights():
            summed[:, :, :keys] += weights.mT @ by_head[:, :, queries]
        return summed.transpose(1, 2)

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Compute rows of the weights from their queries."""
        self._require_unchanged()
        batch, _, _, keys = self.shape
        sequence = torch.arange(batch, device=index.device)[:, None]

        def gathered(factor: Tensor) -> Tensor:
            return factor.expand(batch, -1, -1, -1).transpose(1, 2)[sequence, index].transpose(1, 2)

        mask, bias = (None if factor is None else gathered(factor) for factor in (self._mask, self._bias))
        if self._is_causal:
            mask = (torch.arange(keys, device=index.device) <= index[..., None])[:, None]
        return self._of(gathered(self._query), mask, bias, keys)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Compute the weights of some queries, and return some columns."""
        batch, total, queries, keys = self.shape
        number, column = range(queries)[rows], range(keys)[cols]
        shape = batch, len(range(total)[heads]), len(number), len(column)
        if not number or not column or detect_fake_mode() is not None:
            return self.zeros(shape)
        some = slice(number[0], number[-1] + 1)
        if self._rows(heads) >= len(range(queries)[some]):
            # One block needs no copy.
            _, reached, weights = next(self._weights(some, heads))
            if column[-1] < reached:
                return weights[:, :, :: number.step, cols]
        tile = self.zeros(shape)
        for block, _, weights in self._weights(some, heads):
            # Of the rows 3, 8, 13 the block of the queries 6 to 11 has the second.
            first = -(-(block.start - number.start) // number.step)
            last = -(-(block.stop - number.start) // number.step)
            taken = weights[:, :, number.start + first * number.step - block.start :: number.step, cols]
            tile[:, :, first:last, : taken.shape[3]] = taken
        return tile

    def mean_map(self) -> Float[Tensor, "batch query key"]:
        """Sum the weights block by block."""
        batch, heads, queries, keys = self.shape
        summed = self.zeros((batch, queries, keys))
        for block, reached, weights in self._weights():
            summed[:, block, :reached] = weights.sum(1)
        return flushed_(summed.div_(heads))

    def blocks(self, rows: int) -> Iterator[tuple[slice, Block]]:
        """Yield the rows in order; the weights of a block are computed once."""
        for tokens in parts(self.shape[2], rows):
            yield tokens, partial(_columns, self.tile(tokens))

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return the weight of each token on itself, in the time of the matrix."""
        parts_ = (weights.diagonal(block.start, 2, 3) for block, _, weights in self._weights())
        return torch.cat(list(parts_), 2)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""
        return self._query.new_zeros(shape)

    def _require_unchanged(self) -> None:
        if self._unchanged is not None:
            self._unchanged()

    def _weights(self, queries: slice = ALL, heads: slice = ALL) -> Iterator[_Weights]:
        """Yield the weights of consecutive queries, those of a block after the last one was used."""
        self._require_unchanged()
        keys, query, some, size = self.shape[3], self._query[:, heads], range(self.shape[2])[queries], self._rows(heads)
        for start in range(some.start, some.stop, size):
            block = slice(start, min(start + size, some.stop))
            mask, bias = (_part(factor, block, heads) for factor in (self._mask, self._bias))
            attended = _attended(mask, bias)
            if self._is_causal:
                number = torch.arange(block.stop, device=query.device)
                attended = mask = (number <= number[block, None])[None, None]
            reached = keys
            if attended is not None:
                last = attended.flatten(0, -2).any(0).nonzero()
                reached = min(keys, int(last[-1]) + 1 if len(last) else 1)
            mask, bias = (None if factor is None else factor[..., :reached] for factor in (mask, bias))
            yield _Weights(block, reached, self._of(query[:, :, block], mask, bias, reached, heads))

    def _rows(self, heads: slice) -> int:
        """Return the number of queries of a block."""
        batch, total, _, keys = self.shape
        row = batch * len(range(total)[heads]) * keys * self._query.element_size()
        return block_rows(self._query.device.type, row)

    def _of(
        self,
        query: Float[Tensor, "batch head query channel"],
        mask: Tensor | None,
        bias: Tensor | None,
        keys: int,
        heads: slice = ALL,
    ) -> Float[Tensor, "batch head query key"]:
        """Return the weights of some queries of some heads on the first keys."""
        batch, count, rows, width = query.shape
        groups, key = self._key.shape[1], self._key[:, :, :keys]
        if heads != ALL:
            number = torch.arange(self._query.shape[1], device=key.device)[heads]
            groups, key = count, key[:, number // (self._query.shape[1] // groups)]
        # A use may be inside of a mode of torch functions.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            # Heads that share a group are rows of one product.
            grouped = flushed_(query * self._scale).reshape(batch, groups, -1, width)
            scores = (grouped @ key.mT).view(batch, count, rows, keys)
            if self._cap is not None:
                scores.div_(self._cap).tanh_().mul_(self._cap)
            if bias is not None:
                scores += bias
            if mask is None:
                return flushed_(scores.softmax(-1))
            weights = scores.masked_fill_(~mask, -torch.inf).softmax(-1)
            # A query without any key has a row of NaN.
            return flushed_(weights.masked_fill_(~mask, 0))


def _part(factor: Tensor | None, queries: slice, heads: slice) -> Tensor | None:
    """Return what a mask or a bias has for some queries of some heads."""
    return None if factor is None else factor[:, heads if factor.shape[1] > 1 else ALL, queries]


def _attended(mask: Tensor | None, bias: Tensor | None) -> Bool[Tensor, "#batch #head query key"] | None:
    """Return the keys to which queries attend, None for all.

    A query whose biases are all large and negative attends to all keys.
    """
    if mask is not None or bias is None:
        return mask
    attended = bias > LOWEST
    return attended | ~attended.any(-1, keepdim=True)


def _columns(weights: Tensor, cols: slice) -> Tensor:
    return weights[..., cols]


def block_rows(device: str, row_bytes: int) -> int:
    """Return the number of queries of a block, whose weights take `row_bytes` each in all heads and sequences."""
    most = max(FEWEST * row_bytes, BLOCK.get(device, BLOCK["cpu"]))
    # Scores, weights, a mask and a product.
    return max(1, min(most, allowed() // 4) // max(1, row_bytes))
