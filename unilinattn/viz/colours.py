"""Colour scales of scores, and the outline of a pattern."""

import unicodedata

import numpy as np
from jaxtyping import Bool, Float

Array = np.ndarray
Colour = tuple[int, int, int]

SEQUENTIAL: dict[str, tuple[str, ...]] = {
    "light": ("#ffffff", "#dfe6f8", "#a9bdf0", "#6a86e0", "#3d4fc0", "#26257f", "#12103f"),
    "dark": ("#14171f", "#1d2a52", "#2a4691", "#3f6fd1", "#6ca6f2", "#aed6fb", "#f4fbff"),
}
"""Colours from score 0, the page's background, to the largest score, by theme."""

_NEGATIVE = {
    "light": ("#6b0f1f", "#b3283a", "#e07a6d", "#f6d3c9"),
    "dark": ("#ffd9cf", "#fb9a86", "#d1503f", "#6b2520"),
}
_POSITIVE = {
    "light": ("#d3defa", "#809ae8", "#3d4fc0", "#1c1a63"),
    "dark": ("#1f2f5f", "#3a63c4", "#7fb2f5", "#e8f5ff"),
}

LINES = ("#3d4fc0", "#be185d", "#b45309", "#0f766e", "#7c3aed", "#737a8c")
"""Colours of the lines of a plot, in order."""

DIVERGING: dict[str, tuple[str, ...]] = {
    theme: (*_NEGATIVE[theme], SEQUENTIAL[theme][0], *_POSITIVE[theme]) for theme in SEQUENTIAL
}
"""Colours from the most negative score through 0, the page's background, to the most positive one, by theme."""

OUTLINE = {"light": "#f07c00", "dark": "#ffb340"}
"""Colour of the expected pattern's outline, by theme."""


def largest(scores: Float[Array, "..."]) -> float:
    """Return the largest finite absolute score, or 0 if there is none."""
    return float(np.abs(scores, where=np.isfinite(scores), out=np.zeros(scores.shape)).max(initial=0.0))


def relative(scores: Float[Array, "..."], limit: float | None = None) -> Float[Array, "..."]:
    """Return sign(v) sqrt(|v| / limit): the position of each score v on the colour scale, in [-1, 1] up to the limit.

    `limit` is max |v| by default.

    The square root keeps small scores visible next to the diagonal's large ones and preserves their order.
    """
    return np.sign(scores) * np.sqrt(np.abs(scores) / (limit or largest(scores) or 1.0))


def outline(pattern: Bool[Array, "row column"]) -> list[tuple[int, int, int, int]]:
    """Return the edges of a pattern as lines (x0, y0, x1, y1), in units of cells."""
    padded = np.pad(pattern, 1)
    across = padded[1:, 1:-1] != padded[:-1, 1:-1]
    down = padded[1:-1, 1:] != padded[1:-1, :-1]
    lines = [(x0, y, x1, y) for y, x0, x1 in _runs(across)]
    return lines + [(x, y0, x, y1) for x, y0, y1 in _runs(down.T)]


def mix(stops: tuple[str, ...], position: float) -> Colour:
    """Return the RGB colour at position `place` in [0, 1] of a scale with evenly spaced hexadecimal stops."""
    where = position * (len(stops) - 1)
    index = min(int(where), len(stops) - 2)
    low, high = (np.array([int(stops[i][k : k + 2], 16) for k in (1, 3, 5)]) for i in (index, index + 1))
    red, green, blue = np.rint(low + (high - low) * (where - index)).astype(int).tolist()
    return red, green, blue


def shown(token: str) -> str:
    """Return a token with unprintable characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)


def isolated(token: str) -> str:
    """Return a token for a sentence of another direction: text from right to left stands in Unicode's isolates."""
    turned = any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in token)
    return f"\N{FIRST STRONG ISOLATE}{token}\N{POP DIRECTIONAL ISOLATE}" if turned else token


def _runs(marked: Bool[Array, "line place"]) -> list[tuple[int, int, int]]:
    steps = np.diff(np.pad(marked.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, ends = np.argwhere(steps == 1), np.argwhere(steps == -1)
    return [(int(line), int(start), int(end)) for (line, start), (_, end) in zip(starts, ends, strict=True)]
