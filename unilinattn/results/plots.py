"""Matplotlib figures of results, made without pyplot, which would change global state."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.optional import import_extra
from unilinattn.results.boards import beneath
from unilinattn.results.explained import explained_clause, quoted
from unilinattn.results.panels import MOST_HEADS, Panel, fitting_pattern, heads_note, largest_heads, panels
from unilinattn.results.scores import Scores, count_kinds
from unilinattn.results.table import ScoreTable
from unilinattn.viz.colours import DIVERGING, LINES, OUTLINE, SEQUENTIAL, Array, outline, relative

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

LOW = 2.6
"""Height of all panels, in inches, below which the colour bar lies under them."""

MOST_LABELS = 40
"""Largest number of tokens that label an axis; longer axes show positions."""

INK, FAINT = "#1c1f2b", "#737a8c"


def attribution(
    result: Scores,
    *,
    batch: int = 0,
    expected: Bool[Tensor, "..."] | None = None,
    layer: int | str | None = None,
    ax: "Axes | None" = None,
    cmap: "str | Colormap | None" = None,
    vmax: float | None = None,
    image: Any = None,
) -> "Figure":
    """Draw one sequence of a result, one panel per layer: heat maps, or patch maps or token strips for a target.

    A result with heads has a panel for each of them, at most `MOST_HEADS`: those with the largest sum of absolute
    scores. For a target without an image they are the rows of one panel per layer.

    A colour is the square root of a score relative to its panel's largest, or to `vmax`; the scale diverges around zero
    if any score is negative. The arguments are those of `Attribution.plot`.

    Raises `MissingExtraError` if matplotlib is missing, and `InputError` or `OptionError` if an argument does not fit.
    """
    below = beneath([result], image)
    result = result if layer is None else result.select(layer=layer)
    drawn, note = _drawn(result, batch, expected)
    style = _Style.of(drawn, cmap, vmax)
    if ax is not None:
        if len(drawn) > 1:
            several = "layers; choose one by `layer`"
            if any(panel.head for panel in drawn):
                several = f"{result.head_kind}s; choose one by `result.select(layer=..., head=...)`"
            raise InputError(f"`ax` holds one picture, but the result has {len(drawn)} {several}.")
        _draw(ax, drawn[0], style, True, below)
        _caption(ax, drawn[0].name, [drawn[0].mixer, *drawn[0].notes])
        figure = ax.get_figure(root=True)
        assert figure is not None
        _colour_bar(figure, [ax], style, lying=drawn[0].kind == "strip")
        return figure
    strips = drawn[0].kind == "strip"
    by_head, layers = len(drawn) > 1 and bool(drawn[0].head), {panel.title for panel in drawn}
    most = 6 if by_head and len(drawn) > 12 else 4 if len(drawn) > 6 else 3
    columns = 1 if strips else min(len(drawn), most)
    rows = -(-len(drawn) // columns)
    named = strips or len(drawn) <= 6
    width, height = _panel_size(drawn[0], named)
    width = columns * width + 0.9
    of = f" of {result.model}" if result.model else ""
    scope = f", scope {result.scope}" if result.scope else ""
    where = f", {drawn[0].title}" if by_head and len(layers) == 1 else ""
    heading = [f"{result.method}{of}{scope}{where}", *_value_lines(result, batch, width), *([note] if note else [])]
    figure = new_figure(width, rows * height + (1.2 if strips else 0.6) + 0.2 * (len(heading) - 1))
    grid = figure.subplots(rows, columns, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index >= len(drawn):
            axes.set_axis_off()
            continue
        panel = drawn[index]
        _draw(axes, panel, style, named and (not strips or index == len(drawn) - 1), below)
        if by_head:
            _caption(axes, panel.head if len(layers) == 1 else panel.name, panel.notes[-1:])
        else:
            _caption(axes, panel.name, [panel.mixer, *panel.notes])
    title = _math_free("\n".join(heading))
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    _colour_bar(figure, list(grid.flat), style, lying=strips)
    if expected is not None:
        _key(figure)
    return figure


def comparison(
    results: ScoreTable[Any],
    *,
    batch: int = 0,
    expected: Bool[Tensor, "..."] | None = None,
    layer: int | None = None,
    cmap: "str | Colormap | None" = None,
    vmax: float | None = None,
    image: Any = None,
) -> "Figure":
    """Draw one sequence of a comparison as a grid: one column per model, one row per method and layer.

    Colours are those of `attribution`. The arguments are those of `Comparison.plot`.

    Raises `MissingExtraError` if matplotlib is missing, and `InputError` or `OptionError` if an argument does not fit.
    """
    below = beneath((result for _, _, result in results.results()), image)
    cells: dict[tuple[str, int], dict[str, Panel]] = {}
    for method in results.methods:
        for model in results:
            if (result := results[model].get(method)) is None:
                continue
            pattern = fitting_pattern(result, expected)
            selected = result.select(layer=layer) if layer is not None and "layer" in result.dims else result
            for index, panel in enumerate(_drawn(selected, batch, pattern)[0]):
                cells.setdefault((method, index), {})[model] = panel
    rows = sorted(cells, key=lambda row: (results.methods.index(row[0]), row[1]))
    every = [panel for row in cells.values() for panel in row.values()]
    sizes = [max(_panel_size(panel, True) for panel in cells[row].values()) for row in rows]
    width, heights = max(size[0] for size in sizes), [size[1] for size in sizes]
    # The note on a token apart is too long for narrow columns.
    apart = all(panel.own is not None for panel in every)
    if all(panel.kind == "strip" for panel in every):
        width, heights = min(width, max(3.2, 15 / len(results))), [height + 0.15 * apart for height in heights]
    lying = sum(heights) < LOW
    figure = new_figure(len(results) * width + 1.4, sum(heights) + (1.5 if lying else 0.9))
    # The names of the rows have a column of axes, which stays where a model has no panel.
    layout = figure.add_gridspec(
        len(rows), len(results) + 1, width_ratios=[0.25, *[width] * len(results)], height_ratios=heights
    )
    grid = [[figure.add_subplot(layout[i, j + 1]) for j in range(len(results))] for i in range(len(rows))]
    style = _Style.of(every, cmap, vmax)
    lowest = {model: row for row in rows for model in cells[row]}
    # With the same tokens everywhere, the outer panels have the labels.
    alike = len({panel.column_tokens for panel in every}) == 1
    for line, row in zip(grid, rows, strict=True):
        for axes, model in zip(line, results, strict=True):
            if model not in cells[row]:
                axes.set_axis_off()
                continue
            panel = cells[row][model]
            _draw(axes, panel, style, True, below)
            _caption(axes, panel.name, panel.notes, two_lines=apart)
            if alike and model != next(iter(cells[row])):
                axes.tick_params(labelleft=False)
                axes.set_ylabel("")
            if alike and row != lowest[model]:
                axes.tick_params(labelbottom=False)
                axes.set_xlabel("")
    for axes, model in zip(grid[0], results, strict=True):
        kinds = count_kinds(next(iter(results[model].values())).kinds)
        _top_title(axes, model, kinds, above=10 if apart else 0)
    for number, row in enumerate(rows):
        _side_title(figure.add_subplot(layout[number, 0]), row[0])
    _colour_bar(figure, [axes for line in grid for axes in line], style, lying=lying)
    if any(panel.expected is not None for panel in every):
        _key(figure)
    return figure


def _value_lines(result: Scores, batch: int, width: float) -> list[str]:
    """Return the lines of a title that name the explained logit of a target."""
    if "query" in result.dims or "logit" not in result.options:
        return []
    # Lines break outside of the texts of tokens, and ten letters of the title are about an inch wide.
    clause = explained_clause(result, batch, lambda text: quoted(text).replace(" ", "\xa0"))
    return textwrap.wrap(clause.removeprefix("explains the "), int(10 * width))


def _drawn(result: Scores, batch: int, expected: Bool[Tensor, "..."] | None) -> tuple[tuple[Panel, ...], str]:
    """Return the panels of a sequence, and a sentence on their heads if some are left out."""
    if "head" not in result.dims:
        return panels(result, batch=batch, expected=expected), ""
    layers = result.sizes.get("layer", 1)
    if "query" in result.dims or result.grid is not None:
        heads = largest_heads(result, batch=batch, total=MOST_HEADS)
        note = heads_note(result, min(MOST_HEADS, sum(map(len, heads))), layers=layers)
    else:
        heads = largest_heads(result, batch=batch, each=MOST_HEADS)
        note = heads_note(result, len(heads[0]))
        note = f"in each layer {note}" if note and layers > 1 else note
    return panels(result, batch=batch, expected=expected, heads=heads), note


def by_layer(series: Mapping[str, Mapping[str, Sequence[float | None]]], *, title: str, label: str) -> "Figure":
    """Draw numbers by layer on a logarithmic axis: a panel for each model, a line for each of its series.

    `series` maps models to named series with one number a layer, None where there is none; `label` is that of the
    numbers. Where no number is positive, as for errors that are exactly zero, the axis is linear.

    Raises `MissingExtraError` if matplotlib is missing.
    """
    columns = min(len(series), 4)
    rows = -(-len(series) // columns)
    numbers = (value for named in series.values() for values in named.values() for value in values)
    scale = "log" if any(value is not None and value > 0 for value in numbers) else "linear"
    figure = new_figure(columns * 2.6 + 1.1, rows * 2.4 + 0.6)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes, (model, named) in zip(grid.flat, series.items(), strict=False):
        for colour, (name, values) in zip(cycle(LINES), named.items(), strict=False):
            heights = [np.nan if value is None else value for value in values]
            axes.plot(range(len(heights)), heights, color=colour, marker="o", markersize=3, linewidth=1.2, label=name)
        axes.set_yscale(scale)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=6.5, colors=FAINT)
        axes.set_xlabel("layer", fontsize=7, color=FAINT)
        axes.set_title(_math_free(model), loc="left", fontsize=8, color=INK)
        for side in axes.spines.values():
            side.set_color("#c9cdd8")
    for axes in list(grid.flat)[len(series) :]:
        axes.set_axis_off()
    for line in grid:
        line[0].set_ylabel(label, fontsize=7, color=FAINT)
    figure.suptitle(_math_free(title), x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=7, labelcolor=FAINT)
    return figure


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches, which notebooks display."""
    figure = import_extra("matplotlib.figure", "plot").Figure(
        figsize=(width, height), layout="constrained", dpi=120, facecolor="white"
    )
    # Notebooks display only figures of pyplot; this method displays this one.
    figure._repr_png_ = partial(_png, figure)
    return figure


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _panel_size(panel: Panel, named: bool) -> tuple[float, float]:
    rows, columns = panel.values.shape
    if panel.kind == "strip":
        return max(5.0, 0.32 * min(columns, 40)), 0.7
    side = max(2.6, 0.13 * columns + 0.9) if named and _few(panel.column_tokens) else 2.6
    if panel.rows != "query":
        return max(side, 4.0), max(1.2, 0.13 * rows + 0.6)
    return side, side * min(max(rows / columns, 0.4), 2.0) + 0.1


