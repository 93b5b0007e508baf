"""T_ij x_j of all pairs, tile by tile: vectors that are reduced as soon as they are there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.contribution_norms import gram
from unilinattn.kernels.contribution_norms.naive import Order
from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.subnormal import flushed, flushed_
from unilinattn.mixers.base import Block
from unilinattn.operator.contributions import shifted
from unilinattn.operator.cost import tile_columns, tile_rows
from unilinattn.operator.factored import FactoredTerm, PairwiseForm, add_band, factored
from unilinattn.operator.stages import Chain, Matrix, Scale, run


@dataclass(frozen=True, eq=False)
class Tile:
    """T_ij x_j = W v_ij for some rows and columns, v there and T not yet.

    Attributes:
        rows, cols: which of the rows, and which keys.
        inner: v; where each key has a W of its own it is a group, and the columns are one.
        weight: W, None where v is T already.
        squared: W^T W for l2 norms, None where they are no shorter that way.
        own: the column in this tile of each row's own token, outside of it for a token that is elsewhere.
        holds_own: whether any of these tokens may be here.
    """

    rows: slice
    cols: slice
    inner: Float[Tensor, "group channel row col"]
    weight: Float[Tensor, "#group out channel"] | None
    own: Int[Tensor, "batch row"]
    holds_own: bool = True
    squared: Float[Tensor, "group channel channel"] | None = None

    def norms(
        self,
        order: Order,
        *,
        extra: Float[Tensor, "batch row out"] | None = None,
        reference: Float[Tensor, "batch row out"] | None = None,
    ) -> Float[Tensor, "batch row col"]:
        """Reduce each T_ij x_j, see `kernels.contribution_norms`; `extra` is added to each row's T_ii x_i first."""
        reduce = implementation("contribution_norms", self.inner).norms
        if order == 2 and self.squared is not None:
            found = gram.norms(self.inner, self.squared)
        else:
            found = reduce(self.inner, self.weight, order=order, reference=reference)
        found = self._split(found).transpose(1, 2).flatten(2)
        if extra is None or not self.holds_own:
            return found
        at = self.own.clamp(0, found.shape[2] - 1)
        vectors = (self._picked(at) + extra.transpose(1, 2)).unsqueeze(3)
        norm = reduce(vectors, None, order=order, reference=reference)
        at, here = at.unsqueeze(2), (at == self.own).unsqueeze(2)
        return found.scatter(2, at, torch.where(here, norm, found.gather(2, at)))

    def total(self) -> Float[Tensor, "batch row out"]:
        """Return each row's sum of T_ij x_j over the columns."""
        summed = self._split(self.inner.sum(3))
        if self.weight is None:
            return summed.sum(1).transpose(1, 2)
        return summed.flatten(1, 2).transpose(1, 2) @ self._weights(self.weight).mT.flatten(1, 2)

    def vectors(self) -> Float[Tensor, "batch out row col"]:
        """Return the T_ij x_j themselves."""
        if self.weight is None:
            return self._columns(self.inner)
        return self._columns((self.weight @ self.inner.flatten(2)).unflatten(2, self.inner.shape[2:]))

    def _picked(self, at: Int[Tensor, "batch row"]) -> Float[Tensor, "batch out row"]:
        """Return each row's T_ij x_j for a column of its own."""
        v = self._columns(self.inner)
        v = v.gather(3, at[:, None, :, None].expand(-1, v.shape[1], -1, 1)).squeeze(3)
        if self.weight is None:
            return v
        weight = self._weights(self.weight)
        if weight.shape[1] > 1:
            weight = weight[torch.arange(len(at), device=at.device).unsqueeze(1), at]
        return torch.einsum("broc,bcr->bor", weight, v)

    def _weights(self, weight: Float[Tensor, "#group out channel"]) -> Float[Tensor, "#batch #col out channel"]:
        """Return W by sequence and key, ones for a W that all share."""
        return weight.unflatten(0, (len(self.own) if len(weight) == len(self.inner) else 1, -1))

    def _columns(self, found: Float[Tensor, "group any row col"]) -> Float[Tensor, "batch any row allcol"]:
        return self._split(found).permute(0, 2, 3, 1, 4).flatten(3)

    def _split(self, found: Tensor) -> Tensor:
        """Return (group, ...) as (batch, group of a sequence, ...)."""
        return found.unflatten(0, (len(self.own), -1))


