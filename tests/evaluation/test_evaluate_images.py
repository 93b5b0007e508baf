"""Evaluations of an image classifier: patches in a grid, a CLS token between them, foreground masks."""

import dataclasses

import pytest
import torch
from torch.nn import functional

import unilinattn as ula
from unilinattn.errors import InputError
from unilinattn.evaluation import Case, PerturbationTest, Sample, segmentation_scores
from unilinattn.models.vim import VisionMamba

CLS = 2
PATCHES = [0, 1, 3, 4]


def test_an_image_classifier_is_measured_on_its_patches() -> None:
    torch.manual_seed(0)
    model = VisionMamba(8, 4, num_classes=3, embed_dim=4, depth=1, d_state=2).eval()
    assert model.cls_positions == (CLS,)
    pixels, foreground = torch.rand(1, 3, 8, 8), torch.zeros(8, 8, dtype=torch.bool)
    foreground[:4, 2:7] = True
    valid = torch.zeros(5, dtype=torch.bool)
    valid[PATCHES] = True
    sample = Sample(inputs=pixels, target=CLS, valid=valid, grid=(2, 2), foreground=foreground, label=1)
    other = torch.rand_like(pixels)
    sample = dataclasses.replace(sample, reference=other)
    metrics = {
        "foreground_ap": "foreground_ap",
        "mean_iou": "mean_iou",
        "mean": ("activation_auac", {"masking": "mean"}),
        "blur": ("pruning_au_mse", {"masking": "blur"}),
        "reference": ("positive_perturbation", {"masking": "reference"}),
    }
    table = ula.evaluate({"vim": model}, [sample], ["rollout", "logit"], metrics, baselines=["primacy"])
    for method in ("rollout", "logit"):
        scores = ula.explain(model, pixels, method=method, target=CLS).scores[0]
        patches = torch.stack([scores[at] for at in PATCHES]).view(1, 2, 2)
        wide = functional.interpolate(patches[None].double(), (8, 8), mode="bilinear")[0]
        found = segmentation_scores(wide, foreground[None])
        tests = {
            name: PerturbationTest(model, pixels, patches, masking=name, labels=torch.tensor([1]))
            for name in ("mean", "blur")
        }
        replaced = PerturbationTest(
            model, pixels, patches, masking="reference", reference=other, labels=torch.tensor([1])
        )
        expected = {
            "reference": replaced.positive().area,
            "foreground_ap": found.foreground_ap,
            "mean_iou": found.mean_iou,
            "mean": tests["mean"].activation().area,
            "blur": tests["blur"].pruning().area,
        }
        assert {row["metric"]: row["value"] for row in table.select(method=method)} == expected
    assert len(table.select(method="primacy")) == len(metrics)
    with pytest.raises(InputError, match="metric positive_perturbation needs `reference`, and sample 0 has none"):
        ula.evaluate(
            {"vim": model}, [dataclasses.replace(sample, reference=None)], ["rollout"], {"r": metrics["reference"]}
        )


def test_every_other_key_reaches_a_query_of_a_bidirectional_model() -> None:
    torch.manual_seed(0)
    model = VisionMamba(8, 4, num_classes=3, embed_dim=4, depth=1, d_state=2).eval()
    pixels, seen = torch.rand(1, 3, 8, 8), {}

    def look(case: Case) -> float:
        seen[case.sample.name, case.result.method] = case.valid.tolist()
        return 0.0

    data = [Sample(inputs=pixels, name=name, target=target) for name, target in (("cls", CLS), ("every", None))]
    ula.evaluate({"vim": model}, data, ["rollout", "logit"], {"look": look}, baselines=[])
    others = [True, True, False, True, True]
    assert seen["cls", "rollout"] == seen["cls", "logit"] == others
    assert seen["every", "rollout"] == (~torch.eye(5, dtype=torch.bool)).tolist()
    # The logits of the image have no query: all keys count.
    assert seen["every", "logit"] == [True] * 5
