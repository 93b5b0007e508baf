"""Chains whose one long-range mixer stands between factors of the query and of the keys: what fast paths are for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.contributions import band
from unilinattn.kernels.streamed.naive import Phi, phi_of
from unilinattn.mixers import CoreMixer
from unilinattn.stages import Branch, Chain, Mix, Scale


@dataclass(frozen=True, eq=False)
class Term:
    """left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c]; without a mixer alpha is the identity.

    `left` and `taps` are None where they are one everywhere.
    """

    mixer: CoreMixer | None
    left: Float[Tensor, "#batch #length group"] | None
    taps: Mapping[int, Float[Tensor, "#batch #length group"]] | None

    @property
    def channels(self) -> int:
        """Number of channels with coefficients of their own."""
        factors = [*(self.taps or {}).values(), *([] if self.left is None else [self.left])]
        return lcm(*(factor.shape[2] for factor in factors), 1 if self.mixer is None else self.mixer.heads)

    def at_width(self, channels: int) -> "Term":
        """Return the term with every factor repeated to so many channels."""
        taps = self.taps and {lag: widened(tap, channels) for lag, tap in self.taps.items()}
        return Term(self.mixer, None if self.left is None else widened(self.left, channels), taps)


def terms(chain: Sequence[Scale | Mix | Branch] | Chain) -> list[Term] | None:
    """Return a chain as a sum of terms, None where it is none: two long mixers in a row, a matrix, complex modes."""
    for at, stage in enumerate(chain):
        if not stage.mixes or band((stage,)) is not None:
            continue
        before, after = chain[:at], chain[at + 1 :]
        if isinstance(stage, Branch):
            found = [terms((*before, *inner, *after)) for inner in stage.chains]
            return None if any(part is None for part in found) else [term for part in found for term in part or ()]
        taps, left = band(before), _product_of(after)
        if taps is None or left is None or not isinstance(stage, Mix) or stage.mixer.is_complex:
            return None
        return [Term(stage.mixer, left if after else None, taps if before else None)]
    taps = band(chain)
    return None if taps is None or any(tap.is_complex() for tap in taps.values()) else [Term(None, None, taps)]


def reduced_blocks(
    found: Sequence[Term], shape: tuple[int, int, int], rows: int, like: Tensor
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield rows of the mean over channels of a sum of terms, so many at a time; `shape` is (batch, query, key)."""
    batch, queries, keys = shape
    streams = []
    for term in found:
        if term.mixer is not None:
            channels = term.channels
            wide = term.at_width(channels) if term.left is not None or term.taps is not None else term
            streams.append((term.mixer.reduced_rows(rows, wide.left, wide.taps), channels))
    bands = [_mean_band(term) for term in found if term.mixer is None]
    for start in range(0, queries, rows):
        part = slice(start, min(start + rows, queries))
        block = like.new_zeros(batch, part.stop - start, keys)
        for stream, channels in streams:
            block.add_(next(stream), alpha=1 / channels)
        for by_lag in bands:
            for lag, factor in by_lag.items():
                add_band(block, part, 0, lag, factor)
        yield part, block


def streamed(
    found: Sequence[Term],
    shape: tuple[int, int, int],
    rows: int,
    row: Float[Tensor, "batch query"],
    weight: Float[Tensor, "batch query"],
    phi: Phi,
) -> Float[Tensor, "batch key"]:
    """Return sum_i row_i phi(weight_i m_ij) for the map m of `reduced_blocks`, which is never held."""
    if len(found) == 1 and (mixer := found[0].mixer) is not None:
        term, channels = found[0], found[0].channels
        wide = term.at_width(channels) if term.left is not None or term.taps is not None else term
        return mixer.streamed(row, weight / channels, phi, rows, wide.left, wide.taps)
    total = row.new_zeros(shape[0], shape[2])
    for part, block in reduced_blocks(found, shape, rows, row):
        total = total + torch.einsum("bi,bij->bj", row[:, part], phi_of(phi, block * weight[:, part, None]))
    return total


def reduced_size(found: Sequence[Term], shape: tuple[int, int, int], rows: int) -> int:
    """Return how many numbers `reduced_blocks` holds for so many rows."""
    batch, _, keys = shape
    held = 0
    for term in found:
        if term.mixer is not None:
            weighed = term.left is not None or term.taps is not None
            streams = len(term.taps or (0,)) if term.mixer.streams_by_lag else 1
            held += streams * term.mixer.reduced_size(rows, term.channels if weighed else 1) + widened_size(term)
    return 2 * batch * rows * keys + held


def reduced_operations(found: Sequence[Term], shape: tuple[int, int, int]) -> int:
    """Return how much `reduced_blocks` multiplies for all rows."""
    total = 0
    for term in found:
        if term.mixer is not None:
            weighed = term.left is not None or term.taps is not None
            lags = len(term.taps or (0,)) if term.mixer.streams_by_lag else 1
            total += lags * term.mixer.map_operations(term.channels if weighed else 1)
    return total


def widened_size(term: Term) -> int:
    """Return how many numbers a term's factors take with a channel of its own each: linear in length."""
    factors = [*(term.taps or {}).values(), *([] if term.left is None else [term.left])]
    return sum(factor.shape[0] * factor.shape[1] * term.channels for factor in factors)


def add_band(
    block: Float[Tensor, "batch *channel row col"],
    rows: slice,
    first: int,
    lag: int,
    factor: Float[Tensor, "#batch *#channel #length"],
) -> None:
    """Add a factor of each row i at the column i - lag of a block whose columns begin at `first`, in place."""
    offset = rows.start - first - lag
    if not -block.shape[-2] < offset < block.shape[-1]:
        return
    diagonal = block.diagonal(offset, -2, -1)
    # The diagonal begins at the first of the rows whose column the block holds.
    begun = max(rows.start, first + lag)
    factor = factor if factor.shape[-1] == 1 else factor[..., begun : begun + diagonal.shape[-1]]
    diagonal += factor


def widened(factor: Tensor, channels: int) -> Tensor:
    """Repeat each group's factor for its consecutive channels."""
    return factor.repeat_interleave(channels // factor.shape[-1], dim=-1)


def _mean_band(term: Term) -> dict[int, Float[Tensor, "#batch #length"]]:
    return {lag: tap.mean(-1) for lag, tap in (term.taps or {}).items()}


def _product_of(chain: Sequence[object]) -> Tensor | None:
    """Return the product of scales, None if anything else is among them."""
    total = torch.ones(1, 1, 1)
    for stage in chain:
        if not isinstance(stage, Scale) or stage.scale.is_complex():
            return None
        width = lcm(total.shape[-1], stage.scale.shape[-1])
        total = widened(total.to(stage.scale), width) * widened(stage.scale, width)
    return total
