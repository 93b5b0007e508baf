"""The reduced map on a GPU: tiles of tokens as products over (head, state); see README.md."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.launch import Factor, Precision, factor, on, power
from unilinattn.kernels.reduced_map import tiled
from unilinattn.kernels.reduced_map.dense import of_tokens
from unilinattn.kernels.reduced_map.tiled import HeadMap
from unilinattn.kernels.reduced_map.triton_kernels import (
    SUB,
    PanelSizes,
    add_parts,
    chunk_factors,
    diagonal_tiles,
    far_tiles,
)
from unilinattn.kernels.row_product.naive import Sign
from unilinattn.memory import allowed, parts

CHUNK = 64
"""Tokens per chunk, whose factors share a reference: the chunk's end for writes, its beginning for reads."""

ROWS = 1024
"""Rows per block; the factors of the columns before it are recomputed for each block."""

COLUMNS = 4096
"""Columns per panel."""

INNER = 2048
"""Fewest (head, state) pairs per panel; where memory allows, a panel has more, and fewer kernels start."""

SHARE = 2
"""The factors of a panel take at most one half of the memory that rows leave, unless `INNER` pairs need more."""

COPIES = 4
"""Copies of a block of rows for which `_heads_at_once` leaves memory, since callers hold some."""

PROGRAMS = 1024
"""Programs that fill the diagonal: parts of the inner axis occupy a GPU that has too few rows."""

LEAST = 128
"""Fewest (head, state) pairs of a part of the inner axis, a multiple of 32; each part writes a separate sum."""


class Panel(NamedTuple):
    """The factors of a block of rows and of some columns.

    Attributes:
        block: the block of rows, which counts the chunks.
        read: (batch, row chunk * CHUNK, inner), the weights of a row on the state before its chunk, `left` included.
        write: (plane, batch, column chunk * CHUNK, inner), the write of a column, decayed to the end of its chunk, for
            the next chunk, and, with taps, to the end of the next chunk, for all later ones.
        fade: (batch, row chunk, column chunk, inner), the decay across the chunks between.
        chunks: the first chunk of the columns and the one after their last.
    """

    block: "RowBlock"
    read: Float[Tensor, "batch row inner"]
    write: Float[Tensor, "plane batch col inner"]
    fade: Float[Tensor, "batch rowchunk colchunk inner"]
    chunks: tuple[int, int]


