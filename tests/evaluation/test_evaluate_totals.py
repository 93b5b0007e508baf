"""Metrics whose value over samples is not the mean of theirs: `evaluate` counts pixels and links of all samples."""

import pytest
import torch
from torch import Tensor

import unilinattn as ula
from tests.evaluation import tiny
from unilinattn.evaluation.metrics import alignment_error_rate
from unilinattn.evaluation.samples import Sample
from unilinattn.evaluation.segmentation import segmentation_scores


def patches(sample: Sample) -> Tensor:
    """The scores of six patches after one other token."""
    return torch.cat([torch.tensor([9.0]), sample.inputs[0, 1:].double() + torch.arange(6) / 10])


def test_segmentation_over_samples_counts_the_pixels_of_all() -> None:
    masks = torch.zeros(2, 4, 6, dtype=torch.bool)
    masks[0, :2, :3] = masks[1, :, 2:] = True
    valid = torch.arange(7) > 0
    data = [
        Sample(inputs=one.inputs, target=-1, valid=valid, grid=(2, 3), foreground=mask)
        for one, mask in zip(tiny.data(2), masks, strict=True)
    ]
    names = ("pixel_accuracy", "mean_iou", "mean_ap", "foreground_ap")
    table = ula.evaluate({"m": tiny.model()}, data, {"map": lambda t, s: patches(s)}, names, baselines=[])
    maps = torch.stack([patches(sample)[1:].view(2, 3) for sample in data])
    maps = torch.nn.functional.interpolate(maps[:, None], (4, 6), mode="bilinear")[:, 0]
    both = segmentation_scores(maps, masks)
    for name in names:
        (total,) = table.summary().select(metric=name)
        assert total["value"] == pytest.approx(getattr(both, name), abs=1e-12)
        for at, row in enumerate(table.select(metric=name)):
            assert row["value"] == getattr(segmentation_scores(maps[at : at + 1], masks[at : at + 1]), name)
    ious = [row["value"] for row in table.select(metric="mean_iou")]
    assert sum(ious) / 2 != pytest.approx(both.mean_iou, abs=1e-3)


def test_alignment_errors_count_the_links_of_all_samples() -> None:
    torch.manual_seed(1)
    scores = {"a": torch.rand(7, 7), "b": torch.rand(7, 7)}
    sure, valid = torch.rand(2, 7, 7) < 0.1, torch.ones(7, 7, dtype=torch.bool)
    possible = sure | (torch.rand(2, 7, 7) < 0.3)
    valid[5:] = False
    sure, possible = sure & valid, possible & valid
    data = [
        Sample(inputs=one.inputs, relevant=sure[at], possible=possible[at], valid=valid, name=name)
        for at, (name, one) in enumerate(zip(scores, tiny.data(2), strict=True))
    ]
    table = ula.evaluate({"m": tiny.model()}, data, {"f": lambda t, s: scores[s.name]}, ["aer"], baselines=[])
    wrong = links = 0.0
    for at, name in enumerate(scores):
        best = [max(range(7), key=lambda j: float(scores[name][i, j])) for i in range(5)]
        hits = sum(bool(sure[at, i, j]) + bool(possible[at, i, j]) for i, j in enumerate(best))
        count = 5 + int(sure[at].sum())
        assert table[at]["value"] == pytest.approx(1 - hits / count, abs=1e-12)
        wrong, links = wrong + count - hits, links + count
    (total,) = table.summary()
    assert total["value"] == pytest.approx(wrong / links, abs=1e-12)
    stacked = alignment_error_rate(torch.stack(list(scores.values())), sure, possible, valid)
    assert total["value"] == pytest.approx(stacked, abs=1e-12)
