"""A board: heat maps in rows and columns, drawn and linked by the page's script from packed scores."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from unilinattn.viz.blocks import details, table
from unilinattn.viz.colours import Array, isolated, largest
from unilinattn.viz.image import png
from unilinattn.viz.packing import ROUNDING, Packed, any_in_blocks, causal, pack, pooled, pooling

TOP = 5
"""Number of tokens in the table of the largest scores."""

MOST_ROWS = 400
"""Largest number of rows of the table of the largest scores."""


@dataclass(frozen=True)
class Picture:
    """One heat map of a cell of a board: a layer, or one head of it, of one sequence.

    Attributes:
        values: the scores; NaN is no score.
        title: name of the layer.
        notes: facts about the picture, such as its error.
        sequence: index of the sequence.
        names: names of the two axes.
        row_tokens, column_tokens: texts of the rows and of the columns.
        row_titles: names of the rows if they are no tokens but, for example, layers.
        query: the row to show first; in a map without queries, the column of the explained token.
        expected: the pattern to outline.
        grid: (rows, columns) of an image's patches, if the columns are patches: a row is shown as an image.
        places: the columns that are patches, in order; the others, such as [CLS], are listed apart.
        facts: numbers of each row by name, such as its logit.
        head: name of the head, if the layer has a picture for each.
        image: uint8 pixels beneath the patches, (height, width, 3).
        sinks: the columns of attention sinks, which are left out of the colour scale and of the largest scores.
    """

    values: Float[Array, "row column"]
    title: str
    notes: str = ""
    sequence: int = 0
    names: tuple[str, str] = ("query", "key")
    row_tokens: Sequence[str] | None = None
    column_tokens: Sequence[str] | None = None
    row_titles: Sequence[str] | None = None
    query: int | None = None
    expected: Bool[Array, "row column"] | None = None
    grid: tuple[int, int] | None = None
    places: Sequence[int] | None = None
    facts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    head: str = ""
    image: Array | None = None
    sinks: Sequence[int] = ()

    @property
    def ranked(self) -> Float[Array, "row column"]:
        """The scores with NaN at attention sinks."""
        if not self.sinks:
            return self.values
        values = self.values.astype(float)
        values[:, list(self.sinks)] = np.nan
        return values


@dataclass(frozen=True)
class Cell:
    """The pictures at one row and one column of a board, one for each layer, head and sequence.

    Attributes:
        row, column: names of the row and of the column.
        pictures: the pictures, by sequence, then by layer, then by head.
        start: index of the layer to show first.
        apart: whether a query's own token is left out of the colour scale by default.
        notes: a text for each layer, below its picture.
    """

    row: str
    column: str
    pictures: Sequence[Picture]
    start: int = 0
    apart: bool = False
    notes: Sequence[str] = ()


def board(
    cells: Sequence[Cell],
    *,
    columns: Mapping[str, str] | None = None,
    sequences: tuple[str, Sequence[str]] = ("Sequence", ()),
    layer_hint: str = "draw fewer layers or sequences for all cells",
) -> str:
    """Return a board of cells as HTML; without a script, its table of the largest scores remains.

    `columns`: a note for each column. `sequences`: the word for a sequence, and their names, by default their indices.
    `layer_hint`: the end of the message that maps were pooled.
    """
    pictures = [picture for cell in cells for picture in cell.pictures]
    step = pooling([picture.values.shape for picture in pictures])
    drawn = [pooled(p.ranked, step) if _pools(p, step) else p.values for p in pictures]
    packed = pack(drawn)
    texts: dict[tuple[str, ...], int] = {}
    images: dict[int, Array] = {}
    entries = iter(
        _entry(picture, values, scale, step if _pools(picture, step) else 1, texts, images)
        for picture, values, scale in zip(pictures, drawn, packed.scales, strict=True)
    )
    layout = [
        {
            "row": cell.row,
            "column": cell.column,
            "start": cell.start,
            "apart": cell.apart,
            "notes": list(cell.notes),
            "pictures": [next(entries) for _ in cell.pictures],
        }
        for cell in cells
    ]
    data: dict[str, Any] = {
        "cells": layout,
        "columns": {name: (columns or {}).get(name, "") for name in dict.fromkeys(cell.column for cell in cells)},
        "texts": [list(text) for text in texts],
        "signed": any(bool((values < 0).any()) for values in drawn),
        "count": packed.count,
        "sequences": {"word": sequences[0], "names": list(sequences[1])},
        "images": [f"data:image/png;base64,{base64.b64encode(png(image)).decode()}" for image in images.values()],
        "scores": packed.text,
    }
    # The text of a script element ends at the first "</script", whatever JSON says.
    content = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'<div class="ula-board"><script type="application/json">{content}</script>'
        "<noscript><p>The pictures need JavaScript; the table below does not.</p></noscript></div>"
        f'<p class="ula-precision">{escape(_precision(packed, step, layer_hint))}</p>{_largest_scores(cells)}'
    )


def _pools(picture: Picture, step: int) -> bool:
    return step > 1 and min(picture.values.shape) > step and picture.row_titles is None


def _entry(
    picture: Picture,
    values: Array,
    scale: float,
    step: int,
    texts: dict[tuple[str, ...], int],
    images: dict[int, Array],
) -> dict[str, Any]:
    if picture.image is not None:
        # Pictures share the array of their image.
        images.setdefault(id(picture.image), picture.image)

    def index(tokens: Sequence[str] | None) -> int | None:
        return None if tokens is None or step > 1 else texts.setdefault(tuple(tokens), len(texts))

    pattern = picture.expected
    if pattern is not None and step > 1:
        pattern = any_in_blocks(pattern, step)
    facts = {} if step > 1 else {name: [_number(v) for v in numbers] for name, numbers in picture.facts.items()}
    entry = {
        "title": picture.title,
        "head": picture.head,
        "notes": picture.notes,
        "sequence": picture.sequence,
        "names": picture.names,
        "rows": values.shape[0],
        "columns": values.shape[1],
        "step": step,
        "causal": causal(values) and picture.row_titles is None,
        "later": _reads_only_earlier(picture),
        "scale": scale,
        "rowTokens": index(picture.row_tokens),
        "columnTokens": index(picture.column_tokens),
        "rowTitles": None if picture.row_titles is None else index(picture.row_titles),
        "query": None if picture.query is None else picture.query // step,
        "expected": [] if pattern is None else _runs(pattern),
        "grid": None if step > 1 else picture.grid,
        "places": None if step > 1 or picture.places is None else list(picture.places),
        "facts": facts,
        "sinks": [] if step > 1 else list(picture.sinks),
        "image": None if picture.image is None else list(images).index(id(picture.image)),
    }
    return {
        name: value
        for name, value in entry.items()
        if value is not None and value is not False and value not in ("", [], {})
    }


def _reads_only_earlier(picture: Picture) -> bool:
    """Return whether rows of one explained token have no score for later keys, of which there are some."""
    if picture.row_titles is None or picture.query is None:
        return False
    later = np.abs(picture.values[:, picture.query + 1 :])
    return later.size > 0 and bool((later <= ROUNDING * largest(picture.values)).all())


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _runs(pattern: Bool[Array, "row column"]) -> list[int]:
    """Return the runs of True along the flattened pattern: start, length, start, length, ..."""
    steps = np.diff(np.pad(pattern.ravel().astype(np.int8), 1))
    starts, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return np.stack([starts, ends - starts], 1).ravel().tolist()


def _precision(packed: Packed, step: int, hint: str) -> str:
    text = (
        f"{packed.count:,} scores with a relative error of at most {packed.error:.1g}, in pictures, tips and CSV files "
        f"({packed.mantissa} bits of mantissa); below 6e-5 of the largest score of a picture the error is absolute."
    )
    if step > 1:
        text += f" Too many for one page, so each cell of a map is the largest of {step} x {step}; {hint}."
    return text


def _largest_scores(cells: Sequence[Cell]) -> str:
    rows: list[tuple[object, ...]] = []
    for cell in cells:
        for picture in cell.pictures:
            rows += [(cell.column, cell.row, *line) for line in _top_lines(picture)]
    more = f"; the first {MOST_ROWS} of {len(rows)}" if len(rows) > MOST_ROWS else ""
    names = ("column", "row", "picture", "sequence", "query", "largest scores")
    return details(
        f"Largest scores as a table{more}",
        table(names, rows[:MOST_ROWS], caption="The query is the explained one, or else the last with a score."),
    )


def _top_lines(picture: Picture) -> list[tuple[str, int, str, str]]:
    values = picture.ranked
    if picture.row_titles is not None:
        tokens = picture.column_tokens
        return [
            (title, picture.sequence, _named(picture.query, tokens), _ranked(row, tokens))
            for title, row in zip(picture.row_titles, values, strict=True)
        ]
    scored = np.flatnonzero(np.nan_to_num(values).any(1))
    row = int(scored[-1]) if len(scored) else len(values) - 1
    row = row if picture.query is None else picture.query
    named = _named(row, picture.row_tokens)
    title = " · ".join(name for name in (picture.title, picture.head) if name)
    return [(title, picture.sequence, named, _ranked(values[row], picture.column_tokens))]


def _named(position: int | None, tokens: Sequence[str] | None) -> str:
    if position is None:
        return ""
    return str(position) if tokens is None else f"{position} “{isolated(tokens[position])}”"


def _ranked(row: Array, tokens: Sequence[str] | None) -> str:
    size = np.where(np.isnan(row), -1.0, np.abs(row))
    best = [int(position) for position in np.argsort(-size, kind="stable")[:TOP] if size[position] > 0]
    return ", ".join(f"{_named(position, tokens)} {row[position]:.3g}" for position in best) if largest(row) else "none"
