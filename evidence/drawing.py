"""Pictures of alignments."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Bool, Float
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SURE, POSSIBLE, OTHER = "#1f6fb4", "#6fb1de", "#e07b39"

LEAST = 0.1
"""Share of a word's best score below which its links are not drawn."""


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
