"""The reduced map as matrix products over (head, state), a block of rows at a time; see README.md."""

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.reduced_map.dense import Taps, of_tokens
from unilinattn.kernels.scan.pairs import from_token
from unilinattn.kernels.subnormal import decays, flushed_
from unilinattn.memory import parts

LEAF = 8
"""Rows of a diagonal block that is filled row by row; a larger block is two halves and a matrix product."""

SPLIT = 64
"""Rows of the smallest square whose block is split in two, rather than padded to twice as many rows."""

ROWS = 1024
"""Rows per block; the earlier columns are one product per tile of heads, with factors recomputed for each block."""

COLUMNS = 512
"""Columns per product with a block of rows."""

INNER = 1536
"""(head, state) pairs per tile, so that its factors stay in cache."""

Factors = Callable[[slice, slice], tuple[Tensor, Tensor, Tensor]]
"""Map tokens and heads to query, key (batch, token, head, state) and log-decay, -inf at resets."""

Fill = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""The type of `fill_leaves`."""


class Buffers:
    """Buffers reused by the tiles of one operation, because mapping fresh pages for each tile is slow."""

    def __init__(self) -> None:
        """Start without buffers."""
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the buffer `name` with a shape and the dtype and device of `like`; its content is undefined."""
        size, buffer = prod(shape), self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = like.new_empty(size)
        return buffer[:size].view(shape)


class HeadMap(NamedTuple):
    """The map m_ij = sum_h left_ih sum_lag alpha_h[i, j + lag] tap_lag[j + lag, h] of decayed memories alpha_h.

    Attributes:
        factors: those of the memories.
        shape: (batch, length, head, state).
        left, taps: one by default.
    """

    factors: Factors
    shape: tuple[int, int, int, int]
    left: Float[Tensor, "#batch #length head"] | None = None
    taps: Taps | None = None

    @property
    def reach(self) -> int:
        """The largest lag."""
        return max(self.taps, default=0) if self.taps else 0

    def weights(self, tokens: slice, heads: slice) -> tuple[Tensor | None, Taps | None]:
        """Return `left` and `taps` of some tokens and heads."""
        left = None if self.left is None else of_tokens(self.left, tokens)[..., heads]
        if self.taps is None:
            return left, None
        return left, {lag: of_tokens(tap, tokens)[..., heads] for lag, tap in self.taps.items()}