def _few(tokens: Sequence[str] | None) -> bool:
    return tokens is not None and len(tokens) <= MOST_LABELS


@dataclass(frozen=True)
class _Style:
    """The colours of a figure: the map, whether scores have signs, and the limit, None for each panel's largest."""

    colours: "Colormap"
    signed: bool
    limit: float | None

    @classmethod
    def of(cls, drawn: Sequence[Panel], cmap: "str | Colormap | None", limit: float | None) -> "_Style":
        """Return the style of panels. Raises `OptionError` for a limit that is not positive or an unknown map."""
        if limit is not None and not 0 < limit < float("inf"):
            raise OptionError(f"`vmax` must be a positive number, the score of the strongest colour; got {limit}.")
        signed = any(panel.signed for panel in drawn)
        if cmap is None:
            stops = (DIVERGING if signed else SEQUENTIAL)["light"]
            named = import_extra("matplotlib.colors", "plot").LinearSegmentedColormap.from_list("unilinattn", stops)
            return cls(named, signed, limit)
        colormaps = import_extra("matplotlib", "plot").colormaps
        if isinstance(cmap, str) and cmap not in colormaps:
            raise OptionError(f"unknown `cmap` {cmap!r}{nearest(cmap, [n for n in colormaps if not n.endswith('_r')])}")
        return cls(colormaps[cmap] if isinstance(cmap, str) else cmap, signed, limit)


