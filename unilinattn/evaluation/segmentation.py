"""Segmentation metrics: relevance maps, thresholded at their means, against foreground masks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.errors import InputError
from unilinattn.evaluation.metrics import batch_scores, tensor_text
from unilinattn.memory import parts

RANKED = 1 << 17
"""Pixels that are ranked in one step, which takes several times their memory."""


@dataclass(frozen=True)
class SegmentationScores:
    """Segmentation metrics, all from 0 to 1, and the number of images."""

    pixel_accuracy: float
    mean_iou: float
    mean_ap: float
    foreground_ap: float
    images: int


def segmentation_scores(
    relevance: Float[Tensor, "image height width"], foreground: Bool[Tensor, "image height width"]
) -> SegmentationScores:
    """Return metrics of relevance maps r against masks that are True at the foreground.

    The predicted foreground of an image is r > mean(r).

    - pixel accuracy: share of pixels whose predicted class is right, over the pixels of all images;
    - mean IoU: mean over foreground and background of |predicted and true| / |predicted or true|, each counted over
      the pixels of all images;
    - mean AP: the published mAP. With s = (r - min r) / (max r - min r), one list holds the scores s of an image's
      pixels, relevant at the foreground, and the scores 1 - s of the same pixels, relevant at the background; its
      average precision is averaged over images. It depends on the spacing of the map, not only on its order;
    - foreground AP: average precision of the foreground pixels ranked by r, averaged over images.

    Tied pixels enter an average precision at once, as in `row_scores`. A map of patches is first scaled to the size of
    the mask, in the papers by bilinear interpolation.

    Raises `InputError` if the shapes differ, a map holds NaN or infinity or is constant, or a mask has no foreground or
    no background.
    Source: HMA ACL 4.2, Table 2, which follows Chefer et al., "Transformer interpretability beyond attention
    visualization" (2021), 4; mean AP and the counts over all images are those of its published code.
    """
    _check(relevance, foreground)
    maps = relevance.detach().double()
    masks = foreground.to(maps.device)
    both, front = _precisions(maps, masks)
    return _scores(foreground_of(maps), masks, sum(both) / len(maps), sum(front) / len(maps))


def image_scores(
    relevance: Float[Tensor, "image height width"], foreground: Bool[Tensor, "image height width"]
) -> list[SegmentationScores]:
    """Return `segmentation_scores` of each image, ranked in one step."""
    _check(relevance, foreground)
    maps = relevance.detach().double()
    masks = foreground.to(maps.device)
    images = zip(foreground_of(maps), masks, *_precisions(maps, masks), strict=True)
    return [_scores(predicted[None], mask[None], both, front) for predicted, mask, both, front in images]


def _scores(predicted: Tensor, masks: Tensor, mean_ap: float, foreground_ap: float) -> SegmentationScores:
    return SegmentationScores(
        pixel_accuracy=float((predicted == masks).double().mean()),
        mean_iou=sum(shared / either for shared, either in overlaps(predicted, masks)) / 2,
        mean_ap=mean_ap,
        foreground_ap=foreground_ap,
        images=len(masks),
    )


def foreground_of(relevance: Float[Tensor, "image height width"]) -> Bool[Tensor, "image height width"]:
    """Return the predicted foreground: the pixels above the mean of their map."""
    return relevance > relevance.mean((1, 2), keepdim=True)


def overlaps(
    predicted: Bool[Tensor, "image height width"], foreground: Bool[Tensor, "image height width"]
) -> list[tuple[int, int]]:
    """Return the pixels in the intersection and in the union, of the foreground and of the background.

    Pixels are counted over all images; the counts of several calls can be added.
    """
    return [
        (
            int(((predicted == side) & (foreground == side)).sum()),
            int(((predicted == side) | (foreground == side)).sum()),
        )
        for side in (True, False)
    ]


def _precisions(
    maps: Float[Tensor, "image height width"], masks: Bool[Tensor, "image height width"]
) -> tuple[list[float], list[float]]:
    """Return each image's average precision of both classes in one list, and of the foreground."""
    both: list[float] = []
    foreground: list[float] = []
    for images in parts(len(maps), max(1, RANKED // maps[0].numel())):
        pixels, front = maps[images].flatten(1), masks[images].flatten(1)
        lowest = pixels.amin(1, keepdim=True)
        scaled = (pixels - lowest) / (pixels.amax(1, keepdim=True) - lowest)
        both += _average_precisions(torch.cat([scaled, 1 - scaled], 1), torch.cat([front, ~front], 1))
        foreground += _average_precisions(pixels, front)
    return both, foreground


def _average_precisions(scores: Float[Tensor, "image key"], relevant: Bool[Tensor, "image key"]) -> list[float]:
    candidates = torch.ones_like(relevant)[:, None]
    return [row.ap for row in batch_scores(scores[:, None], relevant[:, None], candidates)]


def _check(relevance: Tensor, foreground: Tensor) -> None:
    if not isinstance(relevance, Tensor) or not relevance.is_floating_point() or relevance.ndim != 3:
        raise InputError(f"relevance must be floating point, (image, height, width); got {tensor_text(relevance)}.")
    if not isinstance(foreground, Tensor) or foreground.dtype != torch.bool:
        raise InputError(f"foreground must be a boolean tensor, True at the foreground; got {tensor_text(foreground)}.")
    if relevance.shape != foreground.shape or not relevance.numel():
        raise InputError(
            f"relevance of shape {tuple(relevance.shape)} does not fit masks of shape {tuple(foreground.shape)}; give "
            "at least one image, and scale the maps to the masks, as by torch.nn.functional.interpolate(..., "
            "mode='bilinear')."
        )
    flat, front = relevance.flatten(1), foreground.flatten(1)
    _refuse(~flat.isfinite().all(1), "the map of image {} holds NaN or infinity, so it has no mean")
    _refuse(flat.amin(1) == flat.amax(1), "the map of image {} is constant, so it separates no foreground")
    _refuse(~front.any(1), "the mask of image {} has no foreground, so there is nothing to find")
    _refuse(front.all(1), "the mask of image {} has no background, so there is nothing to separate")


def _refuse(wrong: Bool[Tensor, " image"], reason: str) -> None:
    if bool(wrong.any()):
        image, count = int(wrong.nonzero()[0]), int(wrong.sum())
        raise InputError(f"{reason.format(image)}; leave such images out ({count} of {len(wrong)}).")
