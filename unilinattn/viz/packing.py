"""Packed scores: half precision with one scale a map, deflated, as text for a page."""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from unilinattn.viz.colours import Array, largest

MOST_CELLS = 2_200_000
"""Largest number of stored cells of a page: four causal maps of 1024 tokens; maps of more are pooled into blocks."""

MOST_BYTES = 2_800_000
"""Size of the deflated scores above which their mantissas are shortened; the text is a third longer."""

ROUNDING = 1e-6
"""Share of the largest score below which scores of keys after the query are rounding, as of a convolution by FFT."""

MANTISSAS = (10, 8, 6, 5)
"""Bits of the mantissa, from those of half precision to the shortest."""


@dataclass(frozen=True)
class Packed:
    """Scores as text: base64 of a deflated stream of all high bytes, then all low bytes, of half-precision numbers.

    Attributes:
        text: the stream.
        scales: the factor of each map, its largest absolute score.
        count: number of stored cells.
        mantissa: stored bits of the mantissa.
    """

    text: str
    scales: tuple[float, ...]
    count: int
    mantissa: int

    @property
    def error(self) -> float:
        """Largest relative error of a stored score above 6e-5 of its map's largest."""
        return 2.0 ** -(self.mantissa + 1)


def pack(maps: Sequence[Array]) -> Packed:
    """Pack maps, each (row, column), in order and row by row; of a causal map only keys up to the query."""
    scales = [largest(values) or 1.0 for values in maps]
    stored = [
        (values[np.tril_indices(len(values))] if causal(values) else values.ravel()) / scale
        for values, scale in zip(maps, scales, strict=True)
    ]
    cells = np.concatenate(stored).astype(np.float16).view(np.uint16) if stored else np.zeros(0, np.uint16)
    mantissa = _mantissa(cells)
    dropped = 10 - mantissa
    if dropped:
        half, mask = np.uint16(1 << (dropped - 1)), np.uint16(0xFFFF & ~((1 << dropped) - 1))
        cells = (cells + half) & mask
    # The high bytes, sign and exponent, of neighbours are alike: apart from the low ones they deflate well.
    body = zlib.compress(_bytes(cells >> 8) + _bytes(cells & 255), 6)
    return Packed(base64.b64encode(body).decode(), tuple(scales), len(cells), mantissa)


def causal(values: Float[Array, "row column"]) -> bool:
    """Return whether a map is square and has no score for keys after the query: NaN, or below `ROUNDING`."""
    rows, columns = values.shape
    if rows != columns or rows < 2:
        return False
    later = values[np.triu_indices(rows, 1)]
    return bool(np.all((np.abs(later) <= ROUNDING * largest(values)) | np.isnan(later)))


def pooling(sizes: Sequence[tuple[int, int]]) -> int:
    """Return the side of the blocks into which maps of `sizes`, (rows, columns), are pooled: 1 if all cells fit.

    Square maps are counted as causal.
    """
    step = 1
    while sum(stored_cells(-(-rows // step), -(-columns // step)) for rows, columns in sizes) > MOST_CELLS:
        step += 1
    return step


def pooled(scores: Float[Array, "row column"], step: int) -> Float[Array, "block_row block_column"]:
    """Return the score of largest absolute value in each block; NaN if all its scores are NaN."""
    blocks = _blocks(scores, step).transpose(0, 2, 1, 3)
    flat = blocks.reshape(*blocks.shape[:2], -1)
    best = np.where(np.isnan(flat), -1.0, np.abs(flat)).argmax(-1)
    return np.take_along_axis(flat, best[..., None], -1)[..., 0]


def any_in_blocks(pattern: Array, step: int) -> Array:
    """Return whether any cell of each block is True."""
    return np.asarray(_blocks(pattern, step).any((1, 3)))


def stored_cells(rows: int, columns: int) -> int:
    """Return the number of cells that a map of this size stores, if a square one is causal."""
    return rows * (rows + 1) // 2 if rows == columns else rows * columns


def _mantissa(cells: Array) -> int:
    """Return the longest mantissa for which the deflated cells have about `MOST_BYTES` or less."""
    if 2 * len(cells) <= MOST_BYTES:
        return MANTISSAS[0]
    high = len(zlib.compress(_bytes(cells >> 8), 1))
    # Two bits of the mantissa are in the high byte; the others deflate little.
    return next((bits for bits in MANTISSAS if high + len(cells) * (bits - 2) / 8 <= MOST_BYTES), MANTISSAS[-1])


def _bytes(cells: Array) -> bytes:
    return cells.astype(np.uint8).tobytes()


def _blocks(cells: Array, step: int) -> Array:
    rows, columns = (-(-size // step) for size in cells.shape)
    spare = ((0, rows * step - cells.shape[0]), (0, columns * step - cells.shape[1]))
    filler = False if cells.dtype == bool else np.nan
    return np.pad(cells, spare, constant_values=filler).reshape(rows, step, columns, step)