def reduced_rows(
    head_map: HeadMap, blocks: Iterable[slice], *, precision: Precision = "tf32x3"
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield blocks of rows of a map, in any order, in float32.

    `precision` is that of the products' inputs; sums are float32.
    Time: half of one product (L x HN)(HN x L). Memory: the block, and the factors of one tile of heads and columns.
    """
    if head_map.reach > CHUNK:
        # A tap that crosses a whole chunk would need the factors of more than two chunks per column.
        yield from tiled.reduced_rows(head_map, blocks)
        return
    batch, length, heads, _ = head_map.shape
    for rows in blocks:
        block: Tensor | None = None
        for tile in parts(heads, _heads_at_once(rows.stop - rows.start, head_map.shape)):
            row_block = RowBlock(head_map, rows, tile, precision)
            for panel in row_block.panels(COLUMNS):
                if block is None:
                    block = panel.read.new_zeros(batch, rows.stop - rows.start, length)
                launch_far(block, panel, block.shape[1], "add")
            assert block is not None
            row_block.add_diagonal(block)
        assert block is not None
        yield rows, block


def held_elements(rows: int, shape: tuple[int, int, int, int]) -> int:
    """Return the elements that `reduced_rows` holds for blocks of `rows` rows, the block included."""
    batch, length, _, state = shape
    inner = _heads_at_once(rows, shape) * state
    padded = -(-min(rows, length) // CHUNK) * CHUNK
    count, _ = _inner_parts(inner, padded // SUB * batch)
    return batch * (padded * length + inner * _pair_elements(rows, length) + count * padded * CHUNK)


def _pair_elements(rows: int, length: int) -> int:
    """Return the elements of the factors of a panel for each (head, state) pair of a sequence."""
    rows = -(-min(rows, length) // CHUNK) * CHUNK
    columns = -(-max(rows, min(COLUMNS, length)) // CHUNK) * CHUNK
    # Query, key, decay, their writes, two planes of them and one copy, and a decay for each pair of chunks.
    return rows + 7 * columns + rows * columns // CHUNK**2


def _heads_at_once(rows: int, shape: tuple[int, int, int, int]) -> int:
    """Return the heads of a panel of `rows` rows."""
    batch, length, heads, state = shape
    element_bytes = 4
    remaining = allowed() // element_bytes - COPIES * batch * min(rows, length) * length
    allowed_heads = remaining // (SHARE * max(1, batch * state * _pair_elements(rows, length)))
    return min(heads, max(1, INNER // state, allowed_heads))


def _inner_parts(inner: int, programs: int) -> tuple[int, int]:
    """Return the number of parts of an inner axis, each for `programs` programs, and the (head, state) pairs of each.

    The sizes alone decide, so a sum has the same order in each run.
    """
    # No part is wider than the whole axis.
    width = min(inner, max(LEAST, -(-inner * programs // PROGRAMS)))
    width = -(-width // 32) * 32
    return -(-inner // width), width


@dataclass(frozen=True, eq=False)
class RowBlock:
    """A block of rows of the map, for a tile of heads; its chunks are counted from `origin`."""

    head_map: HeadMap
    rows: slice
    heads: slice
    precision: Precision

    @property
    def row(self) -> int:
        """The first chunk of the rows."""
        return -(-self.rows.start // CHUNK)

    @property
    def origin(self) -> int:
        """The first token of chunk 0, at most 0; the rows begin with a chunk."""
        return self.rows.start - self.row * CHUNK

    def panels(self, columns: int) -> Iterator[Panel]:
        """Yield panels: of the columns in the chunks of the rows, then of earlier columns, nearest first."""
        row = self.row
        near_chunks = row, row - (self.rows.start - self.rows.stop) // CHUNK
        read, near, near_total = self._chunks(near_chunks, read=True)
        assert read is not None
        fade = _fade(torch.zeros_like(near_total), near_total, row, row)
        yield Panel(self, read, self._planes(near, None, near_total, near_chunks), fade, near_chunks)
        next_chunk = near.unflatten(1, (-1, CHUNK))[:, :1]
        nothing, step = torch.zeros_like(near_total[:, :1]), max(1, columns // CHUNK)
        # The decays from chunk `last` to the rows, without that chunk and with it.
        after, crossed, last_total = nothing, nothing, near_total[:, :1]
        for last in range(row, 0, -step):
            chunks = max(0, last - step), last
            _, written, total = self._chunks(chunks, read=False)
            inside = functional.pad(total[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 1))
            across = inside + crossed
            table = across if self.head_map.taps is None else torch.cat([across, after], dim=1)
            write = self._planes(written, next_chunk, torch.cat([total, last_total], dim=1), chunks)
            yield Panel(self, read, write, _fade(table, near_total, chunks[0], row), chunks)
            next_chunk = written.unflatten(1, (-1, CHUNK))[:, :1]
            after, crossed, last_total = across[:, :1], across[:, :1] + total[:, :1], total[:, :1]

    def add_diagonal(self, out: Float[Tensor, "batch row col"], *, band: bool = False) -> None:
        """Add the writes that land in the rows' own chunks: one pass per tap, with column = landing token - lag."""
        rows = self.rows
        query, key, decay = self._factors_of(rows)
        batch, count, heads, state = decay.shape
        padded, inner = -(-count // CHUNK) * CHUNK, heads * state
        tiles = padded // SUB
        number, width = _inner_parts(inner, tiles * batch)
        partial = torch.empty(number, batch, padded, CHUNK, dtype=torch.float32, device=decay.device)
        landing: Mapping[int, Tensor | None] = self.head_map.taps or {0: None}
        for lag, tap in landing.items():
            with on(out):
                diagonal_tiles[(tiles, batch, number)](
                    factor(query),
                    factor(key),
                    factor(decay),
                    self._weight(self.head_map.left, rows, decay),
                    self._weight(tap, rows, decay),
                    partial,
                    inner,
                    state,
                    count,
                    padded,
                    width,
                    CHUNK=CHUNK,
                    PRECISION=self.precision,
                    INNER=power(min(32, inner), 16),
                )
                add_parts[(tiles, batch)](
                    partial,
                    out,
                    *out.stride()[:2],
                    number,
                    count,
                    padded,
                    rows.start,
                    lag,
                    CHUNK=CHUNK,
                    BAND=band,
                )

    def _tokens(self, chunks: tuple[int, int]) -> tuple[slice, int]:
        """Return the tokens of chunks, and the place of the first chunk's beginning, which may be before token 0."""
        begin = self.origin + chunks[0] * CHUNK
        return slice(max(0, begin), min(self.rows.stop, self.origin + chunks[1] * CHUNK)), begin

    def _chunks(
        self, chunks: tuple[int, int], *, read: bool
    ) -> tuple[Tensor | None, Float[Tensor, "batch col inner"], Float[Tensor, "batch chunk inner"]]:
        """Return the read factors, write factors and whole log-decays of chunks, each relative to its chunk."""
        tokens, begin = self._tokens(chunks)
        query, key, decay = self._factors_of(tokens)
        batch, _, heads, state = decay.shape
        inner, count = heads * state, chunks[1] - chunks[0]
        written = torch.empty(batch, count * CHUNK, inner, dtype=torch.float32, device=decay.device)
        reading = torch.empty_like(written) if read else None
        total = written.new_empty(batch, count, inner)
        width = power(min(64, inner))
        with on(written):
            chunk_factors[(count * -(-inner // width), batch)](
                factor(query),
                factor(key),
                factor(decay),
                self._weight(self.head_map.left if read else None, tokens, decay),
                reading,
                written,
                total,
                inner,
                state,
                tokens.start - begin,
                tokens.stop - begin,
                count,
                CHUNK=CHUNK,
                INNER=width,
                num_warps=8,
            )
        return reading, written, total

    def _planes(
        self,
        written: Float[Tensor, "batch col inner"],
        beyond: Tensor | None,
        total: Float[Tensor, "batch chunk inner"],
        chunks: tuple[int, int],
    ) -> Float[Tensor, "plane batch col inner"]:
        """Sum the taps of each column: those that land in its own chunk, and all of them at the next chunk's end.

        `written`: writes decayed to the end of their chunk; `beyond`: the same for the chunk after the last; `total`:
        the log-decay of every chunk, that chunk included.
        """
        if self.head_map.taps is None:
            return written.unsqueeze(0)
        length = written.shape[1]
        if beyond is not None:
            written = torch.cat([written, beyond.flatten(1, 2)], dim=1)
        here, there = written.new_zeros(2, written.shape[0], length, written.shape[2]).unbind()
        position = torch.arange(length, device=written.device) % CHUNK
        tokens, begin = self._tokens((chunks[0], chunks[0] + written.shape[1] // CHUNK))
        around = (0, 0, tokens.start - begin, begin + written.shape[1] - tokens.stop)
        for lag, tap in self.head_map.taps.items():
            weight = self._of_heads(tap, tokens)
            weight = weight if tap.shape[1] == 1 else functional.pad(weight, around)
            each = weight.to(written.dtype).repeat_interleave(written.shape[2] // weight.shape[2], dim=2)
            shifted = (written * each)[:, lag : lag + length]
            shifted = functional.pad(shifted, (0, 0, 0, length - shifted.shape[1]))
            same = (position + lag < CHUNK)[:, None]
            here += shifted.where(same, 0)
            there += shifted.where(~same, 0)
        following = functional.pad(total[:, 1:], (0, 0, 0, length // CHUNK + 1 - total.shape[1]))
        later = here.unflatten(1, (-1, CHUNK)) * following.exp().unsqueeze(2)
        return torch.stack([here, later.flatten(1, 2) + there])

    def _factors_of(self, tokens: slice) -> tuple[Tensor, Tensor, Tensor]:
        query, key, decay = self.head_map.factors(tokens, self.heads)
        return query.expand_as(decay), key.expand_as(decay), decay

    def _of_heads(self, weight: Tensor, tokens: slice) -> Float[Tensor, "#batch #token head"]:
        return of_tokens(weight, tokens)[:, :, self.heads]

    def _weight(self, weight: Tensor | None, tokens: slice, like: Tensor) -> Factor | None:
        """Return a weight (batch, token, head) of some tokens, expanded along broadcast axes; None for None."""
        if weight is None:
            return None
        return factor(self._of_heads(weight, tokens).expand(like.shape[:3]), "batch token head")


def launch_far(
    out: Float[Tensor, "batch _ col"],
    panel: Panel,
    rows: int,
    kind: Literal["add", "band", "fold"],
    *,
    weight: Float[Tensor, "batch row"] | None = None,
    scale: Float[Tensor, "batch row"] | None = None,
    sign: Sign = "keep",
) -> None:
    """Compute the tiles of a panel with `rows` rows whose columns lie in chunks before their rows.

    They are added to `out`: the map of the rows, or for "band" the part of each row in its own chunk and the one
    before. "fold" sums the rows of each tile by column, with `weight`, `scale` and `sign`.
    """
    block, (first, last) = panel.block, panel.chunks
    batch, padded, inner = panel.read.shape
    row_chunks = padded // CHUNK
    fades = panel.fade.shape[2]

    def grid(options: dict[str, int]) -> tuple[int, int]:
        across = 1 if kind == "band" else last - first
        return across * (CHUNK // options["COLS"]), batch * row_chunks * (CHUNK // options["ROWS"])

    with on(out):
        far_tiles[grid](
            panel.read,
            panel.write,
            panel.fade,
            out,
            *out.stride()[:2],
            None if weight is None else factor(weight, "batch token"),
            None if scale is None else factor(scale, "batch token"),
            inner,
            PanelSizes(first, last, block.row, row_chunks, fades, block.origin, block.rows.stop, rows),
            PLANES=panel.write.shape[0],
            CHUNK=CHUNK,
            KIND=kind,
            SIGN=sign,
            PRECISION=block.precision,
        )


def _fade(
    across: Float[Tensor, "batch colchunk inner"],
    own_total: Float[Tensor, "batch rowchunk inner"],
    first: int,
    row: int,
) -> Float[Tensor, "batch rowchunk colchunk inner"]:
    """Return the decay across the chunks between a column's and a row's, with log-decays summed over row chunks."""
    rows, chunks = own_total.shape[1], across.shape[1]
    chunk = torch.arange(first, first + chunks, device=across.device)
    crossed = chunk < torch.arange(row, row + rows - 1, device=across.device)[:, None]
    # A row's decay is that of the row before, and across that row's chunk: one cumulative sum, not a launch for each.
    steps = own_total[:, :-1, None].where(crossed[..., None], 0)
    return torch.cat([across[:, None], steps], dim=1).cumsum(1).exp()