def _draw(axes: "Axes", panel: Panel, style: _Style, named: bool, below: Array | None = None) -> None:
    rows, columns = panel.values.shape
    shades = relative(panel.ranked, style.limit)
    over = below is not None and panel.kind == "image"
    if below is not None and over:
        # Grey and pale, so that the only colour is that of the scores.
        axes.imshow(below.mean(-1) / 2 + 127, cmap="gray", vmin=0, vmax=255, extent=(0, columns, rows, 0))
    axes.imshow(
        shades,
        cmap=style.colours,
        vmin=-1 if style.signed else 0,
        vmax=1,
        alpha=np.nan_to_num(np.abs(shades)).clip(0, 1) * 0.9 if over else None,
        aspect="auto" if panel.kind == "strip" or panel.rows != "query" else "equal",
        interpolation="nearest" if max(rows, columns) <= 256 else "auto",
        extent=(0, columns, rows, 0),
    )
    if panel.sinks is not None:
        grey = np.where(panel.sinks, 0.85, np.nan)
        axes.imshow(grey, cmap="gray", vmin=0, vmax=1, aspect="auto", extent=(0, columns, rows, 0))
    for side in axes.spines.values():
        side.set_color("#c9cdd8")
        side.set_linewidth(0.6)
    axes.tick_params(length=0, labelsize=6.5, colors=FAINT, pad=2)
    short = all(len(token) <= 2 for token in panel.column_tokens or ())
    _label(axes.xaxis, panel.column_tokens if named else None, columns, rotation=0 if short else 90)
    names = panel.row_tokens
    if names is not None and panel.rows != "query":
        # The axis says that the numbers are those of heads.
        names = tuple(name.split()[-1] for name in names)
    _label(axes.yaxis, names if named else None, rows, rotation=0)
    if panel.kind == "strip":
        axes.set_yticks([])
        if not named:
            axes.set_xticks([])
    elif panel.kind == "matrix":
        axes.set_xlabel("key", fontsize=7, color=FAINT, labelpad=2)
        axes.set_ylabel(panel.rows, fontsize=7, color=FAINT, labelpad=2)
    if panel.expected is not None:
        lines = [((x0, y0), (x1, y1)) for x0, y0, x1, y1 in outline(panel.expected)]
        collection = import_extra("matplotlib.collections", "plot").LineCollection
        axes.add_collection(
            collection(lines, colors=OUTLINE["light"], linewidths=0.9, capstyle="projecting"), autolim=False
        )


