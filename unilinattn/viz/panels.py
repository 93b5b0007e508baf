"""What a picture of a result shows, whatever draws it: a labelled array a layer, its scale, its colours."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.attribution import Attribution, count_kinds, score_array
from unilinattn.errors import InputError

Array = np.ndarray
Colour = tuple[int, int, int]

SEQUENTIAL: dict[str, tuple[str, ...]] = {
    "light": ("#ffffff", "#dfe6f8", "#a9bdf0", "#6a86e0", "#3d4fc0", "#26257f", "#12103f"),
    "dark": ("#14171f", "#1d2a52", "#2a4691", "#3f6fd1", "#6ca6f2", "#aed6fb", "#f4fbff"),
}
"""Colours from no score to the largest one; the first is the page's own background."""

DIVERGING: dict[str, tuple[str, ...]] = {
    "light": (
        "#6b0f1f",
        "#b3283a",
        "#e07a6d",
        "#f6d3c9",
        "#ffffff",
        "#d3defa",
        "#809ae8",
        "#3d4fc0",
        "#1c1a63",
    ),
    "dark": (
        "#ffd9cf",
        "#fb9a86",
        "#d1503f",
        "#6b2520",
        "#14171f",
        "#1f2f5f",
        "#3a63c4",
        "#7fb2f5",
        "#e8f5ff",
    ),
}
"""Colours from the most negative score through zero, the background, to the most positive one."""

OUTLINE = {"light": "#f07c00", "dark": "#ffb340"}
"""The colour of the expected pattern's outline."""


@dataclass(frozen=True)
class Panel:
    """One array of scores with everything that stands around it in a picture.

    `kind` says how it is drawn: a `matrix` of queries by keys, a `strip` of one row of keys, or an `image` of
    patches. `error` is the layer's reconstruction error, the worst one where layers are composed. Padded
    positions are already left out.
    """

    kind: Literal["matrix", "strip", "image"]
    title: str
    mixer: str
    error: float | None
    values: Float[Array, "row column"]
    row_tokens: tuple[str, ...] | None
    column_tokens: tuple[str, ...] | None
    expected: Bool[Array, "row column"] | None

    @property
    def notes(self) -> list[str]:
        """Return the facts that belong under the title, mixers apart."""
        error = [] if self.error is None else [f"error {self.error:.1e}"]
        return [*error, f"largest {largest(self.values):.3g}"]

    @property
    def signed(self) -> bool:
        """Whether any score is negative."""
        return bool((self.values < 0).any())


def panels(result: Attribution, *, batch: int = 0, expected: Bool[Tensor, "..."] | None = None) -> tuple[Panel, ...]:
    """Return one panel a layer (one alone for methods that compose layers) for one sequence of a result.

    Errors: `InputError` if there is no such sequence or `expected` does not have its shape.
    """
    one = result.select(batch=batch) if "batch" in result.dims else result
    if "batch" not in result.dims and batch not in (0, -1):
        raise InputError(f"This result is one sequence, so batch can only be 0, not {batch}.")
    pattern = None if expected is None else _one_pattern(result, batch, expected)
    scores = score_array(one).astype(np.float64)
    stacked = scores if "layer" in one.dims else scores[None]
    real = np.ones(one.sizes["key"], dtype=bool) if one.mask is None else one.mask[0].cpu().numpy()
    tokens = None if one.tokens is None else tuple(shown(t) for t, r in zip(one.tokens[0], real, strict=True) if r)
    made = []
    for title, values in zip(_titles(one, len(stacked)), stacked, strict=True):
        if "query" in one.dims:
            square = values.shape[0] == values.shape[1]
            rows = real if square else np.ones(values.shape[0], dtype=bool)
            outlined = None if pattern is None else pattern[np.ix_(rows, real)]
            labels = tokens if square else None
            made.append(Panel("matrix", *title, values[np.ix_(rows, real)], labels, tokens, outlined))
        elif one.grid is not None:
            patches = _patch_positions(one)
            outlined = None if pattern is None else pattern[patches].reshape(one.grid)
            made.append(Panel("image", *title, values[patches].reshape(one.grid), None, None, outlined))
        else:
            outlined = None if pattern is None else pattern[None, real]
            made.append(Panel("strip", *title, values[None, real], None, tokens, outlined))
    return tuple(made)


