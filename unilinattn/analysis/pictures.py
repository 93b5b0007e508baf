"""Matplotlib figures of the analyses."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import OptionError
from unilinattn.optional import import_extra
from unilinattn.results.file import place_for_file
from unilinattn.results.plots import FAINT, INK, new_figure
from unilinattn.viz.colours import DIVERGING, SEQUENTIAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure

    Where = str | os.PathLike[str] | Axes | None
else:
    # matplotlib is optional, and imported only to draw.
    Figure = Where = object

LINES = ("#3d4fc0", "#d1503f", "#2a9d76", "#b07cc6", "#c98a00", "#4b5563")
"""Colours of lines, in order."""

Paint = Callable[["Axes"], None]


def draw(
    where: Where, panels: Sequence[Paint], *, columns: int = 4, size: tuple[float, float] = (3.4, 3.0)
) -> "Figure":
    """Draw panels of `size` inches in a new figure, or one panel into given axes, and save them to a given path.

    Raises `MissingExtraError` if matplotlib is missing, `OptionError` for one axes and several panels, and
    `ResultFileError` if the path cannot be written.
    """
    if where is not None and not isinstance(where, (str, os.PathLike)):
        if len(panels) > 1:
            raise OptionError(f"this picture has {len(panels)} panels, which one axes cannot hold; pass a path.")
        panels[0](where)
        return cast("Figure", where.get_figure(root=True))
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(columns * size[0], rows * size[1])
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for paint, axes in zip(panels, grid, strict=False):
        paint(axes)
    if where is not None:
        figure.savefig(place_for_file(where, "picture.png"))
    return figure


def heat_map(
    values: Float[Tensor, "row column"],
    title: str,
    *,
    rows: str,
    columns: str,
    row_labels: Sequence[str] | None = None,
    column_labels: Sequence[str] | None = None,
    limit: float | None = None,
) -> Paint:
    """Return a panel with a heat map, whose colours diverge around zero if a value is negative and end at `limit`.

    NaN has no colour.
    """
    array = values.detach().double().cpu().numpy()

    def paint(axes: "Axes") -> None:
        signed, top = bool((array < 0).any()), limit or float(np.nan_to_num(np.abs(array)).max()) or 1.0
        stops = (DIVERGING if signed else SEQUENTIAL)["light"]
        colours = import_extra("matplotlib.colors", "plot").LinearSegmentedColormap.from_list("unilinattn", stops)
        low = -top if signed else 0
        image = axes.imshow(array, cmap=colours, vmin=low, vmax=top, aspect="auto", interpolation="nearest")
        for axis, texts in ((axes.yaxis, row_labels), (axes.xaxis, column_labels)):
            if texts is not None:
                axis.set_ticks(range(len(texts)), texts)
        bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
        bar.ax.tick_params(length=0, labelsize=6.5, colors=FAINT)
        bar.outline.set_visible(False)
        _dress(axes, title, upwards=rows, across=columns)

    return paint


def lines(
    series: Mapping[str, Sequence[float]], title: str, *, across: str, upwards: str, legend: bool = True
) -> Paint:
    """Return a panel with a line for each series over the relative depth, from 0 to 1."""

    def paint(axes: "Axes") -> None:
        for number, (name, values) in enumerate(series.items()):
            x = np.linspace(0, 1, len(values))
            axes.plot(x, values, "o-", color=LINES[number % len(LINES)], label=name, linewidth=1.4, markersize=3.5)
        axes.grid(axis="y", color="#e6e8ef", linewidth=0.6)
        if legend:
            axes.legend(fontsize=6.5, frameon=False, labelcolor=INK)
        _dress(axes, title, upwards=upwards, across=across)

    return paint


def points(series: Mapping[str, Sequence[float]], title: str, *, across: str, upwards: str, limit: float) -> Paint:
    """Return a panel with the points of each series over its index, on a logarithmic axis with a `limit`."""

    def paint(axes: "Axes") -> None:
        for number, (name, values) in enumerate(series.items()):
            # Equal values of two series stay visible side by side.
            x = np.arange(len(values)) + 0.08 * number
            axes.plot(x, values, "os"[number % 2], color=LINES[number], label=name, markersize=5)
        axes.axhline(limit, color=FAINT, linewidth=0.9, linestyle="--", label="rounding")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(import_extra("matplotlib.ticker", "plot").MaxNLocator(integer=True))
        axes.legend(fontsize=6.5, frameon=False, labelcolor=INK)
        _dress(axes, title, upwards=upwards, across=across)

    return paint


def curve_lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    *,
    across: str,
    upwards: str,
    baseline: str,
) -> Paint:
    """Return a panel with the (fractions, values) of each series over percent, that of `baseline` dashed."""
    others = [name for name in series if name != baseline]

    def paint(axes: "Axes") -> None:
        for name, (fractions, values) in series.items():
            index = others.index(name) if name in others else 0
            dash = "--" if index >= len(LINES) else "-"
            colour, style, width = (FAINT, ":", 1.6) if name == baseline else (LINES[index % len(LINES)], dash, 1.4)
            percent = [100 * fraction for fraction in fractions]
            axes.plot(percent, values, style, color=colour, label=name, linewidth=width)
        axes.set_ylim(0, 1.05 * max((max(values) for _, values in series.values()), default=1.0))
        axes.set_xlim(0, 100)
        axes.grid(axis="y", color="#e6e8ef", linewidth=0.6)
        axes.legend(fontsize=6.5, frameon=False, labelcolor=INK)
        _dress(axes, title, upwards=upwards, across=across)

    return paint


def _dress(axes: "Axes", title: str, *, upwards: str, across: str) -> None:
    axes.set_title(title.replace("$", r"\$"), loc="left", fontsize=8.5, color=INK)
    axes.set_ylabel(upwards, fontsize=7, color=FAINT)
    axes.set_xlabel(across, fontsize=7, color=FAINT)
    axes.tick_params(which="both", length=0, labelsize=6.5, colors=FAINT)
    for side in axes.spines.values():
        side.set_color("#c9cdd8")
        side.set_linewidth(0.6)
