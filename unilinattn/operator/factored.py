"""Chains with one long-range mixer between factors of its queries and of its keys, the form of the fast paths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.row_product.naive import Sign
from unilinattn.kernels.row_product.tiled import folded
from unilinattn.kernels.subnormal import flushed_
from unilinattn.memory import parts
from unilinattn.mixers import CoreMixer
from unilinattn.operator.bands import Band, add_band, band
from unilinattn.operator.stages import Branch, Chain, Mix, Scale, Stage


@dataclass(frozen=True, eq=False)
class FactoredTerm:
    """left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c], where alpha is the identity if `mixer` is None.

    `left` and `taps` are (batch or 1, length or 1, group), and None if they are 1 everywhere.
    """

    mixer: CoreMixer | None
    left: Float[Tensor, "#batch #length group"] | None
    taps: Band | None

    @property
    def factors(self) -> list[Tensor]:
        """The taps, then the left factor."""
        return [*(self.taps or {}).values(), *([] if self.left is None else [self.left])]

    @property
    def is_weighted(self) -> bool:
        """Whether the term has a left factor or taps."""
        return self.left is not None or self.taps is not None

    @property
    def channels(self) -> int:
        """Number of channels with separate coefficients."""
        return lcm(*(factor.shape[2] for factor in self.factors), 1 if self.mixer is None else self.mixer.heads)

    def at_width(self, channels: int) -> "FactoredTerm":
        """Return the term with each factor repeated to `channels` channels."""
        taps = self.taps and {lag: repeat_groups(tap, channels) for lag, tap in self.taps.items()}
        return FactoredTerm(self.mixer, None if self.left is None else repeat_groups(self.left, channels), taps)


@dataclass(frozen=True, eq=False)
class PairwiseForm:
    """A layer as T_ij x_j = tail_i(W v_ij), where v_ij is a sum of terms whose taps include the values.

    Attributes:
        terms: the terms of v, (batch, query, key, channel) in total.
        weight: W, None for the identity.
        folded: W applied to the values of each head, for layers with one weight per head (softmax attention). v then
            has one channel per head.
        tail: token-wise stages after W.
        shape: (batch, queries, keys, out).
    """

    terms: Sequence[FactoredTerm]
    weight: Float[Tensor, "out channel"] | None
    folded: Float[Tensor, "batch key head out"] | None
    tail: Chain
    shape: tuple[int, int, int, int]

    @property
    def causal(self) -> bool:
        """Whether T_ij is zero for all j > i."""
        return all(term.mixer is None or term.mixer.is_lower_triangular for term in self.terms)

    @property
    def channels(self) -> int:
        """Number of channels of v without `folded`."""
        return self.shape[3] if self.weight is None else self.weight.shape[1]

    @property
    def values(self) -> Tensor:
        """A tensor with the device and dtype of the values."""
        return self.folded if self.folded is not None else next(iter((self.terms[0].taps or {}).values()))


def factored(chain: Sequence[Stage]) -> list[FactoredTerm] | None:
    """Return a chain as a sum of terms; None if it has a matrix, two long-range mixers in a row or complex modes."""
    for position, stage in enumerate(chain):
        if not stage.mixes or band((stage,)) is not None:
            continue
        before, after = chain[:position], chain[position + 1 :]
        if isinstance(stage, Branch):
            branches = [factored((*before, *inner, *after)) for inner in stage.chains]
            return None if any(terms is None for terms in branches) else [t for terms in branches for t in terms or ()]
        taps, left = band(before), _product_of(after)
        if taps is None or left is None or not isinstance(stage, Mix) or stage.mixer.is_complex:
            return None
        return [FactoredTerm(stage.mixer, left if after else None, taps if before else None)]
    taps = band(chain)
    return None if taps is None or any(tap.is_complex() for tap in taps.values()) else [FactoredTerm(None, None, taps)]


def reduced_blocks(
    terms: Sequence[FactoredTerm], shape: tuple[int, int, int], rows: int, like: Tensor
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield the mean over channels of a sum of terms in blocks of `rows` rows; `shape` is (batch, queries, keys)."""
    batch, queries, keys = shape
    streams = []
    for term in terms:
        if term.mixer is not None:
            channels = term.channels
            wide = term.at_width(channels)
            streams.append((term.mixer.reduced_rows(rows, wide.left, wide.taps), channels))
    bands = [{lag: tap.mean(-1) for lag, tap in (term.taps or {}).items()} for term in terms if term.mixer is None]
    for tokens in parts(queries, rows):
        block: Tensor | None = None
        for stream, channels in streams:
            term_rows = next(stream)
            block = term_rows / channels if block is None else block.add_(term_rows, alpha=1 / channels)
        if block is None:
            block = like.new_zeros(batch, tokens.stop - tokens.start, keys)
        for by_lag in bands:
            for lag, factor in by_lag.items():
                add_band(block, tokens, 0, lag, factor)
        yield tokens, flushed_(block)


def row_product(
    terms: Sequence[FactoredTerm],
    shape: tuple[int, int, int],
    rows: int,
    row: Float[Tensor, "batch query"],
    weight: Float[Tensor, "batch query"],
    sign: Sign,
) -> Float[Tensor, "batch key"]:
    """Return sum_i row_i sign(weight_i m_ij) for the map m of `reduced_blocks`, in the memory of `rows` rows of m."""
    if len(terms) == 1 and (mixer := terms[0].mixer) is not None:
        channels = terms[0].channels
        wide = terms[0].at_width(channels)
        return mixer.row_product(row, weight / channels, sign, rows, wide.left, wide.taps)
    blocks = (block for _, block in reduced_blocks(terms, shape, rows, row))
    return folded(blocks, shape[2], row, weight, sign)


def _product_of(chain: Sequence[Stage]) -> Tensor | None:
    """Return the product of real scales, None if the chain has other stages."""
    total = torch.ones(1, 1, 1, device="cpu")
    for stage in chain:
        if not isinstance(stage, Scale) or stage.scale.is_complex():
            return None
        width = lcm(total.shape[-1], stage.scale.shape[-1])
        total = repeat_groups(total.to(stage.scale), width) * repeat_groups(stage.scale, width)
    return total
