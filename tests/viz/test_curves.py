"""Line plots as SVG: their paths, ticks, legend and escaping."""

import re

import pytest

from unilinattn.viz.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Curves, curves

SPITE = "</title><script>alert(1)</script>"


def plot(series: dict[str, list[float]], **labels: object) -> Curves:
    return Curves("a model", series, [0.0, 50.0, 100.0], ("removed, %", "probability"), **labels)


def points(svg: str) -> list[list[tuple[float, float]]]:
    """The points of the drawn lines, in the units of the axes: percent and probability up to the last tick."""
    paths = re.findall(r'class="line" d="M([^"]+)"', svg)
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    pairs = [[tuple(map(float, point.split())) for point in path.split("L")] for path in paths]
    return [[((x - LEFT) / across * 100, (HEIGHT - BOTTOM - y) / up) for x, y in path] for path in pairs]


def test_points_lie_at_their_values_on_axes_from_zero() -> None:
    text = curves([plot({"raw": [1.0, 0.25, 0.5], "random": [1.0, 0.75, 0.5]}, baseline="random")])
    # The line to compare with is drawn first, beneath the others.
    first, second = points(text)
    for found, values in ((first, [1.0, 0.75, 0.5]), (second, [1.0, 0.25, 0.5])):
        assert [x for x, _ in found] == pytest.approx([0, 50, 100], abs=0.1)
        assert [y for _, y in found] == pytest.approx(values, abs=1e-3)
    assert re.findall(r'class="up"[^>]*>([^<]+)', text) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert ">removed, %<" in text and ">probability<" in text


def test_plots_share_their_ends_and_the_style_of_a_line() -> None:
    first, second = plot({"a": [0.4, 0.2, 0.1], "b": [0.3, 0.2, 0.1]}), plot({"b": [0.02, 0.01, 0.0]})
    text = curves([first, second])
    assert re.findall(r'class="up"[^>]*>([^<]+)', text) == ["0", "0.1", "0.2", "0.3", "0.4"] * 2
    styles = re.findall(r'class="line" [^/]*stroke="var\(--line-(\d)\)"', text)
    assert styles == ["0", "1", "1"]


def test_lines_beyond_the_colours_are_dashed_and_zeros_have_an_axis() -> None:
    text = curves([plot({f"line {i}": [0.0, 0.0, 0.0] for i in range(7)})])
    (legend,) = re.findall(r'class="legend">(.*)</div></div>', text)
    assert legend.count("stroke-dasharray") == 1 and legend.count("--line-0") == 2
    assert all(y == 0 for path in points(text) for _, y in path)


def test_names_are_escaped() -> None:
    labels = Curves(SPITE, {SPITE: [1.0, 2.0]}, [0.0, 1.0], (SPITE, SPITE), notes={SPITE: SPITE})
    assert "<script" not in curves([labels])
