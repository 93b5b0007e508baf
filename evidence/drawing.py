"""Pictures of alignments and of scores over tokens."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Float
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SURE, POSSIBLE, OTHER = "#1f6fb4", "#6fb1de", "#e07b39"
RIGHT, WRONG, PLAIN, PALE = "#2a8f4f", "#d1495b", "#222222", "#b4b4b4"

LEAST = 0.1
"""Share of a word's best score below which its links are not drawn."""

STRIP = 1.3
"""Height of a strip and of the gap below it, in tokens."""


def draw_links(
    axis: "Axes",
    above: Sequence[str],
    below: Sequence[str],
    scores: Float[Tensor, "below above"],
    sure: Bool[Tensor, "below above"],
    possible: Bool[Tensor, "below above"],
    title: str,
) -> None:
    """Draw two rows of words, and a line for each score, relative to the best of its word below.

    Sure links are dark blue, other possible ones dotted and light, links that are neither orange.
    """
    width = max(len(above), len(below))
    tops, feet = ([(at + 0.5) * width / len(words) for at in range(len(words))] for words in (above, below))
    for at, row in enumerate(scores.abs()):
        for key, weight in enumerate((row / row.max().clamp_min(1e-30)).tolist()):
            if weight < LEAST:
                continue
            is_sure, is_possible = bool(sure[at, key]), bool(possible[at, key])
            axis.plot(
                [tops[key], feet[at]],
                [0.84, 0.16],
                color=SURE if is_sure else POSSIBLE if is_possible else OTHER,
                linewidth=0.6 + 3.0 * weight,
                alpha=0.2 + 0.8 * weight,
                linestyle="-" if is_sure or not is_possible else (0, (1.2, 1.0)),
                solid_capstyle="round",
                zorder=1 + weight + is_possible,
            )
    for places, words, height, side in ((tops, above, 0.88, "bottom"), (feet, below, 0.12, "top")):
        for place, word in zip(places, words, strict=True):
            axis.text(place, height, word, ha="center", va=side, fontsize=11)
    axis.set(xlim=(0, width), ylim=(0, 1.0))
    axis.set_title(title, fontsize=12, loc="left", pad=4)
    axis.axis("off")


def draw_strips(
    axis: "Axes",
    words: Sequence[str],
    rows: Mapping[str, Float[Tensor, " token"]],
    title: str,
    *,
    pale: Collection[int],
    colors: Mapping[int, str],
) -> None:
    """Draw words, and below them a strip of absolute scores for each row, relative to the row's best.

    `pale`: positions of words in grey. `colors`: colours of words by position, which are framed in each strip.
    """
    for at, word in enumerate(words):
        style: dict[str, Any] = {"color": colors.get(at, PALE if at in pale else PLAIN)}
        if at in colors:
            style["fontweight"] = "bold"
        axis.text(at + 0.5, 0.3, word, rotation=90, ha="center", va="bottom", fontsize=9.5, **style)
    for down, (label, scores) in enumerate(rows.items()):
        bottom = -STRIP * down - 1
        strength = scores.abs() / scores.abs().max()
        extent = (0, len(scores), bottom, bottom + 1)
        axis.imshow(strength[None], extent=extent, cmap="Blues", vmin=0, vmax=1, aspect="auto", zorder=1)
        axis.plot(
            [0, len(scores), len(scores), 0, 0], [bottom, bottom, bottom + 1, bottom + 1, bottom], "#cccccc", lw=0.8
        )
        axis.text(-0.5, bottom + 0.5, label, ha="right", va="center", fontsize=10)
        for at, color in colors.items():
            if at < len(scores):
                axis.plot(
                    [at, at + 1, at + 1, at, at],
                    [bottom, bottom, bottom + 1, bottom + 1, bottom],
                    color=color,
                    linewidth=2.2,
                    solid_joinstyle="miter",
                    zorder=3,
                    clip_on=False,
                )
    axis.set(xlim=(-0.1, len(words) + 0.1), ylim=(-STRIP * len(rows), 5.0))
    axis.set_title(title, loc="left", fontsize=12, pad=2)
    axis.axis("off")
