"""Segmentation metrics: relevance maps, thresholded at their means, against foreground masks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.errors import InputError
from unilinattn.evaluation.metrics import row_scores, tensor_text


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
    predicted = foreground_of(maps)
    ious = [shared / either for shared, either in overlaps(predicted, masks)]
    # One image at a time: the ranking of a data set's pixels takes several times its memory.
    both, front = zip(*(_precisions(*pair) for pair in zip(maps, masks, strict=True)), strict=True)
    return SegmentationScores(
        pixel_accuracy=float((predicted == masks).double().mean()),
        mean_iou=sum(ious) / 2,
        mean_ap=sum(both) / len(maps),
        foreground_ap=sum(front) / len(maps),
        images=len(maps),
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
    relevance: Float[Tensor, "height width"], foreground: Bool[Tensor, "height width"]
) -> tuple[float, float]:
    """Return an image's average precision of both classes in one list, and of the foreground."""
    pixels, front = relevance.flatten(), foreground.flatten()
    scaled = (pixels - pixels.min()) / (pixels.max() - pixels.min())
    both = row_scores(torch.cat([scaled, 1 - scaled])[None], torch.cat([front, ~front])[None])
    return both.ap, row_scores(pixels[None], front[None]).ap


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
