"""Parts of pictures that several studies draw."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from evidence.claims import Results
from unilinattn.optional import import_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#1b6ca8", "#c2410c", "#0f8f7e", "#6d28a8", "#8a6d00")
"""Colours of models."""

BASELINES = ("random", "recency", "primacy", "diagonal")
"""Rows that ignore the model, drawn in grey."""


def figure(width: float, height: float) -> "Figure":
    """Return an empty figure.

    Raises `MissingExtraError` if matplotlib is missing.
    """
    return import_extra("matplotlib.figure", "plot").Figure(figsize=(width, height), layout="constrained")


def dots(
    panels: Mapping[str, tuple[str, str, Sequence[str]]],
    results: Results,
    *,
    larger: bool = True,
    across: str = "",
) -> "Figure":
    """Draw a panel for each table, a line for each method, and a dot for each model: its mean over the seeds.

    `panels`: table, metric and models by title. Methods are sorted by their mean over models, the best one first.
    """
    every = {title: _means(results, *parts) for title, parts in panels.items()}
    height = max(len(means) for means in every.values())
    drawn = figure(4.4 * len(panels), 0.9 + 0.24 * height)
    axes = drawn.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, means) in zip(axes, every.items(), strict=True):
        order = sorted(means, key=lambda method: fmean(means[method].values()), reverse=not larger)
        models = panels[title][2]
        named = next(method for method in order if method not in BASELINES)
        for at, method in enumerate(order):
            grey = method in BASELINES
            ax.axhline(at, color="#e6e8ee", linewidth=0.8, zorder=0)
            for colour, model in zip(COLOURS, models, strict=False):
                if model in means[method]:
                    ax.plot(
                        means[method][model],
                        at,
                        "o",
                        markersize=6,
                        color=colour,
                        alpha=0.45 if grey else 1,
                        label=model if method == named else None,
                        markeredgecolor="white",
                        markeredgewidth=0.6,
                    )
        ax.set_yticks(range(len(order)), order, fontsize=9)
        for label, method in zip(ax.get_yticklabels(), order, strict=True):
            label.set_color("#8a90a0" if method in BASELINES else "#1c1f2b")
        ax.set_title(title, fontsize=11, loc="left")
        ax.set_xlabel(across, fontsize=9)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(left=False)
        ax.legend(frameon=False, fontsize=8, loc="lower right")
    return drawn


def _means(results: Results, table: str, metric: str, models: Sequence[str]) -> dict[str, dict[str, float]]:
    methods = dict.fromkeys(row["method"] for one in results.tables[table].values() for row in one)
    return {
        method: {model: fmean(results.values(table, model, method, metric)) for model in models} for method in methods
    }
