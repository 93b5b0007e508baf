"""The picture of the vision study: heat maps of both architectures, and the bias of the CLS token."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from evidence.digits import GRID, PATCH, SIDE, samples
from evidence.pictures import figure
from evidence.training import HELD_OUT_SEED
from evidence.vision_models import patches_of
from evidence.vision_tables import METHODS, NAMES
from unilinattn.analysis import ClsBias
from unilinattn.evaluation import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = (
    "raw",
    "rollout",
    "attribution",
    "transformer attribution",
    "alti rollout",
    "logit",
    "lrp",
    "gradient",
    "integrated gradients",
)
"""Methods in the picture: those without a choice of a layer."""

IMAGES = 3
OUTLINE = "#16a34a"


def picture(hosts: Mapping[str, Callable[[], nn.Module]], biases: Mapping[str, ClsBias]) -> "Figure":
    """Draw held-out images by methods for each model, and below them the mean rows of the CLS token by layer."""
    drawn = figure(11.6, 9.6)
    parts: Any = drawn.subfigures(2, 1, height_ratios=[len(hosts) * IMAGES, 1.45])
    heat, below = parts
    axes = heat.subplots(len(hosts) * IMAGES, 1 + len(SHOWN))
    for block, (model, load) in enumerate(hosts.items()):
        host = load()
        for at, sample in enumerate(samples(IMAGES, HELD_OUT_SEED, patches_of(model))):
            row = axes[block * IMAGES + at]
            trace = ula.trace(host, sample.inputs, progress=False)
            assert isinstance(sample.target, int)
            _image(row[0], sample)
            for ax, label in zip(row[1:], SHOWN, strict=True):
                _heat(ax, sample, METHODS[label].explain(trace, sample.target).scores[0])
            if at == 0:
                for ax, label in zip(row, ("image", *SHOWN), strict=True):
                    ax.set_title(
                        label.replace("integrated ", "integrated\n").replace("former ", "former\n"), fontsize=10
                    )
            if at == IMAGES // 2:
                row[0].set_ylabel(NAMES[model], fontsize=11, labelpad=8)
    below.suptitle("Mean attention of the CLS token to each patch", fontsize=11)
    panels = below.subplots(1, sum(len(one.layers) for one in biases.values()))
    left = 0
    for model, one in biases.items():
        for at, values in enumerate(one.maps.abs()):
            ax = panels[left + at]
            ax.imshow(values, cmap="magma_r", vmin=0)
            place = divmod(int(one.distance.flatten().argmin()), GRID[1])
            ax.plot(place[1], place[0], marker="*", color=OUTLINE, markersize=9, markeredgecolor="white")
            ax.set_title(f"layer {at + 1}", fontsize=9)
            ax.set_xticks([], [])
            ax.set_yticks([], [])
        panels[left].set_ylabel(NAMES[model].replace(", ", ",\n"), fontsize=9)
        left += len(one.layers)
    return drawn


def _image(ax: Any, sample: Sample) -> None:
    ax.imshow(sample.inputs[0, 0], cmap="gray", vmin=0, vmax=1)
    _outline(ax, sample)


def _heat(ax: Any, sample: Sample, scores: Float[Tensor, " key"]) -> None:
    """Draw scores of patches over an image: the darker, the larger; and the CLS token's share as a number."""
    valid = sample.valid
    assert valid is not None
    shown = (scores[valid] / scores[valid].abs().max()).view(1, 1, *GRID).double()
    wide = functional.interpolate(shown, scale_factor=PATCH, mode="bilinear")[0, 0]
    ax.imshow(sample.inputs[0, 0], cmap="gray", vmin=0, vmax=1.4)
    ax.imshow(wide, cmap="RdBu_r", vmin=-1, vmax=1, alpha=wide.abs().clamp(0, 1).sqrt() * 0.9)
    _outline(ax, sample)
    share = float(scores[~valid].abs().sum() / scores.abs().sum())
    ax.text(
        0.97, 0.04, f"{100 * share:.0f} %", transform=ax.transAxes, ha="right", va="bottom", fontsize=7, color="white"
    )


def _outline(ax: Any, sample: Sample) -> None:
    """Draw the border of the mask along the pixels' edges."""
    assert sample.foreground is not None
    edges = functional.interpolate(sample.foreground.double()[None, None], scale_factor=8)[0, 0]
    places = (torch.arange(8 * SIDE) + 0.5) / 8 - 0.5
    ax.contour(places, places, edges, levels=[0.5], colors=OUTLINE, linewidths=0.8)
    ax.set_xticks([], [])
    ax.set_yticks([], [])
    for spine in ax.spines.values():
        spine.set_visible(False)