def reduced_rows(
    head_map: HeadMap, blocks: Iterable[slice], *, leaf: int = LEAF, fill: Fill | None = None
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield blocks of rows of a map, in any order.

    Time: half of one product (L x HN)(HN x L), and some exponentials per token, head and state. Memory: the block and
    the factors of one tile of heads. `leaf` and `fill`: those of `square`.
    """
    batch, length, heads, state = head_map.shape
    step, reach = max(1, INNER // state), head_map.reach
    buffers = Buffers()
    for tokens in blocks:
        block: Tensor | None = None
        for some_heads in parts(heads, step):
            for some in squares(tokens):
                near, read = square(
                    *head_map.factors(some, some_heads),
                    *head_map.weights(some, some_heads),
                    buffers=buffers,
                    leaf=leaf,
                    fill=fill or fill_leaves,
                )
                if block is None:
                    block = near.new_zeros(batch, tokens.stop - tokens.start, length + reach)
                rows = block[:, some.start - tokens.start : some.stop - tokens.start]
                rows[:, :, some.start : some.stop + reach] += near
                _add_far(rows, read, head_map, some.start, some_heads)
        assert block is not None
        yield tokens, block[:, :, reach:]


def held_elements(rows: int, shape: tuple[int, int, int, int]) -> int:
    """Return the elements that `reduced_rows` holds for blocks of `rows` rows, the block included."""
    batch, length, heads, state = shape
    tile = min(heads, max(1, INNER // state)) * state
    size = square_rows(min(rows, length))
    return batch * (size * length + 2 * size * size + 5 * (size + min(COLUMNS, length)) * tile)


def squares(tokens: slice) -> list[slice]:
    """Return a block of tokens in one or two parts, of which each is padded to the size of a square.

    A block of 600 tokens would be padded to 1024; its parts of 512 and 88 are padded to 512 and 128.
    """
    count = tokens.stop - tokens.start
    first = square_rows(count) // 2
    if first < SPLIT or count > 3 * first // 2:
        return [tokens]
    return [slice(tokens.start, tokens.start + first), slice(tokens.start + first, tokens.stop)]


def square_rows(rows: int) -> int:
    """Return the rows to which `square` pads `rows` rows: a power of two times the rows of a leaf."""
    size = LEAF
    while size < rows:
        size *= 2
    return size


def fill_leaves(
    steps: Float[Tensor, "leaf token head state"],
    query: Float[Tensor, "leaf token head state"],
    entering: Float[Tensor, "leaf token landing head state"],
    write: Float[Tensor, "leaf landed head state"],
    read: Float[Tensor, "leaf token head state"],
    passed: Float[Tensor, "leaf head state"],
    leaves: Float[Tensor, "leaf token landed"],
) -> None:
    """Fill blocks on the diagonal row by row: every column's memory decays, then the row's token is written and read.

    `entering` is what a token writes into its last columns, the earliest first. Writes the blocks into `leaves`, the
    memory of each column after the last row into `write`, the readers of a memory before the first row into `read`, and
    the decay across the block into `passed`.
    """
    reach = entering.shape[2] - 1
    write.zero_()
    leaves.zero_()
    passed.fill_(1)
    for i in range(steps.shape[1]):
        write[:, : i + reach].mul_(steps[:, i : i + 1])
        write[:, i : i + reach + 1] += entering[:, i]
        flushed_(passed.mul_(steps[:, i]))
        torch.mul(query[:, i], passed, out=read[:, i])
        upto = flushed_(write[:, : i + 1 + reach]).flatten(2)
        leaves[:, i, : i + 1 + reach] = (upto @ query[:, i].flatten(1).unsqueeze(-1)).squeeze(-1)
    flushed_(read)


def square(
    query: Float[Tensor, "batch token #head state"],
    key: Float[Tensor, "batch token #head state"],
    decay: Float[Tensor, "batch token head state"],
    left: Float[Tensor, "#batch #token head"] | None = None,
    taps: Taps | None = None,
    *,
    buffers: Buffers,
    leaf: int = LEAF,
    fill: Fill = fill_leaves,
) -> tuple[Float[Tensor, "batch token landed"], Float[Tensor, "batch token inner"]]:
    """Return the square of the map with equal row and column tokens, and the readers of the columns before it.

    Columns begin `max(taps)` tokens early, for taps that land inside. Blocks grow from leaves in pairs: the later rows
    read the earlier columns by one product around the cut between them, then both factors are decayed across the other
    half, to the pair's ends. Both results lie in `buffers` until their next use. `fill` computes leaves of `leaf` rows.
    """
    batch, count = decay.shape[:2]
    reach = max(taps, default=0) if taps else 0
    size = square_rows(count)
    heads_here, state = decay.shape[2:]
    inner = heads_here * state
    steps = buffers.take("steps", (batch, size, heads_here, state), decay)
    decays(decay, out=steps[:, :count])
    steps[:, count:] = 1
    # Queries are expanded to every head: with a broadcast, inner loops would be only as long as the state.
    reading, query = query, buffers.take("query", steps.shape, decay)
    if left is None:
        query[:, :count] = reading
    else:
        torch.mul(reading, left.unsqueeze(-1), out=query[:, :count])
    query[:, count:] = 0
    weights = {0: None} if taps is None else {lag: tap.unsqueeze(-1) for lag, tap in taps.items()}
    leaf = min(leaf, size)
    blocks = size // leaf
    steps, query = (t.unflatten(1, (blocks, leaf)).flatten(0, 1) for t in (steps, query))
    # A token's write lands on `reach` + 1 columns, the earliest first.
    entering = buffers.take("entering", (batch, size, reach + 1, heads_here, state), decay)
    if reach or size > count:
        entering.zero_()
    for lag, tap in weights.items():
        here = entering[:, :count, reach - lag]
        if tap is None:
            here.copy_(key)
        else:
            torch.mul(key, tap, out=here)
    entering = entering.view(batch * blocks, leaf, reach + 1, heads_here, state)
    write = buffers.take("write", (batch * blocks, leaf + reach, heads_here, state), decay)
    read = buffers.take("read", steps.shape, decay)
    leaves = steps.new_empty(batch * blocks, leaf, leaf + reach)
    passed = torch.empty_like(steps[:, 0])
    fill(steps, query, entering, write, read, passed, leaves)
    filled = buffers.take("filled", (batch, size, size + reach), decay).zero_()
    for nth, near in enumerate(leaves.unflatten(0, (batch, blocks)).unbind(1)):
        start = nth * leaf
        filled[:, start : start + leaf, start : start + leaf + reach] += near
    read, write, passed = read.flatten(2), write.flatten(2), passed.flatten(1)
    half, spare = leaf, "write"
    # With 4 leaves of 16 tokens, half = 16 fills two corners, rows 16-31 x columns 0-15 and rows 48-63 x columns 32-47,
    # and half = 32 fills rows 32-63 x columns 0-31: every pair lies in one leaf or in one corner. All corners of one
    # size are one batched product, and no factor decays over more tokens than its block has.
    while half < size:
        lower, upper = write.unflatten(0, (-1, 2)).unbind(1)
        second = read.unflatten(0, (-1, 2))[:, 1]
        before, after = passed.unflatten(0, (-1, 2)).unbind(1)
        corners = buffers.take("corners", (len(second), half, half + reach), decay)
        torch.bmm(second, lower.mT, out=corners)
        for nth, corner in enumerate(corners.unflatten(0, (batch, -1)).unbind(1)):
            start = 2 * nth * half
            filled[:, start + half : start + 2 * half, start : start + half + reach] += corner
        flushed_(second.mul_(before.unsqueeze(1)))
        flushed_(lower.mul_(after.unsqueeze(1)))
        read = read.view(-1, 2 * half, inner)
        if reach:
            # A column with taps in both halves belongs to both.
            spare = "joined" if spare == "write" else "write"
            joined = buffers.take(spare, (len(lower), 2 * half + reach, inner), decay)
            joined[:, :half] = lower[:, :half]
            flushed_(torch.add(lower[:, half:], upper[:, :reach], out=joined[:, half : half + reach]))
            joined[:, half + reach :] = upper[:, reach:]
            write = joined
        else:
            write = write.view(-1, 2 * half, inner)
        passed = flushed_(before * after)
        half *= 2
    return filled[:, :count, : count + reach], read[:, :count]


def _add_far(
    block: Float[Tensor, "batch row key"],
    read: Float[Tensor, "batch row inner"],
    head_map: HeadMap,
    start: int,
    heads: slice,
) -> None:
    """Add the columns before a block of rows by products around the block's first token, nearest columns first."""
    reach = head_map.reach
    crossed: Tensor | None = None
    for stop in range(start, 0, -COLUMNS):
        tokens = slice(max(0, stop - COLUMNS), stop)
        _, key, decay = head_map.factors(tokens, heads)
        exponent = from_token(decay)
        if crossed is not None:
            exponent = exponent + crossed
        crossed = exponent[:, :1] + decay[:, :1]
        faded = flushed_(decays(exponent, out=exponent).mul_(key))
        _, taps = head_map.weights(tokens, heads)
        if taps is None:
            write = faded
        else:
            write = faded.new_zeros(faded.shape[0], faded.shape[1] + reach, *faded.shape[2:])
            for lag, tap in taps.items():
                first = reach - lag
                write[:, first : first + faded.shape[1]] += faded * tap.unsqueeze(-1)
            flushed_(write)
        flushed_(block[:, :, tokens.start : tokens.stop + reach]).baddbmm_(read, write.flatten(2).mT)
