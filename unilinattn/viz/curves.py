"""Line plots as SVG within a page, in the page's colours."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 8, 38
"""Margins around the axes, in units of the drawing."""

COLOURS = 6
"""Number of colours of lines, `--line-0` and on of the page's style; further lines repeat them, dashed."""

STEPS = (1, 2, 2.5, 5, 10)
"""Steps between ticks, times a power of ten."""

MOST_TICKS = 5
"""Largest number of steps between the ticks of an axis."""


@dataclass(frozen=True)
class Curves:
    """Lines in one pair of axes, whose vertical one starts at 0.

    Attributes:
        title: text above the axes.
        series: the values of each line by its name, one for each of `across`; none is negative.
        across: positions on the horizontal axis, increasing.
        names: names of the axes with their units, horizontal and vertical.
        baseline: name of the line to compare with, dashed and grey.
        notes: a text behind a line's name in its tip, such as its area.
    """

    title: str
    series: Mapping[str, Sequence[float]]
    across: Sequence[float]
    names: tuple[str, str]
    baseline: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)


def curves(plots: Sequence[Curves]) -> str:
    """Return plots side by side with one legend; a line has the same style in each, and the axes the same end.

    Without a pointer the numbers cannot be read off: give them in a table as well.
    """
    names = list(dict.fromkeys(name for plot in plots for name in plot.series))
    baselines = {plot.baseline for plot in plots}
    lines = [name for name in names if name not in baselines]
    styles = {name: _style(index) for index, name in enumerate(lines)}
    styles |= {name: 'stroke="var(--faint)" stroke-dasharray="3 3"' for name in names if name not in styles}
    largest = max((value for plot in plots for line in plot.series.values() for value in line), default=0.0)
    ticks = _ticks(largest)
    drawn = "".join(
        f"<figure><figcaption>{escape(plot.title)}</figcaption>{_svg(plot, styles, ticks)}</figure>" for plot in plots
    )
    legend = "".join(
        f'<span><svg viewBox="0 0 22 8" aria-hidden="true"><path d="M0 4H22" {style}/></svg>{escape(name)}</span>'
        for name, style in styles.items()
    )
    return f'<div class="ula-curves"><div class="plots">{drawn}</div><div class="legend">{legend}</div></div>'


def _style(index: int) -> str:
    dash = ' stroke-dasharray="7 3"' if index >= COLOURS else ""
    return f'stroke="var(--line-{index % COLOURS})"{dash}'


def _ticks(largest: float) -> list[float]:
    """Return ticks from 0 to the first one that is not below `largest`."""
    largest = largest if largest > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(largest / MOST_TICKS))
    step = next(step * power for step in STEPS if step * power * MOST_TICKS >= largest * (1 - 1e-9))
    return [index * step for index in range(math.ceil(largest / step - 1e-9) + 1)]


def _svg(plot: Curves, styles: Mapping[str, str], ticks: Sequence[float]) -> str:
    first, last = plot.across[0], plot.across[-1]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(position: float) -> str:
        return f"{LEFT + (right - LEFT) * (position - first) / (last - first):.1f}"

    def y(value: float) -> str:
        return f"{bottom - (bottom - TOP) * value / ticks[-1]:.1f}"

    grid = "".join(f'<path class="grid" d="M{LEFT} {y(tick)}H{right}"/>' for tick in ticks)
    marks = "".join(f'<text class="up" x="{LEFT - 6}" y="{y(tick)}">{tick:.4g}</text>' for tick in ticks)
    across = [first + (last - first) * quarter / 4 for quarter in range(5)]
    marks += "".join(f'<text class="mark" x="{x(tick)}" y="{bottom + 15}">{tick:.4g}</text>' for tick in across)
    lines = ""
    for name in sorted(plot.series, key=lambda name: name != plot.baseline):
        path = "M" + "L".join(f"{x(a)} {y(v)}" for a, v in zip(plot.across, plot.series[name], strict=True))
        note = f", {plot.notes[name]}" if name in plot.notes else ""
        lines += (
            f'<g><title>{escape(name + note)}</title><path class="reach" d="{path}"/>'
            f'<path class="line" d="{path}" {styles[name]}/></g>'
        )
    horizontal, vertical = map(escape, plot.names)
    middle = (TOP + bottom) / 2
    label = escape(f"{plot.title}: {plot.names[1]} by {plot.names[0]}; lines {', '.join(plot.series)}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{grid}{marks}'
        f'<text class="name" x="{(LEFT + right) / 2}" y="{HEIGHT - 6}">{horizontal}</text>'
        f'<text class="name" transform="translate(11 {middle}) rotate(-90)">{vertical}</text>{lines}</svg>'
    )
