"""The vectors T_ij x_j of all pairs, in tiles that are reduced before the next one is computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.contribution_norms import gram
from unilinattn.kernels.contribution_norms.naive import Order, Products, kind_of
from unilinattn.kernels.subnormal import flushed, flushed_
from unilinattn.memory import parts
from unilinattn.mixers.base import Block
from unilinattn.operator.bands import add_band, shifted
from unilinattn.operator.cost import tile_columns, tile_rows
from unilinattn.operator.factored import FactoredTerm, PairwiseForm, factored
from unilinattn.operator.stages import Chain, Matrix, Scale, run


@dataclass(frozen=True, eq=False)
class Tile:
    """T_ij x_j = W v_ij for some rows and columns; the product with W is left to the reductions.

    Attributes:
        rows, cols: slices of the queries and keys.
        inner: v, complex if a later stage takes its real part. Groups are sequences, or pairs of a sequence and a key
            if W differs by key; then there is one column. With `portions`, each sequence has such groups for each part
            of the layer, one part after the other.
        weight: W, None for the identity.
        diagonal: the column of each row's token, counted from the first of the tile; it may lie outside.
        diagonal_rows: the rows whose column of `diagonal` can lie inside.
        portions: number of parts of the layer, such as heads, whose pairs are reduced apart; None for the whole layer.
    """

    rows: slice
    cols: slice
    inner: Inexact[Tensor, "group channel row col"]
    weight: Float[Tensor, "#group out channel"] | None
    diagonal: Int[Tensor, "batch row"]
    diagonal_rows: slice = field(default_factory=lambda: slice(None))
    portions: int | None = None

    def norms(
        self,
        order: Order,
        *,
        extra: Float[Tensor, "batch row out"] | None = None,
        reference: Float[Tensor, "batch row out"] | None = None,
    ) -> Float[Tensor, "batch *part row col"]:
        """Reduce each T_ij x_j by `kernels.contribution_norms`; `extra` is added to T_ii x_i beforehand."""
        if reference is None and self.weight is not None and self.inner.shape[1] == 1:
            # ||W v|| = |v| ||W|| for a single channel.
            kind_of(order, None)
            norms = self.inner.abs().squeeze(1) * torch.linalg.vector_norm(self.weight, order, dim=1).unsqueeze(2)
        elif order == 2 and self.weight is not None and self._has_gram:
            norms = gram.norms(self.inner, gram.gram(self.weight))
        else:
            norms = self._reductions.norms(Products(self.inner, self.weight), order=order, reference=reference)
        norms = self._by_pair(norms)
        return norms if extra is None else self.with_extra(norms, order, extra, reference)

    @property
    def _reductions(self) -> ModuleType:
        """The implementation of `kernels.contribution_norms` for this tile."""
        outs = 1 if self.weight is None else self.weight.shape[1]
        return implementation("contribution_norms", self.inner, self.inner.numel() * outs)

    @property
    def _has_gram(self) -> bool:
        """Whether `gram` takes fewer multiplications for l2 norms, each of which counts twice because it is float64."""
        _, channels, rows, cols = self.inner.shape
        outs, pairs = 0 if self.weight is None else self.weight.shape[1], rows * cols
        return self.inner.dtype != torch.float64 and 2 * (outs + pairs) * channels <= pairs * outs

    def alti_norms(
        self, reference: Float[Tensor, "batch row out"]
    ) -> tuple[Float[Tensor, "batch *part row col"], Float[Tensor, "batch *part row col"]]:
        """Return the orders "alti" and 1 of `norms`, for less than both."""
        scores, sizes = self._reductions.alti_norms(Products(self.inner, self.weight), reference)
        return self._by_pair(scores), self._by_pair(sizes)

    def with_extra(
        self,
        norms: Float[Tensor, "batch row col"],
        order: Order,
        extra: Float[Tensor, "batch row out"],
        reference: Float[Tensor, "batch row out"] | None = None,
    ) -> Float[Tensor, "batch row col"]:
        """Return `norms` with those of T_ii x_i + `extra` on the diagonal."""
        diagonal_rows = range(norms.shape[1])[self.diagonal_rows]
        if not diagonal_rows:
            return norms
        diagonal = self.diagonal[:, self.diagonal_rows]
        col = diagonal.clamp(0, norms.shape[2] - 1)
        vectors = (self._vectors_at(col) + extra[:, self.diagonal_rows].transpose(1, 2)).unsqueeze(3)
        reduce = implementation("contribution_norms", self.inner).norms
        facing = None if reference is None else reference[:, self.diagonal_rows]
        with_extra = reduce(Products(vectors, None), order=order, reference=facing)
        col, inside = col.unsqueeze(2), (col == diagonal).unsqueeze(2)
        result, before = norms.clone(), norms[:, self.diagonal_rows]
        result[:, self.diagonal_rows].scatter_(2, col, torch.where(inside, with_extra, before.gather(2, col)))
        return result

    def total(self) -> Float[Tensor, "batch row out"]:
        """Return the sum of T_ij x_j over the columns."""
        summed = self._split(self.inner.sum(3))
        if self.weight is None:
            return summed.sum(1).transpose(1, 2)
        return summed.flatten(1, 2).transpose(1, 2) @ self._weights(self.weight).mT.flatten(1, 2)

    def products(self, against: Float[Tensor, "batch row out"]) -> Float[Tensor, "batch row col"]:
        """Return g_i . T_ij x_j for a vector g_i of each row, which is pulled back through W first."""
        inner, pulled = self._split(self.inner), against.unsqueeze(1)
        if self.weight is not None:
            pulled = torch.einsum(
                "bro,bgoc->bgrc", against, self._weights(self.weight).expand(len(against), -1, -1, -1)
            )
        dots = torch.einsum("bgcrk,bgrc->bgrk", inner, pulled.expand(-1, inner.shape[1], -1, -1))
        return dots.transpose(1, 2).flatten(2)

    def vectors(self) -> Inexact[Tensor, "batch out row col"]:
        """Return T_ij x_j."""
        if self.weight is None:
            return self._columns(self.inner)
        return self._columns((self.weight @ self.inner.flatten(2)).unflatten(2, self.inner.shape[2:]))

    def _vectors_at(self, col: Int[Tensor, "batch ownrow"]) -> Float[Tensor, "batch out ownrow"]:
        """Return T_ij x_j for one column of each row of `own`."""
        v = self._columns(self.inner[:, :, self.diagonal_rows])
        v = v.gather(3, col[:, None, :, None].expand(-1, v.shape[1], -1, 1)).squeeze(3)
        if self.weight is None:
            return v
        weight = self._weights(self.weight)
        if weight.shape[1] == 1:
            return weight[:, 0] @ v
        # In the layout of the folded weights, which differ by key: (key, channel, out). A product of each row with its
        # matrix would be a call of BLAS for each row.
        facing = weight.mT[torch.arange(len(col), device=col.device).unsqueeze(1), col]
        return facing.mul_(v.transpose(1, 2).unsqueeze(3)).sum(2).transpose(1, 2)

    def _weights(self, weight: Float[Tensor, "#group out channel"]) -> Float[Tensor, "#batch #col out channel"]:
        """Return W by sequence and key, with axes of size 1 if it is shared."""
        return weight.unflatten(0, (len(self.diagonal) if len(weight) == len(self.inner) else 1, -1))

    def _by_pair(self, norms: Float[Tensor, "group row col"]) -> Float[Tensor, "batch *part row allcol"]:
        if self.portions is not None:
            return norms.unflatten(0, (len(self.diagonal), self.portions, -1)).transpose(2, 3).flatten(3)
        return self._split(norms).transpose(1, 2).flatten(2)

    def _columns(self, tile: Inexact[Tensor, "group any row col"]) -> Inexact[Tensor, "batch any row allcol"]:
        return self._split(tile).permute(0, 2, 3, 1, 4).flatten(3)

    def _split(self, tile: Tensor) -> Tensor:
        """Split the first axis: (group, ...) to (batch, group of a sequence, ...)."""
        return tile.unflatten(0, (len(self.diagonal), -1))


@dataclass(frozen=True, eq=False)
class PairwiseContributions(PairwiseForm):
    """The vectors T_ij x_j of all pairs of a layer, in tiles; built by `pairwise_of`."""

    def times(self, factor: float) -> "PairwiseContributions":
        """Return the form of `factor` times the layer."""
        if factor == 1:
            return self
        if self.weight is not None:
            folded = None if self.folded is None else factor * self.folded
            return replace(self, weight=factor * self.weight, folded=folded)
        terms = [replace(t, taps={lag: factor * tap for lag, tap in (t.taps or {}).items()}) for t in self.terms]
        return replace(self, terms=terms)

    def projected(self, matrix: Float[Tensor, "size out"]) -> "PairwiseContributions":
        """Return the form of `matrix` times the outputs; the form has no tail."""
        assert not self.tail
        weight = matrix if self.weight is None else matrix @ self.weight
        folded = None if self.folded is None else self.folded @ matrix.mT
        return replace(self, weight=weight, folded=folded, shape=(*self.shape[:3], len(matrix)))

    def tiles(self, causal: bool, columns: int | None = None, rows: int | None = None) -> Iterator[Tile]:
        """Yield every pair once, from the first row to the last, in tiles of at most `rows` rows and `columns` columns.

        If `causal`, which requires a causal layer, most pairs above the diagonal are left out. `rows` defaults to as
        many as `max_memory` allows.
        """
        for tile in self.tiles_before_tail(causal, columns, rows):
            if not self.tail:
                yield tile
                continue
            index = tile.diagonal + tile.cols.start
            vectors = tile.vectors()
            for stage in self.tail:
                vectors = stage.at(index).apply(vectors.transpose(1, 2), bias=False).transpose(1, 2)
            yield replace(tile, inner=vectors, weight=None)

    def tiles_before_tail(self, causal: bool, columns: int | None = None, rows: int | None = None) -> Iterator[Tile]:
        """Yield `tiles` without the stages of `tail`."""
        _, queries, keys, _ = self.shape
        columns = tile_columns(self, columns)
        rows = tile_rows(self, columns=columns) if rows is None else rows
        streams = [_stream(term, rows) for term in self.terms]
        for block_rows in parts(queries, rows):
            blocks = [None if stream is None else next(stream)[1] for stream in streams]
            for cols in _columns(keys, columns, block_rows if causal else None):
                # A causal column is zero in the block's rows before it.
                rows_here = slice(max(block_rows.start, cols.start), block_rows.stop) if causal else block_rows
                yield self._tile(block_rows, rows_here, cols, blocks)

    def _tile(self, block_rows: slice, rows: slice, cols: slice, blocks: Sequence[Block | None]) -> Tile:
        """Return the tile of `rows`, which end the rows `block_rows`."""
        index = torch.arange(rows.start, rows.stop, device=self.values.device).expand(self.shape[0], -1)
        inner, weight = self._inner(block_rows, rows, cols, blocks)
        # Rows 64-127 and columns 96-127: the rows 96-127, the last 32 of the tile, have their token's column in it.
        diagonal_rows = slice(max(cols.start - rows.start, 0), max(cols.stop - rows.start, 0))
        return Tile(rows, cols, inner, weight, index - cols.start, diagonal_rows)

    def _inner(
        self, block_rows: slice, rows: slice, cols: slice, blocks: Sequence[Block | None]
    ) -> tuple[Float[Tensor, "group channel row col"], Float[Tensor, "#group out channel"] | None]:
        """Return v and W in the layout of `Tile`."""
        skipped = rows.start - block_rows.start
        if self.folded is not None:
            assert blocks[0] is not None
            alpha = blocks[0](cols)[:, :, skipped:].permute(0, 3, 1, 2)
            return flushed(alpha).flatten(0, 1).unsqueeze(3), self.folded[:, cols].flatten(0, 1).mT
        v: Tensor | None = None
        for block in blocks:
            if block is not None:
                term_v = block(cols)[:, :, skipped:]
                v = term_v if v is None else v.add_(term_v)
        if v is None:
            channels = next(iter((self.terms[0].taps or {}).values())).shape[2]
            v = self.values.new_zeros(self.shape[0], channels, rows.stop - rows.start, cols.stop - cols.start)
        for term in self.terms:
            if term.mixer is None:
                for lag, tap in (term.taps or {}).items():
                    add_band(v, rows, cols.start, lag, tap.transpose(1, 2))
        return flushed_(v), None if self.weight is None else self.weight.unsqueeze(0)


def pairwise_of(chain: Chain, x: Float[Tensor, "batch key in"], queries: int, out: int) -> PairwiseContributions | None:
    """Return a layer's chain as `PairwiseContributions`, None if it has no such form."""
    mixing = [k for k, stage in enumerate(chain) if stage.mixes]
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
    value = run(chain[:first], x, bias=False)
    if value.is_complex() or (weight is not None and weight.is_complex()):
        return None
    shape = (x.shape[0], queries, x.shape[1], out)
    mixer = terms[0].mixer if len(terms) == 1 and not terms[0].is_weighted else None
    if mixer is not None and weight is not None and mixer.heads < value.shape[2]:
        by_head = value.unflatten(2, (mixer.heads, -1)), weight.unflatten(1, (mixer.heads, -1))
        folded = torch.einsum("bjhp,ohp->bjho", *by_head)
        return PairwiseContributions(terms, weight, folded, tail, shape)
    return PairwiseContributions([_with_values(term, value) for term in terms], weight, None, tail, shape)


def _columns(keys: int, step: int, causal_rows: slice | None) -> Iterator[slice]:
    """Yield `step` columns at a time; for `causal_rows` half as many from the first row on, and none after the last."""
    start, stop = 0, keys if causal_rows is None else min(keys, causal_rows.stop)
    while start < stop:
        width = step if causal_rows is None or start < causal_rows.start else max(1, step // 2)
        end = min(start + width, stop if causal_rows is None or start >= causal_rows.start else causal_rows.start)
        yield slice(start, end)
        start = end


def _stream(term: FactoredTerm, rows: int) -> Iterator[tuple[slice, Block]] | None:
    if term.mixer is None:
        return None
    return term.mixer.blocks(rows) if term.taps is None else term.mixer.weighted_blocks(rows, term.left, term.taps)


def _with_values(term: FactoredTerm, value: Float[Tensor, "batch key channel"]) -> FactoredTerm:
    """Return the term with the values multiplied into its taps."""
    wide = term.at_width(value.shape[2])
    taps = wide.taps or {0: value.new_ones(1, 1, 1)}
    return replace(wide, taps={lag: tap * shifted(value, lag) for lag, tap in taps.items()})
