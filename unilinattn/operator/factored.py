"""Chains whose one long-range mixer stands between factors of the query and of the keys: what fast paths are for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.row_product.naive import Sign, apply_sign
from unilinattn.kernels.subnormal import flushed_
from unilinattn.mixers import CoreMixer
from unilinattn.operator.contributions import band
from unilinattn.operator.stages import Branch, Chain, Mix, Scale


@dataclass(frozen=True, eq=False)
class FactoredTerm:
    """left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c]; without a mixer alpha is the identity.

    `left` and `taps` are None where they are one everywhere.
    """

    mixer: CoreMixer | None
    left: Float[Tensor, "#batch #length group"] | None
    taps: Mapping[int, Float[Tensor, "#batch #length group"]] | None

    @property
    def factors(self) -> list[Tensor]:
        """The taps, then the left factor."""
        return [*(self.taps or {}).values(), *([] if self.left is None else [self.left])]

    @property
    def is_weighted(self) -> bool:
        """Whether a factor is not one everywhere."""
        return self.left is not None or self.taps is not None

    @property
    def channels(self) -> int:
        """Number of channels with coefficients of their own."""
        return lcm(*(factor.shape[2] for factor in self.factors), 1 if self.mixer is None else self.mixer.heads)

    def at_width(self, channels: int) -> "FactoredTerm":
        """Return the term with every factor repeated to so many channels."""
        taps = self.taps and {lag: repeat_groups(tap, channels) for lag, tap in self.taps.items()}
        return FactoredTerm(self.mixer, None if self.left is None else repeat_groups(self.left, channels), taps)


@dataclass(frozen=True, eq=False)
class PairwiseForm:
    """A layer as T_ij x_j = tail_i(W v_ij), v_ij a sum of terms whose taps hold the values.

    With one weight a head (softmax) W is folded into each head's values first, so v has heads for channels.
    """

    terms: Sequence[FactoredTerm]
    weight: Float[Tensor, "out channel"] | None
    folded: Float[Tensor, "batch key head out"] | None
    tail: Chain
    shape: tuple[int, int, int, int]

    @property
    def causal(self) -> bool:
        """Whether no key adds anything to an earlier row."""
        return all(term.mixer is None or term.mixer.is_lower_triangular for term in self.terms)

    @property
    def channels(self) -> int:
        """Channels of v where W is not folded into the values."""
        return self.shape[3] if self.weight is None else self.weight.shape[1]

    @property
    def values(self) -> Tensor:
        """The values, or those of the first tap: they have the device and dtype of all."""
        return self.folded if self.folded is not None else next(iter((self.terms[0].taps or {}).values()))


def factored(chain: Sequence[Scale | Mix | Branch] | Chain) -> list[FactoredTerm] | None:
    """Return a chain as a sum of terms, None where it is none: two long mixers in a row, a matrix, complex modes."""
    for at, stage in enumerate(chain):
        if not stage.mixes or band((stage,)) is not None:
            continue
        before, after = chain[:at], chain[at + 1 :]
        if isinstance(stage, Branch):
            found = [factored((*before, *inner, *after)) for inner in stage.chains]
            return None if any(part is None for part in found) else [term for part in found for term in part or ()]
        taps, left = band(before), _product_of(after)
        if taps is None or left is None or not isinstance(stage, Mix) or stage.mixer.is_complex:
            return None
        return [FactoredTerm(stage.mixer, left if after else None, taps if before else None)]
    taps = band(chain)
    return None if taps is None or any(tap.is_complex() for tap in taps.values()) else [FactoredTerm(None, None, taps)]


def reduced_blocks(
    found: Sequence[FactoredTerm], shape: tuple[int, int, int], rows: int, like: Tensor
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield rows of the mean over channels of a sum of terms, so many at a time; `shape` is (batch, query, key)."""
    batch, queries, keys = shape
    streams = []
    for term in found:
        if term.mixer is not None:
            channels = term.channels
            wide = term.at_width(channels)
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
        yield part, flushed_(block)


def row_product(
    found: Sequence[FactoredTerm],
    shape: tuple[int, int, int],
    rows: int,
    row: Float[Tensor, "batch query"],
    weight: Float[Tensor, "batch query"],
    sign: Sign,
) -> Float[Tensor, "batch key"]:
    """Return sum_i row_i sign(weight_i m_ij) for the map m of `reduced_blocks`, which is never held."""
    if len(found) == 1 and (mixer := found[0].mixer) is not None:
        term, channels = found[0], found[0].channels
        wide = term.at_width(channels)
        return mixer.row_product(row, weight / channels, sign, rows, wide.left, wide.taps)
    total = row.new_zeros(shape[0], shape[2])
    for part, block in reduced_blocks(found, shape, rows, row):
        scaled = flushed_(apply_sign(sign, block * weight[:, part, None]))
        total = total + torch.einsum("bi,bij->bj", row[:, part], scaled)
    return total


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


def _mean_band(term: FactoredTerm) -> dict[int, Float[Tensor, "#batch #length"]]:
    return {lag: tap.mean(-1) for lag, tap in (term.taps or {}).items()}


def _product_of(chain: Sequence[object]) -> Tensor | None:
    """Return the product of scales, None if anything else is among them."""
    total = torch.ones(1, 1, 1)
    for stage in chain:
        if not isinstance(stage, Scale) or stage.scale.is_complex():
            return None
        width = lcm(total.shape[-1], stage.scale.shape[-1])
        total = repeat_groups(total.to(stage.scale), width) * repeat_groups(stage.scale, width)
    return total