def _label(axis: "Axis", tokens: Sequence[str] | None, count: int, rotation: int) -> None:
    """Label every cell of an axis by its token, or some by their position if there are many."""
    if tokens is not None and _few(tokens):
        texts = [_math_free(token if len(token) <= 10 else token[:9] + "…") for token in tokens]
        axis.set_ticks(np.arange(count) + 0.5, texts, rotation=rotation)
        return
    step = next(power for power in (2**exponent for exponent in range(64)) if count / power <= 8)
    ticks = np.arange(0, count, step)
    axis.set_ticks(ticks + 0.5, [str(tick) for tick in ticks])


def _math_free(text: str) -> str:
    return text.replace("$", r"\$")


def _caption(axes: "Axes", title: str, notes: Sequence[str], *, two_lines: bool = False) -> None:
    """Write a title, and notes below it; with `two_lines` the last note has a line for itself."""
    texts = [note for note in notes if note]
    words = "\n".join((", ".join(texts[:-1]), texts[-1])) if two_lines else ", ".join(texts)
    axes.set_title(_math_free(title), loc="left", fontsize=8, color=INK, pad=23 if two_lines else 13)
    _write_above(axes, words, 3, fontsize=6.2, color=FAINT)


def _side_title(axes: "Axes", text: str) -> None:
    axes.set_axis_off()
    words = axes.text(0.5, 0.5, _math_free(text), fontsize=9, fontweight="bold", color=INK, rotation=90)
    words.set(ha="center", va="center", transform=axes.transAxes)


def _top_title(axes: "Axes", text: str, kinds: str, *, above: int = 0) -> None:
    _write_above(axes, text, 38 + above, fontsize=10, fontweight="bold", color=INK)
    _write_above(axes, kinds, 27 + above, fontsize=7, color=FAINT)


def _write_above(axes: "Axes", text: str, height: int | float, **style: Any) -> None:
    """Write a text at the left, `height` points above the axes."""
    axes.annotate(
        _math_free(text), (0, 1), xytext=(0, height), xycoords="axes fraction", textcoords="offset points", **style
    )


def _colour_bar(figure: "Figure", axes: "list[Axes]", style: _Style, *, lying: bool) -> None:
    """Add the colour scale: shares of the largest score of each panel, or scores up to the limit; below if `lying`."""
    norm = import_extra("matplotlib.colors", "plot").Normalize(-1 if style.signed else 0, 1)
    mappable = import_extra("matplotlib.cm", "plot").ScalarMappable(norm, style.colours)
    shares = [-1, -0.5, -0.1, 0, 0.1, 0.5, 1] if style.signed else [0, 0.01, 0.1, 0.25, 0.5, 1]
    if lying:
        bar = figure.colorbar(mappable, ax=axes, location="bottom", fraction=0.25 / len(axes) ** 0.5, aspect=25)
    else:
        shrink = min(1.0, 4 / figure.get_figheight())
        bar = figure.colorbar(mappable, ax=axes, fraction=0.03, aspect=30, shrink=shrink)
    labels = [f"{s:.0%}" if style.limit is None else f"{s * style.limit:.3g}" for s in shares]
    bar.set_ticks([float(np.sign(s) * abs(s) ** 0.5) for s in shares], labels=labels)
    bar.ax.tick_params(length=0, labelsize=6.5, colors=FAINT)
    what = "share of the panel's largest score" if style.limit is None else "score"
    bar.set_label(f"{what}, square root", fontsize=7, color=FAINT)
    bar.outline.set_visible(False)


def _key(figure: "Figure") -> None:
    """Add the key of the outline."""
    line = import_extra("matplotlib.lines", "plot").Line2D([], [], color=OUTLINE["light"], linewidth=1.2)
    figure.legend([line], ["expected"], loc="outside upper right", frameon=False, fontsize=7, labelcolor=FAINT)
