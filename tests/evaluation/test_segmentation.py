"""The segmentation metrics against their definitions, written out pixel by pixel."""

import pytest
import torch

from tests.evaluation.test_metrics import loop_average_precision
from unilinattn.errors import InputError
from unilinattn.evaluation import segmentation
from unilinattn.evaluation.segmentation import SegmentationScores, image_scores, segmentation_scores


def loop_scores(relevance: torch.Tensor, foreground: torch.Tensor) -> SegmentationScores:
    right = pixels = 0
    shared, either = {True: 0, False: 0}, {True: 0, False: 0}
    mean_ap = foreground_ap = 0.0
    for image, mask in zip(relevance.flatten(1).tolist(), foreground.flatten(1).tolist(), strict=True):
        mean, low, high = sum(image) / len(image), min(image), max(image)
        for value, front in zip(image, mask, strict=True):
            predicted = value > mean
            right, pixels = right + (predicted == front), pixels + 1
            for side in (True, False):
                shared[side] += predicted == side and front == side
                either[side] += predicted == side or front == side
        scaled = [(value - low) / (high - low) for value in image]
        both = scaled + [1 - value for value in scaled]
        mean_ap += loop_average_precision(both, mask + [not front for front in mask])
        foreground_ap += loop_average_precision(image, mask)
    mean_iou = sum(shared[side] / either[side] for side in (True, False)) / 2
    count = len(relevance)
    return SegmentationScores(right / pixels, mean_iou, mean_ap / count, foreground_ap / count, count)


def images(seed: int, count: int = 3, height: int = 4, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps with ties, some of them negative, and masks with both classes."""
    generator = torch.Generator().manual_seed(seed)
    relevance = torch.randint(-3, 9, (count, height, width), generator=generator).double() / 4
    foreground = torch.rand(count, height, width, generator=generator) < 0.4
    foreground[:, 0, :2] = torch.tensor([True, False])
    return relevance, foreground


@pytest.mark.parametrize("seed", range(5))
def test_the_scores_equal_their_definitions(seed: int) -> None:
    case = images(seed)
    found, known = segmentation_scores(*case), loop_scores(*case)
    assert found.images == known.images
    for name in ("pixel_accuracy", "mean_iou", "mean_ap", "foreground_ap"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), abs=1e-12), name


def test_a_worked_example() -> None:
    relevance = torch.tensor([[[4.0, 3.0], [1.0, 0.0]]])
    foreground = torch.tensor([[[True, False], [True, False]]])
    # The mean is 2: the first row is predicted. Each class has one hit, and three pixels predicted or true.
    found = segmentation_scores(relevance, foreground)
    assert (found.pixel_accuracy, found.mean_iou, found.images) == (0.5, pytest.approx(1 / 3), 1)
    # Foreground pixels stand at ranks 1 and 3.
    assert found.foreground_ap == pytest.approx((1 + 2 / 3) / 2)
    # The list: 1 (hit), 3/4 (no), 1/4 (hit), 0 (no), and 1 - s: 0 (no), 1/4 (hit), 3/4 (no), 1 (hit). Thresholds:
    # at 1 two hits of two keys, at 1/4 four hits of six.
    assert found.mean_ap == pytest.approx((1 + 4 / 6) / 2)


def test_a_perfect_map_and_its_negative() -> None:
    _, foreground = images(0)
    assert segmentation_scores(foreground.double(), foreground) == SegmentationScores(1.0, 1.0, 1.0, 1.0, 3)
    worst = segmentation_scores(-foreground.double(), foreground)
    assert (worst.pixel_accuracy, worst.mean_iou) == (0.0, 0.0)
    assert worst.mean_ap == pytest.approx(0.5)
    assert worst.foreground_ap == pytest.approx(float(foreground.double().mean((1, 2)).mean()))


def test_the_scale_of_a_map_changes_nothing_and_its_spacing_only_what_depends_on_it() -> None:
    relevance, foreground = images(1)
    before, scaled = segmentation_scores(relevance, foreground), segmentation_scores(8 * relevance + 2, foreground)
    assert scaled == before
    bent = segmentation_scores(relevance.exp(), foreground)
    assert bent.foreground_ap == before.foreground_ap
    assert bent.mean_ap != pytest.approx(before.mean_ap)
    assert bent.pixel_accuracy != before.pixel_accuracy


def test_counts_are_pooled_and_precisions_averaged_over_images() -> None:
    relevance, foreground = images(2, count=2)
    both = segmentation_scores(relevance, foreground)
    single = [segmentation_scores(relevance[i : i + 1], foreground[i : i + 1]) for i in range(2)]
    for name in ("pixel_accuracy", "mean_ap", "foreground_ap"):
        assert getattr(both, name) == pytest.approx(sum(getattr(one, name) for one in single) / 2, abs=1e-12)
    assert both.mean_iou != pytest.approx(sum(one.mean_iou for one in single) / 2)


def test_images_ranked_in_one_step_have_the_scores_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    relevance, foreground = images(2, count=3)
    alone = [segmentation_scores(relevance[i : i + 1], foreground[i : i + 1]) for i in range(3)]
    assert image_scores(relevance, foreground) == alone
    monkeypatch.setattr(segmentation, "RANKED", 2 * foreground[0].numel())
    assert image_scores(relevance, foreground) == alone


MAP, MASK = images(3)


def changed(tensor: torch.Tensor, value: float | bool) -> torch.Tensor:
    """Images whose second one holds `value` everywhere."""
    tensor = tensor.clone()
    tensor[1] = value
    return tensor


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("relevance", "foreground", "words"),
    [
        (MAP[0], MASK[0], r"\(image, height, width\); got torch.float64 \(4, 5\)"),
        (MAP.long(), MASK, "got torch.int64"),
        (MAP.tolist(), MASK, "list"),
        (MAP, MASK.double(), "boolean tensor, True at the foreground; got torch.float64"),
        (MAP[:, :2], MASK, r"\(3, 2, 5\) does not fit masks of shape \(3, 4, 5\).*interpolate"),
        (MAP[:0], MASK[:0], "at least one image"),
        (changed(MAP, torch.nan), MASK, "image 1 holds NaN or infinity"),
        (changed(MAP, torch.inf), MASK, "image 1 holds NaN or infinity"),
        (changed(MAP, 0.1), MASK, r"image 1 is constant.*\(1 of 3\)"),
        (MAP, changed(MASK, False), "mask of image 1 has no foreground"),
        (MAP, changed(MASK, True), "mask of image 1 has no background"),
    ],
)
def test_maps_and_masks_without_a_score_are_refused(relevance, foreground, words: str) -> None:
    with pytest.raises(InputError, match=words):
        segmentation_scores(relevance, foreground)
