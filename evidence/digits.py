"""Scans of digits on photographs, with exact masks: images on which a classifier must find the digit."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from unilinattn.evaluation import Sample
from unilinattn.optional import import_extra

SIDE = 32
"""Pixels of a side of an image."""

PATCH = 4
"""Pixels of a side of a patch."""

GRID = (SIDE // PATCH, SIDE // PATCH)
"""Rows and columns of patches."""

CLASSES = 10

PHOTOGRAPHS = ("grass", "gravel", "brick", "camera")
"""Grey photographs of 512 x 512 pixels that scikit-image brings with it, all CC0."""

TEST_SCANS = 397
"""Number of the last scans of `sklearn.datasets.load_digits`, which no model is trained on."""

DIM = 0.6
"""Factor of the brightness of the photographs."""

INK = (0.7, 1.0)
"""Range of the brightness of a digit."""

SHARE = (0.4, 0.7)
"""Range of the side of a scan as a share of the image's side."""

ROTATION = math.radians(15)
"""Largest rotation of a scan in radians, to either side."""

SHEAR = 0.15
"""Largest shear of a scan, to either side."""

Part = Literal["train", "test"]


@dataclass(frozen=True)
class Digits:
    """A batch of images.

    Attributes:
        pixels: images from 0 (black) to 1, (1 - coverage) x background + coverage x ink.
        background: the same photographs without the digits.
        labels: the digits.
        masks: True where ink covers more than half of a pixel.
    """

    pixels: Float[Tensor, "image 1 side side"]
    background: Float[Tensor, "image 1 side side"]
    labels: Int[Tensor, " image"]
    masks: Bool[Tensor, "image side side"]


def digits(count: int, seed: int, part: Part, *, brightness: float = DIM) -> Digits:
    """Draw images: each a scan, slightly rotated and sheared, at a random size and place on a piece of a photograph.

    Images for tests have other scans, and the right halves of the photographs. `brightness`: factor of the photographs.

    Raises `MissingExtraError` if scikit-learn or scikit-image is missing.
    """
    generator = torch.Generator().manual_seed(seed)
    scans, labels = _scans(part)
    photographs = _photographs(part)

    def uniform(low: float, high: float) -> Float[Tensor, " image"]:
        return torch.rand(count, generator=generator, dtype=torch.float64) * (high - low) + low

    def integers(high: int) -> Int[Tensor, " image"]:
        return torch.randint(high, (count,), generator=generator)

    chosen, photograph = integers(len(scans)), integers(len(photographs))
    top, left = (integers(extent - SIDE + 1) for extent in photographs.shape[1:])
    at = torch.arange(SIDE)
    rows, columns = top[:, None, None] + at[:, None], left[:, None, None] + at
    background = brightness * photographs[photograph[:, None, None], rows, columns]

    share, angle, shear, ink = uniform(*SHARE), uniform(-ROTATION, ROTATION), uniform(-SHEAR, SHEAR), uniform(*INK)
    # The scan's square lies within the image, before its rotation; coordinates are -1 to 1 from border to border.
    across, down = ((1 - share) * uniform(-1, 1) for _ in range(2))
    coverage = _placed(scans[chosen], share, angle, shear, torch.stack([across, down], -1))
    pixels = (1 - coverage) * background + coverage * ink[:, None, None]
    return Digits(pixels[:, None].float(), background[:, None].float(), labels[chosen], coverage > 0.5)


def samples(count: int, seed: int, patches: Bool[Tensor, " key"], name: str = "") -> list[Sample]:
    """Return images for tests with their masks, for models whose tokens are those of `patches` and a CLS token.

    Their targets are the CLS token, their references the same photographs without the digits. `patches` is True at the
    tokens of patches.
    """
    drawn = digits(count, seed, "test")
    (cls,) = (~patches).nonzero().flatten().tolist()
    return [
        Sample(
            inputs=drawn.pixels[at : at + 1],
            target=cls,
            valid=patches,
            label=int(drawn.labels[at]),
            grid=GRID,
            foreground=drawn.masks[at],
            reference=drawn.background[at : at + 1],
            name=f"{name}{at}",
        )
        for at in range(count)
    ]


def _placed(
    scans: Float[Tensor, "image 8 8"],
    share: Float[Tensor, " image"],
    angle: Float[Tensor, " image"],
    shear: Float[Tensor, " image"],
    centre: Float[Tensor, "image 2"],
) -> Float[Tensor, "image side side"]:
    """Return how much of each pixel the ink of a scan covers, interpolated bilinearly."""
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    turned = torch.stack([cos, -sin, sin, cos], -1).view(-1, 2, 2)
    sheared = torch.stack([one, shear, zero, one], -1).view(-1, 2, 2)
    # From a pixel of the image to the point of the scan.
    matrix = turned @ sheared / share[:, None, None]
    affine = torch.cat([matrix, -matrix @ centre[:, :, None]], -1)
    grid = functional.affine_grid(affine, [len(scans), 1, SIDE, SIDE], align_corners=False)
    return functional.grid_sample(scans[:, None], grid, align_corners=False)[:, 0].clamp(0, 1)


@cache
def _scans(part: Part) -> tuple[Float[Tensor, "scan 8 8"], Int[Tensor, " scan"]]:
    loaded = import_extra("sklearn.datasets", "evidence").load_digits()
    kept = slice(None, -TEST_SCANS) if part == "train" else slice(-TEST_SCANS, None)
    return torch.tensor(loaded.images[kept]) / 16, torch.tensor(loaded.target[kept])


@cache
def _photographs(part: Part) -> Float[Tensor, "photograph height width"]:
    data = import_extra("skimage.data", "evidence")
    whole = torch.stack([torch.tensor(getattr(data, name)()) for name in PHOTOGRAPHS]).double() / 255
    half = whole.shape[2] // 2
    return whole[:, :, :half] if part == "train" else whole[:, :, half:]