def largest(scores: Float[Array, "..."]) -> float:
    """Return the largest finite absolute score, or 0 if there is none."""
    return float(np.abs(scores, where=np.isfinite(scores), out=np.zeros(scores.shape)).max(initial=0.0))


def relative(scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return sign(v) sqrt(|v| / the largest |v|), in [-1, 1]: each score's place on the colour scale.

    The root keeps small scores visible beside the diagonal's large ones; it leaves their order as it is.
    """
    return np.sign(scores) * np.sqrt(np.abs(scores) / (largest(scores) or 1.0))


def outline(pattern: Bool[Array, "row column"]) -> list[tuple[int, int, int, int]]:
    """Return the edges around a pattern as lines (x0, y0, x1, y1), whose unit is a cell."""
    padded = np.pad(pattern, 1)
    across = padded[1:, 1:-1] != padded[:-1, 1:-1]
    down = padded[1:-1, 1:] != padded[1:-1, :-1]
    lines = [(x0, y, x1, y) for y, x0, x1 in _runs(across)]
    return lines + [(x, y0, x, y1) for x, y0, y1 in _runs(down.T)]


def mix(stops: tuple[str, ...], place: float) -> Colour:
    """Return the colour at a place in [0, 1] along evenly spaced hexadecimal stops."""
    where = place * (len(stops) - 1)
    index = min(int(where), len(stops) - 2)
    low, high = (np.array([int(stops[i][k : k + 2], 16) for k in (1, 3, 5)]) for i in (index, index + 1))
    red, green, blue = np.rint(low + (high - low) * (where - index)).astype(int).tolist()
    return red, green, blue


def shown(token: str) -> str:
    """Return a token with everything that does not print written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)


def _runs(marked: Bool[Array, "line place"]) -> list[tuple[int, int, int]]:
    steps = np.diff(np.pad(marked.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, ends = np.argwhere(steps == 1), np.argwhere(steps == -1)
    return [(int(line), int(start), int(end)) for (line, start), (_, end) in zip(starts, ends, strict=True)]


def _one_pattern(result: Attribution, batch: int, expected: Tensor) -> Bool[Array, "..."]:
    sizes = {axis: size for axis, size in result.sizes.items() if axis != "layer"}
    whole = tuple(sizes.values())
    single = tuple(size for axis, size in sizes.items() if axis != "batch")
    if tuple(expected.shape) not in (whole, single):
        raise InputError(
            f"expected must have shape {whole} ({', '.join(sizes)}) or, if the same in every sequence, "
            f"{single}; got {tuple(expected.shape)}."
        )
    return (expected[batch] if expected.ndim > len(single) else expected).cpu().numpy()


def _titles(one: Attribution, count: int) -> list[tuple[str, str, float | None]]:
    """The title, mixers and reconstruction error of each panel; composed layers share their worst error."""
    if "layer" not in one.dims and len(one.layers) != 1:
        worst = None if one.worst_error is None else one.worst_error[1]
        title = f"{len(one.layers)} layers together" if one.layers else one.method
        return [(title, count_kinds(one.kinds), worst)]
    names = one.layers or tuple(f"layer {index}" for index in range(count))
    kinds = one.kinds or ("",) * count
    return [(name, kind, one.reconstruction_error.get(name)) for name, kind in zip(names, kinds, strict=True)]


def _patch_positions(one: Attribution) -> list[int]:
    """The keys that are patches: not those whose token is in brackets, such as [CLS], else the last ones."""
    assert one.grid is not None
    length, count = one.sizes["key"], one.grid[0] * one.grid[1]
    if one.tokens is not None:
        plain = [i for i, t in enumerate(one.tokens[0]) if not (t.startswith("[") and t.endswith("]"))]
        if len(plain) == count:
            return plain
    return list(range(length - count, length))