@dataclass(frozen=True, eq=False)
class PairwiseContributions(PairwiseForm):
    """A layer's T_ij x_j of all pairs, in tiles; built by `pairwise_of`."""

    def times(self, factor: float) -> "PairwiseContributions":
        """Return the form of so many times the layer."""
        if factor == 1:
            return self
        if self.weight is not None:
            folded = None if self.folded is None else factor * self.folded
            return replace(self, weight=factor * self.weight, folded=folded)
        taps = ({lag: factor * tap for lag, tap in (term.taps or {}).items()} for term in self.terms)
        return replace(self, terms=[replace(t, taps=own) for t, own in zip(self.terms, taps, strict=True)])

    def tiles(self, causal: bool, columns: int | None = None, rows: int | None = None) -> Iterator[Tile]:
        """Yield every pair once, from the first row to the last.

        With `causal`, which is only for layers that are, most of the pairs that are zero are left out. `rows` at a
        time, by default as many as `max_memory` allows.
        """
        _, queries, keys, _ = self.shape
        columns = tile_columns(self, columns)
        rows = tile_rows(self, columns=columns) if rows is None else rows
        streams = [_stream(term, rows) for term in self.terms]
        for start in range(0, queries, rows):
            part = slice(start, min(start + rows, queries))
            blocks = [None if stream is None else next(stream)[1] for stream in streams]
            for cols in _columns(keys, columns, part if causal else None):
                # Columns that begin inside the block are zero in the rows before them.
                yield self._tile(part, slice(max(start, cols.start), part.stop) if causal else part, cols, blocks)

    def _tile(self, part: slice, own: slice, cols: slice, blocks: Sequence[Block | None]) -> Tile:
        """Return the tile of some of the rows of a block."""
        index = torch.arange(own.start, own.stop, device=self.values.device).expand(self.shape[0], -1)
        inner, weight = self._inner(part, own, cols, blocks)
        holds_own = own.start < cols.stop and cols.start < own.stop
        squared = None if self._squared is None else self._squared[:, cols].flatten(0, 1)
        tile = Tile(own, cols, inner, weight, index - cols.start, holds_own, squared)
        if not self.tail:
            return tile
        vectors = tile.vectors()
        for stage in self.tail:
            vectors = stage.at(index).apply(vectors.transpose(1, 2), bias=False).transpose(1, 2)
        return replace(tile, inner=vectors, weight=None, squared=None)

    def _inner(
        self, part: slice, own: slice, cols: slice, blocks: Sequence[Block | None]
    ) -> tuple[Float[Tensor, "group channel row col"], Float[Tensor, "#group out channel"] | None]:
        """Return v and W as a `Tile` has them."""
        skipped = own.start - part.start
        if self.folded is not None:
            assert blocks[0] is not None
            alpha = blocks[0](cols)[:, :, skipped:].permute(0, 3, 1, 2)
            return flushed(alpha).flatten(0, 1).unsqueeze(3), self.folded[:, cols].flatten(0, 1).mT
        v: Tensor | None = None
        for block in blocks:
            if block is not None:
                made = block(cols)[:, :, skipped:]
                v = made if v is None else v.add_(made)
        if v is None:
            channels = next(iter((self.terms[0].taps or {}).values())).shape[2]
            v = self.values.new_zeros(self.shape[0], channels, own.stop - own.start, cols.stop - cols.start)
        for term in self.terms:
            if term.mixer is None:
                for lag, tap in (term.taps or {}).items():
                    add_band(v, own, cols.start, lag, tap.transpose(1, 2))
        return flushed_(v), None if self.weight is None else self.weight.unsqueeze(0)

    @cached_property
    def _squared(self) -> Float[Tensor, "batch key head head"] | None:
        """W^T W of each key: where it is half the size of W, and float64 is more than the numbers themselves have."""
        if self.folded is None or self.folded.dtype == torch.float64 or 2 * self.folded.shape[2] > self.shape[3]:
            return None
        return gram.gram(self.folded.flatten(0, 1).mT).unflatten(0, self.folded.shape[:2])


def pairwise_of(chain: Chain, x: Float[Tensor, "batch key in"], queries: int, out: int) -> PairwiseContributions | None:
    """Return a layer's chain as `PairwiseContributions`, None where it has no such form."""
    mixing = [at for at, stage in enumerate(chain) if stage.mixes]
    if not mixing:
        return None
    first, last = mixing[0], mixing[-1]
    end = last + 1
    while end < len(chain) and isinstance(chain[end], Scale):
        end += 1
    terms = factored(chain[first:end])
    if terms is None:
        return None
    projection = chain[end] if end < len(chain) else None
    weight = projection.weight if isinstance(projection, Matrix) else None
    tail = chain[end if weight is None else end + 1 :]
    u = run(chain[:first], x, bias=False)
    if u.is_complex() or (weight is not None and weight.is_complex()):
        return None
    shape = (x.shape[0], queries, x.shape[1], out)
    only = terms[0]
    plain = len(terms) == 1 and only.left is None and only.taps is None
    if plain and weight is not None and only.mixer is not None and only.mixer.heads < u.shape[2]:
        heads = only.mixer.heads
        folded = torch.einsum("bjhp,ohp->bjho", u.unflatten(2, (heads, -1)), weight.unflatten(1, (heads, -1)))
        return PairwiseContributions(terms, weight, folded, tail, shape)
    return PairwiseContributions([_with_values(term, u) for term in terms], weight, None, tail, shape)


def _columns(keys: int, step: int, inside: slice | None) -> Iterator[slice]:
    """Yield the columns of a block of rows; those `inside` a causal one in halves, and none after them."""
    start, stop = 0, keys if inside is None else min(keys, inside.stop)
    while start < stop:
        width = step if inside is None or start < inside.start else max(1, step // 2)
        end = min(start + width, stop if inside is None or start >= inside.start else inside.start)
        yield slice(start, end)
        start = end


def _stream(term: FactoredTerm, rows: int) -> Iterator[tuple[slice, Block]] | None:
    if term.mixer is None:
        return None
    return term.mixer.blocks(rows) if term.taps is None else term.mixer.weighted_blocks(rows, term.left, term.taps)


def _with_values(term: FactoredTerm, u: Float[Tensor, "batch key channel"]) -> FactoredTerm:
    """Return the term with each key's value multiplied into its taps."""
    channels = u.shape[2]
    taps: dict[int, Tensor] = {}
    for lag, tap in (term.taps or {0: u.new_ones(1, 1, 1)}).items():
        taps[lag] = repeat_groups(tap, channels) * shifted(u, lag)
    return FactoredTerm(term.mixer, None if term.left is None else repeat_groups(term.left, channels), taps)
