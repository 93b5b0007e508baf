"""T_ij x_j of all pairs, tile by tile: vectors that are reduced as soon as they are there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.contributions import shifted
from unilinattn.memory import rows_within
from unilinattn.mixers.base import Block
from unilinattn.stages import Chain, Matrix, Scale, run
from unilinattn.terms import Term, add_band, terms, widened, widened_size

TILE = 64
"""Rows and columns of a tile: enough for the product with the output projection to run at its rate."""


@dataclass(frozen=True, eq=False)
class Shares:
    """A layer as T_ij x_j = tail_i(W v_ij), v_ij a sum of terms whose taps hold the values; built by `shares_of`.

    With one weight a head (softmax) W is folded into each head's values first, so v has heads for channels.
    """

    found: Sequence[Term]
    weight: Float[Tensor, "out channel"] | None
    folded: Float[Tensor, "batch key head out"] | None
    tail: Chain
    shape: tuple[int, int, int, int]

    @property
    def causal(self) -> bool:
        """Whether no key adds anything to an earlier row."""
        return all(term.mixer is None or term.mixer.is_lower_triangular for term in self.found)

    def tiles(
        self, causal: bool, columns: int = TILE, rows: int | None = None
    ) -> Iterator[tuple[slice, slice, Float[Tensor, "batch out row col"]]]:
        """Yield (rows, columns, T_ij x_j), every pair once, from the first row to the last.

        With `causal`, which is only for layers that are, most of the pairs that are zero are left out. `rows`: at most
        so many at a time, see `rows`. The tile is the caller's to write into.
        """
        _, queries, keys, _ = self.shape
        rows = self.rows(columns=columns) if rows is None else rows
        streams = [_stream(term, rows) for term in self.found]
        for start in range(0, queries, rows):
            part = slice(start, min(start + rows, queries))
            blocks = [None if stream is None else next(stream)[1] for stream in streams]
            for cols in _columns(keys, columns, part if causal else None):
                # Columns that begin inside the block are zero in the rows before them.
                own = slice(max(start, cols.start), part.stop) if causal else part
                vectors = self._vectors(part, own, cols, blocks)
                for stage in self.tail:
                    vectors = stage.at(self._index(own)).apply(vectors.transpose(1, 2), bias=False).transpose(1, 2)
                yield own, cols, vectors

    def rows(self, beside: int = 0, parts: int = 1, columns: int = TILE, name: str | None = "vectors T_i(x_j)") -> int:
        """Return how many rows of a tile `max_memory` allows, or a part of it.

        `beside`: how many more tiles the caller will hold. Raises `MemoryLimitError` if not even one row fits.
        """
        batch, _, _, out = self.shape
        width = parts * self._values.element_size()
        more = beside * batch * min(columns, self.shape[2]) * out
        return rows_within(lambda n: (self.numbers(n, columns) + n * more) * width, TILE, name)

    def numbers(self, rows: int, columns: int = TILE) -> int:
        """Return how many numbers tiles of so many rows take, and the values that they are made of."""
        batch, _, keys, out = self.shape
        channels = out if self.weight is None else self.weight.shape[1]
        heads = max((term.mixer.heads for term in self.found if term.mixer is not None), default=1)
        inner = heads if self.folded is not None else 2 * channels
        mixers = [(term.mixer, len(term.taps or ())) for term in self.found if term.mixer is not None]
        states = sum(mixer.carried_size for mixer, _ in mixers)
        if self.folded is None:
            states += sum(mixer.weighted_size(rows, min(columns, keys), channels, lags) for mixer, lags in mixers)
        return batch * rows * min(columns, keys) * (inner + 2 * out + heads) + states + self.values_size

    def operations(self) -> int:
        """Return how much tiles of all pairs multiply."""
        batch, queries, keys, out = self.shape
        causal = all(term.mixer is None or term.mixer.is_lower_triangular for term in self.found)
        pairs = batch * queries * min(keys, (keys + TILE) // 2 if causal else keys)
        if self.folded is not None:
            return pairs * self.folded.shape[2] * out
        channels = out if self.weight is None else self.weight.shape[1]
        inner = sum(term.mixer.state_size + len(term.taps or ()) for term in self.found if term.mixer is not None)
        return pairs * channels * (inner + (0 if self.weight is None else out))

    @property
    def values_size(self) -> int:
        """How many numbers the values of all terms take: linear in length."""
        if self.folded is not None:
            return self.folded.numel()
        return sum(widened_size(term) for term in self.found)

    def _vectors(self, part: slice, own: slice, cols: slice, blocks: Sequence[Block | None]) -> Tensor:
        """Return W v_ij for some of the rows of a block."""
        skipped = own.start - part.start
        if self.folded is not None:
            assert blocks[0] is not None
            alpha = blocks[0](cols)[:, :, skipped:].permute(0, 3, 2, 1)
            return (alpha @ self.folded[:, cols]).permute(0, 3, 2, 1)
        found = [block(cols)[:, :, skipped:] for block in blocks if block is not None]
        channels = next(iter((self.found[0].taps or {}).values())).shape[2]
        v = (
            found[0]
            if found
            else self._values.new_zeros(self.shape[0], channels, own.stop - own.start, cols.stop - cols.start)
        )
        for other in found[1:]:
            v = v + other
        for term in self.found:
            if term.mixer is None:
                for lag, tap in (term.taps or {}).items():
                    add_band(v, own, cols.start, lag, tap.transpose(1, 2))
        return v if self.weight is None else (self.weight @ v.flatten(2)).unflatten(2, v.shape[2:])

    def _index(self, rows: slice) -> Tensor:
        return torch.arange(rows.start, rows.stop, device=self._values.device).expand(self.shape[0], -1)

    @property
    def _values(self) -> Tensor:
        return self.folded if self.folded is not None else next(iter((self.found[0].taps or {}).values()))


def shares_of(chain: Chain, x: Float[Tensor, "batch key in"], queries: int, out: int) -> Shares | None:
    """Return a layer's chain as `Shares`, None where it has no such form: then rows are taken one after the other."""
    mixing = [at for at, stage in enumerate(chain) if stage.mixes]
    if not mixing:
        return None
    first, last = mixing[0], mixing[-1]
    end = last + 1
    while end < len(chain) and isinstance(chain[end], Scale):
        end += 1
    found = terms(chain[first:end])
    if found is None:
        return None
    projection = chain[end] if end < len(chain) else None
    weight = projection.weight if isinstance(projection, Matrix) else None
    tail = chain[end if weight is None else end + 1 :]
    u = run(chain[:first], x, bias=False)
    if u.is_complex() or (weight is not None and weight.is_complex()):
        return None
    shape = (x.shape[0], queries, x.shape[1], out)
    only = found[0]
    if len(found) == 1 and weight is not None and only.mixer is not None and only.left is None and only.taps is None:
        heads = only.mixer.heads
        folded = torch.einsum("bjhp,ohp->bjho", u.unflatten(2, (heads, -1)), weight.unflatten(1, (heads, -1)))
        return Shares(found, weight, folded, tail, shape)
    return Shares([_with_values(term, u) for term in found], weight, None, tail, shape)


def _columns(keys: int, step: int, inside: slice | None) -> Iterator[slice]:
    """Yield the columns of a block of rows; those `inside` a causal one in halves, and none after them."""
    start, stop = 0, keys if inside is None else min(keys, inside.stop)
    while start < stop:
        width = step if inside is None or start < inside.start else max(1, step // 2)
        end = min(start + width, stop if inside is None or start >= inside.start else inside.start)
        yield slice(start, end)
        start = end


def _stream(term: Term, rows: int) -> Iterator[tuple[slice, Block]] | None:
    if term.mixer is None:
        return None
    return term.mixer.blocks(rows) if term.taps is None else term.mixer.weighted_blocks(rows, term.left, term.taps)


def _with_values(term: Term, u: Float[Tensor, "batch key channel"]) -> Term:
    """Return the term with each key's value multiplied into its taps."""
    channels = u.shape[2]
    taps: dict[int, Tensor] = {}
    for lag, tap in (term.taps or {0: u.new_ones(1, 1, 1)}).items():
        taps[lag] = widened(tap, channels) * shifted(u, lag)
    return Term(term.mixer, None if term.left is None else widened(term.left, channels), taps)
