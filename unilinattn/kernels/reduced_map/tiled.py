"""The reduced map as matrix products over (head, state), a block of rows at a time; see README.md."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.reduced_map.dense import Taps, of_tokens

LEAF = 8
"""Rows of a diagonal block that is filled row by row; larger ones are two of them and a matrix product."""

ROWS = 1024
"""Rows a block: columns further back are one product a tile of heads, their factors made anew for each block."""

COLUMNS = 512
"""Columns of one product with the rows of a block."""

INNER = 1536
"""(head, state) pairs of a tile: few enough that a tile's factors stay in cache."""

Factors = Callable[[slice, slice], tuple[Tensor, Tensor, Tensor]]
"""From tokens and heads to query, key (batch, token, head, state) and log-decay, -inf where all is forgotten."""


def reduced_rows(
    factors: Factors,
    shape: tuple[int, int, int, int],
    left: Float[Tensor, "#batch #length head"] | None = None,
    taps: Taps | None = None,
    *,
    rows: int = ROWS,
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield blocks of rows of sum_h left_ih sum_lag alpha_h[i, j + lag] tap_lag[j + lag, h].

    `shape` is (batch, length, head, state). Time: half of one product (L x HN)(HN x L), and some exponentials for
    each token, head and state. Memory: the block itself and the factors of one tile of heads.
    """
    batch, length, heads, state = shape
    step = max(1, INNER // state)
    reach = max(taps, default=0) if taps else 0
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        block: Tensor | None = None
        for first in range(0, heads, step):
            part = slice(first, min(first + step, heads))
            tokens = slice(start, stop)
            own, read = square(
                *factors(tokens, part),
                None if left is None else of_tokens(left, tokens)[..., part],
                None if taps is None else {lag: of_tokens(tap, tokens)[..., part] for lag, tap in taps.items()},
            )
            if block is None:
                block = own.new_zeros(batch, stop - start, length + reach)
            block[:, :, start : stop + reach] += own
            _add_far(block, read, factors, start, part, taps, reach)
        assert block is not None
        yield slice(start, stop), block[:, :, reach:]


def held_numbers(rows: int, shape: tuple[int, int, int, int]) -> int:
    """Return how many numbers `reduced_rows` holds for blocks of so many rows, the block included."""
    batch, length, heads, state = shape
    tile = min(heads, max(1, INNER // state)) * state
    size = square_rows(min(rows, length))
    return batch * (size * length + 2 * size * size + 5 * max(size, min(COLUMNS, length)) * tile)


def square_rows(rows: int) -> int:
    """Return how many rows `square` pads so many to: leaves in pairs, and pairs of pairs."""
    size = LEAF
    while size < rows:
        size *= 2
    return size


def square(
    query: Float[Tensor, "batch token #head state"],
    key: Float[Tensor, "batch token #head state"],
    decay: Float[Tensor, "batch token head state"],
    left: Float[Tensor, "#batch #token head"] | None = None,
    taps: Taps | None = None,
) -> tuple[Float[Tensor, "batch token landed"], Float[Tensor, "batch token inner"]]:
    """Fill the square that rows and columns of the same tokens make; return what reads the columns before it too.

    Columns begin `max(taps)` tokens early, for taps that land inside. Blocks grow from leaves in pairs: the upper
    rows read the lower columns through one product about the cut between them, then both are moved to the pair's
    own ends by the decay of the half that they cross.
    """
    batch, count = decay.shape[:2]
    reach = max(taps, default=0) if taps else 0
    size = square_rows(count)
    pad = (0, 0, 0, 0, 0, size - count)
    kept = functional.pad(decay.exp(), pad, value=1.0)
    heads_here, state = kept.shape[2:]
    inner = heads_here * state
    query = query if left is None else query * left.unsqueeze(-1)
    query = functional.pad(query.expand(-1, -1, heads_here, -1), pad)
    weights = {0: None} if taps is None else {lag: tap.unsqueeze(-1) for lag, tap in taps.items()}
    blocks = size // LEAF
    kept, query = (t.unflatten(1, (blocks, LEAF)).flatten(0, 1) for t in (kept, query))
    # What enters with a token lands on `reach` + 1 columns, the earliest first.
    entering = kept.new_zeros(batch, size, reach + 1, heads_here, state)
    for lag, tap in weights.items():
        entering[:, :count, reach - lag] = key if tap is None else key * tap
    entering = entering.view(batch * blocks, LEAF, reach + 1, heads_here, state)
    # Row by row inside the leaves: every column's memory fades, then the row's own token enters and is read.
    write = kept.new_zeros(batch * blocks, LEAF + reach, heads_here, state)
    read = torch.empty_like(kept)
    found = kept.new_zeros(batch * blocks, LEAF, LEAF + reach)
    passed = torch.ones_like(kept[:, 0])
    for i in range(LEAF):
        write[:, : i + reach].mul_(kept[:, i : i + 1])
        write[:, i : i + reach + 1] += entering[:, i]
        passed = passed * kept[:, i]
        torch.mul(query[:, i], passed, out=read[:, i])
        upto = write[:, : i + 1 + reach].flatten(2)
        found[:, i, : i + 1 + reach] = (upto @ query[:, i].flatten(1).unsqueeze(-1)).squeeze(-1)
    filled = kept.new_zeros(batch, size, size + reach)
    for nth, leaf in enumerate(found.unflatten(0, (batch, blocks)).unbind(1)):
        at = nth * LEAF
        filled[:, at : at + LEAF, at : at + LEAF + reach] += leaf
    read, write, passed = read.flatten(2), write.flatten(2), passed.flatten(1)
    half = LEAF
    while half < size:
        lower, upper = write.unflatten(0, (-1, 2)).unbind(1)
        second = read.unflatten(0, (-1, 2))[:, 1]
        before, after = passed.unflatten(0, (-1, 2)).unbind(1)
        corners = torch.bmm(second, lower.mT).unflatten(0, (batch, -1))
        for nth, corner in enumerate(corners.unbind(1)):
            at = 2 * nth * half
            filled[:, at + half : at + 2 * half, at : at + half + reach] += corner
        second.mul_(before.unsqueeze(1))
        lower.mul_(after.unsqueeze(1))
        read = read.view(-1, 2 * half, inner)
        if reach:
            # A column that taps reach from both halves belongs to both.
            joined = functional.pad(lower, (0, 0, 0, half))
            joined[:, half:] += upper
            write = joined
        else:
            write = write.view(-1, 2 * half, inner)
        passed = before * after
        half *= 2
    return filled[:, :count, : count + reach], read[:, :count]


def _add_far(
    block: Float[Tensor, "batch row key"],
    read: Float[Tensor, "batch row inner"],
    factors: Factors,
    start: int,
    heads: slice,
    taps: Taps | None,
    reach: int,
) -> None:
    """Add the columns before a block of rows: products about the block's first token, from the nearest column back."""
    crossed: Tensor | None = None
    for stop in range(start, 0, -COLUMNS):
        tokens = slice(max(0, stop - COLUMNS), stop)
        _, key, decay = factors(tokens, heads)
        exponent = _from_token(decay)
        if crossed is not None:
            exponent = exponent + crossed
        crossed = exponent[:, :1] + decay[:, :1]
        faded = exponent.exp_().mul_(key)
        if taps is None:
            write = faded
        else:
            write = faded.new_zeros(faded.shape[0], faded.shape[1] + reach, *faded.shape[2:])
            for lag, tap in taps.items():
                at = reach - lag
                write[:, at : at + faded.shape[1]] += faded * of_tokens(tap, tokens)[..., heads, None]
        block[:, :, tokens.start : tokens.stop + reach].baddbmm_(read, write.flatten(2).mT)


def _from_token(log_decay: Float[Tensor, "batch length head state"]) -> Float[Tensor, "batch length head state"]:
    """Return the log-decay from after each token to the end: sums only, never a difference of two."""
    return functional.pad(log_decay[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 0, 0, 1))
