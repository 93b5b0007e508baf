"""Pictures in an HTML page: heat maps as SVG around an embedded PNG, and strips of coloured words."""

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from html import escape

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.viz.colours import DIVERGING, SEQUENTIAL, Array, mix, outline, relative

MOST_CELLS = 256
"""Largest number of cells along a side; a longer side is pooled into blocks."""

MOST_LABELS = 40
"""Largest number of tokens that label an axis; longer axes show positions."""

SIDE = 320.0
"""Length of the longer side of a heat map, in SVG units."""

Matrix = Float[Array, "row column"] | Float[Tensor, "row column"]
Pattern = Bool[Array, "row column"] | Bool[Tensor, "row column"]


def heatmap(
    values: Matrix,
    *,
    title: str = "",
    notes: Sequence[str] = (),
    row_tokens: Sequence[str] | None = None,
    column_tokens: Sequence[str] | None = None,
    expected: Pattern | None = None,
    signed: bool | None = None,
    names: tuple[str, str] = ("query", "key"),
) -> str:
    """Return a heat map as HTML; the pointer shows each score to four digits.

    A colour is the square root of a score relative to the largest; the scale diverges around zero if `signed` (by
    default, if any score is negative). NaN is blank. `expected` is outlined. `names` are the names of the two axes. A
    side of more than 256 cells is pooled into blocks, each with its score of largest absolute value.
    """
    scores = _array(values).astype(np.float64)
    pattern = None if expected is None else _array(expected)
    signed = bool((scores < 0).any()) if signed is None else signed
    step = -(-max(scores.shape) // MOST_CELLS)
    if step > 1:
        scores = _pool(scores, step)
        pattern = None if pattern is None else np.asarray(_blocks(pattern, step).any((1, 3)))
        row_tokens = column_tokens = None
        notes = [*notes, f"each cell the largest of {step} x {step}"]
    rows, columns = scores.shape
    width = max(24.0, SIDE * min(1.0, columns / rows))
    height = max(24.0, SIDE * min(1.0, rows / columns))
    down = _ticks(row_tokens, rows, step, height)
    across = _ticks(column_tokens, columns, step, width)
    upright = all(len(text) <= 2 for _, text in across) or not _few(column_tokens)
    left = 24 + 4.6 * max((len(text) for _, text in down), default=0) if rows > 1 else 1
    below = 26 if upright else 18 + 4.6 * max((len(text) for _, text in across), default=0)
    labels = [f'<text x="-5" y="{y + 2.8:.5g}" text-anchor="end">{escape(text)}</text>' for y, text in down]
    labels = labels if rows > 1 else []
    for x, text in across:
        turned = "" if upright else f' transform="rotate(-90 {x + 2.8:.5g} {height + 5:g})"'
        shift, anchor = (x, "middle") if upright else (x + 2.8, "end")
        y = height + (11 if upright else 5)
        labels.append(f'<text x="{shift:.5g}" y="{y:g}" text-anchor="{anchor}"{turned}>{escape(text)}</text>')
    under = height + below - 3
    labels.append(f'<text class="name" x="{width / 2:g}" y="{under:g}" text-anchor="middle">{escape(names[1])}</text>')
    if rows > 1:
        middle, edge = height / 2, 9 - left
        labels.append(
            f'<text class="name" x="{edge:g}" y="{middle:g}" text-anchor="middle" '
            f'transform="rotate(-90 {edge:g} {middle:g})">{escape(names[0])}</text>'
        )
    pictures = "".join(
        f'<image class="{theme}" width="{width:g}" height="{height:g}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{base64.b64encode(png(scores, signed, theme)).decode()}"/>'
        for theme in ("light", "dark")
    )
    data = {
        "values": encoded(scores),
        "width": str(columns),
        "step": str(step),
        "names": json.dumps(names),
        "rows": "" if row_tokens is None else json.dumps(list(row_tokens)),
        "columns": "" if column_tokens is None else json.dumps(list(column_tokens)),
    }
    attributes = " ".join(f'data-{name}="{escape(value)}"' for name, value in data.items())
    return (
        f'<figure class="ula-map">{_caption(title, notes)}'
        f'<svg viewBox="{-left:g} -4 {left + width + 2:g} {height + below + 4:g}" role="img" '
        f'aria-label="{escape(f"{title}: {rows} x {columns} scores, {names[0]} by {names[1]}")}">'
        f'{"".join(labels)}<g class="cells" {attributes}>{pictures}'
        f'<rect class="frame" width="{width:g}" height="{height:g}"/>'
        f"{_outlined(pattern, width / columns, height / rows)}"
        f'<rect class="here" width="0" height="0"/></g></svg></figure>'
    )


def strip(
    values: Float[Array, " key"] | Float[Tensor, " key"],
    tokens: Sequence[str],
    *,
    title: str = "",
    notes: Sequence[str] = (),
    expected: Bool[Array, " key"] | Bool[Tensor, " key"] | None = None,
    own: tuple[int, float] | None = None,
) -> str:
    """Return tokens as running text on the colours of their scores; the pointer shows each score.

    Colours are those of `heatmap`. An expected token has an outline. `own` is the position and score of a token that is
    excluded from the colour scale: it has a dashed frame and no colour.
    """
    scores = _array(values).astype(np.float64)
    place_apart, score_apart = own if own is not None else (None, 0.0)
    if place_apart is not None:
        scores[place_apart] = np.nan
    wanted = np.zeros(len(scores), dtype=bool) if expected is None else _array(expected)
    words = []
    for place, (token, score, shade, outlined) in enumerate(zip(tokens, scores, relative(scores), wanted, strict=True)):
        apart = place == place_apart
        marks = (("minus", score < 0), ("wanted", outlined), ("own", apart))
        classes = " ".join(name for name, on in marks if on)
        # The text colour is fixed, so the background stays translucent.
        depth = 0.0 if np.isnan(shade) else 0.65 * abs(float(shade))
        score = score_apart if apart else score
        number = "no score" if np.isnan(score) else four_digits(float(score))
        words.append(
            f'<span class="{classes}" style="--a:{depth:.2f}" data-value="{number}" '
            f'data-place="{escape(f"key {place} “{token}”")}">{escape(token) or "&nbsp;"}</span>'
        )
    body = " ".join(words)
    return f'<figure class="ula-strip">{_caption(title, notes)}<div class="tokens">{body}</div></figure>'


def png(scores: Float[Array, "row column"], signed: bool, theme: str) -> bytes:
    """Return scores as a PNG with 255 palette colours; small arrays get several pixels per cell; NaN is clear."""
    stops = (DIVERGING if signed else SEQUENTIAL)[theme]
    shades = relative(scores)
    places = (shades + 1) / 2 if signed else shades
    index = np.where(np.isnan(places), 255, np.rint(np.nan_to_num(places).clip(0, 1) * 254)).astype(np.uint8)
    # With several pixels per cell, viewers that smooth enlarged pictures blur only the edges of cells.
    zoom = max(1, int(SIDE) // max(index.shape))
    pixels = index.repeat(zoom, 0).repeat(zoom, 1)
    height, width = pixels.shape
    palette = b"".join(bytes(mix(stops, place / 254)) for place in range(255)) + bytes(3)
    lines = np.pad(pixels, ((0, 0), (1, 0))).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    clear = b"\xff" * 255 + b"\x00"
    chunks = (
        (b"IHDR", header),
        (b"PLTE", palette),
        (b"tRNS", clear),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def encoded(scores: Float[Array, "row column"]) -> str:
    """Return scores to four digits as text: rows end at semicolons, cells at commas; zero is empty, NaN is `n`.

    Trailing zeros of a row are omitted, so the empty half of a causal map costs nothing.
    """
    return ";".join(",".join("" if s == 0 else four_digits(s) for s in row).rstrip(",") for row in scores.tolist())


def four_digits(score: float) -> str:
    """Return a score with four significant digits, `n` for NaN."""
    return "n" if score != score else f"{score:.4g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _array(values: Array | Tensor) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return values.float().numpy() if values.is_floating_point() and values.element_size() < 4 else values.numpy()
    return values


def _few(tokens: Sequence[str] | None) -> bool:
    return tokens is not None and len(tokens) <= MOST_LABELS


def _blocks(cells: Array, step: int) -> Array:
    rows, columns = (-(-size // step) for size in cells.shape)
    spare = ((0, rows * step - cells.shape[0]), (0, columns * step - cells.shape[1]))
    filler = False if cells.dtype == bool else np.nan
    return np.pad(cells, spare, constant_values=filler).reshape(rows, step, columns, step)


def _pool(scores: Float[Array, "row column"], step: int) -> Float[Array, "block_row block_column"]:
    """Return the score of largest absolute value in each block; NaN if all its scores are NaN."""
    blocks = _blocks(scores, step).transpose(0, 2, 1, 3)
    flat = blocks.reshape(*blocks.shape[:2], -1)
    best = np.where(np.isnan(flat), -1.0, np.abs(flat)).argmax(-1)
    return np.take_along_axis(flat, best[..., None], -1)[..., 0]


def _ticks(tokens: Sequence[str] | None, count: int, step: int, length: float) -> list[tuple[float, str]]:
    """Return the centre and the label of each labelled cell along an axis."""
    unit = length / count
    if tokens is not None and _few(tokens):
        return [((i + 0.5) * unit, t if len(t) <= 10 else t[:9] + "…") for i, t in enumerate(tokens)]
    every = next(power for power in (2**exponent for exponent in range(64)) if count / power <= 8)
    return [((i + 0.5) * unit, str(i * step)) for i in range(0, count, every)]


def _outlined(pattern: Bool[Array, "row column"] | None, width: float, height: float) -> str:
    if pattern is None or not pattern.any():
        return ""
    edges = "".join(
        f"M{x0 * width:.5g} {y0 * height:.5g}L{x1 * width:.5g} {y1 * height:.5g}" for x0, y0, x1, y1 in outline(pattern)
    )
    return f'<path class="expected" d="{edges}"/>'


def _caption(title: str, notes: Sequence[str]) -> str:
    return f"<figcaption><b>{escape(title)}</b>{escape(', '.join(note for note in notes if note))}</figcaption>"
