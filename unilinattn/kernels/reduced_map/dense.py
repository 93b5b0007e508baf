"""The reduced and the weighted map of a materialised block of every head, for structures without a product form."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unilinattn.memory import parts

PIECE = 64
"""Rows of a lower triangular matrix that are computed up to the same column."""

Taps = Mapping[int, Float[Tensor, "#batch #length #channel"]]
"""Factors on the key's side by lag: y_p = sum_lag tap_lag[p] x_{p - lag}."""


def reduced(
    alpha: Float[Tensor, "batch head row col"],
    rows: slice,
    left: Float[Tensor, "#batch #length #channel"] | None,
    taps: Taps | None,
) -> Float[Tensor, "batch row col"]:
    """Return sum_c left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c] for the first columns of some rows.

    A head serves consecutive channels; columns that are not given are zero.
    """
    if left is None and taps is None:
        return alpha.sum(1)
    heads = alpha.shape[1]
    reading = alpha.new_ones(1, 1, 1) if left is None else of_tokens(left, rows)
    total = alpha.new_zeros(())
    for lag, tap in (taps or {0: alpha.new_ones(1, 1, 1)}).items():
        width = max(reading.shape[2], tap.shape[2], heads)
        landing = of_tokens(tap, slice(0, alpha.shape[3]))
        each, other = (t.expand(-1, -1, width).unflatten(2, (heads, -1)) for t in (reading, landing))
        landed = (alpha * torch.einsum("bihp,bjhp->bhij", each, other)).sum(1)
        total = total + functional.pad(landed[..., lag:], (0, min(lag, landed.shape[-1])))
    return total


def causal_rows(
    tile: Callable[[slice, slice], Tensor],
    zeros: Callable[[tuple[int, ...]], Tensor],
    shape: tuple[int, int],
    blocks: Iterable[slice],
    left: Float[Tensor, "#batch #length #channel"] | None,
    taps: Taps | None,
) -> Iterator[Float[Tensor, "batch row key"]]:
    """Yield `reduced` for blocks of rows of a lower triangular matrix, `PIECE` rows at a time up to the diagonal.

    `tile` maps rows and columns to a block of every head, `shape` is (batch, keys).
    """
    batch, keys = shape
    for tokens in blocks:
        block = zeros((batch, tokens.stop - tokens.start, keys))
        for row in parts(tokens.stop - tokens.start, PIECE):
            piece = slice(tokens.start + row.start, tokens.start + row.stop)
            reached = slice(0, min(piece.stop, keys))
            block[:, row, reached] = reduced(tile(piece, reached), piece, left, taps)
        yield block


def weighted(
    alpha: Float[Tensor, "batch head row landed"],
    rows: slice,
    landed: slice,
    width: int,
    left: Float[Tensor, "#batch #length #channel"] | None,
    taps: Taps,
) -> Float[Tensor, "batch channel row key"]:
    """Return left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c] for the first `width` of the landed columns j."""
    batch, heads, count, _ = alpha.shape
    each = next(iter(taps.values())).shape[2] // heads
    total = alpha.new_zeros(batch, heads, each, count, width)
    for lag, tap in taps.items():
        there = alpha[:, :, None, :, lag : lag + width]
        factor = of_tokens(tap, slice(landed.start + lag, min(landed.start + lag + width, landed.stop)))
        factor = factor.transpose(1, 2).unflatten(1, (heads, each)).unsqueeze(3)
        total[..., : there.shape[-1]].addcmul_(there, factor)
    total = total.flatten(1, 2)
    return total if left is None else total.mul_(of_tokens(left, rows).transpose(1, 2).unsqueeze(-1))


def of_tokens(factor: Float[Tensor, "#batch #length channel"], tokens: slice) -> Float[Tensor, "#batch #token channel"]:
    """Return a factor at some tokens; a factor with one token broadcasts and is returned unchanged."""
    return factor if factor.shape[1] == 1 else factor[:, tokens]
