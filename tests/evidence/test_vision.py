"""Digits on photographs: exact masks, baselines by hand, claims that follow from the rows, and the shipped models."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("skimage")

import unilinattn as ula
from evidence import bootstrap
from evidence.claims import HERE, Claim, Results, outcomes
from evidence.comparisons import Comparison, between
from evidence.digits import DIM, GRID, INK, PATCH, PHOTOGRAPHS, SIDE, TEST_SCANS, digits, samples
from evidence.study import SEEDS, Size
from evidence.vision import STUDY, drawn
from evidence.vision_claims import narrower
from evidence.vision_maps import (
    Images,
    background_rows,
    baselines,
    change_rows,
    layer_maps,
    mask_rows,
    method_maps,
    of_others,
    separating,
)
from evidence.vision_models import controls, patches_of
from evidence.vision_tables import METHODS, OF_CODE
from unilinattn.evaluation import Table, segmentation_scores
from unilinattn.evaluation.table import PARTS
from unilinattn.optional import MissingExtraError


def test_images_depend_on_their_seed_alone() -> None:
    first = digits(6, 3, "test")
    torch.rand(5)
    again, other = digits(6, 3, "test"), digits(6, 4, "test")
    for name in ("pixels", "background", "labels", "masks"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))
    assert not torch.equal(digits(6, 3, "train").pixels, first.pixels)


def test_photographs_of_no_brightness_are_black() -> None:
    dark, usual = digits(6, 3, "train", brightness=0.0), digits(6, 3, "train")
    assert not dark.background.any()
    assert usual.background.any()
    assert torch.equal(dark.masks, usual.masks)


def is_exact(masks: torch.Tensor, pixels: torch.Tensor, background: torch.Tensor) -> bool:
    """Whether a mask marks the pixels that are nearer to one ink, the same in the whole image, than to the photograph.

    The ink is unknown: any within the range may explain all pixels of the image.
    """
    for ink in torch.linspace(*INK, 3001, dtype=torch.float64):
        coverage = (pixels - background) / (ink - background)
        clear = (coverage - 0.5).abs() > 1e-3
        if torch.equal((coverage > 0.5)[clear], masks[clear]):
            return True
    return False


def test_the_masks_are_where_ink_covers_more_than_half_of_a_pixel() -> None:
    drawn = digits(8, 5, "test")
    for pixels, background, mask_ in zip(drawn.pixels, drawn.background, drawn.masks, strict=True):
        parts = (pixels[0].double(), background[0].double())
        assert is_exact(mask_, *parts)
        assert not is_exact(mask_.roll(1, 0), *parts)
        assert not is_exact(mask_.roll(1, 1), *parts)


def test_tests_and_training_share_no_scan_and_no_pixel_of_a_photograph() -> None:
    from skimage import data
    from sklearn.datasets import load_digits

    whole = [torch.tensor(getattr(data, name)()).double() / 255 * DIM for name in PHOTOGRAPHS]
    halves = {"train": [one[:, :256] for one in whole], "test": [one[:, 256:] for one in whole]}
    for part, photographs in halves.items():
        for piece in digits(6, 1, part).background[:, 0]:
            found = [one.unfold(0, SIDE, 1).unfold(1, SIDE, 1)[:, :, 0, 0] for one in photographs]
            places = [(corner - piece[0, 0]).abs().lt(1e-6).nonzero().tolist() for corner in found]
            assert any(
                torch.allclose(one[r : r + SIDE, c : c + SIDE].float(), piece, atol=1e-6)
                for one, at in zip(photographs, places, strict=True)
                for r, c in at
            )
    every = load_digits().target
    counts = torch.bincount(digits(4000, 2, "test").labels, minlength=10) / 4000
    expected = torch.bincount(torch.tensor(every[-TEST_SCANS:]), minlength=10) / TEST_SCANS
    assert float((counts - expected).abs().max()) < 0.03


def test_samples_know_their_cls_token_and_the_picture_without_the_digit() -> None:
    (vim,), (vit,) = samples(1, 7, patches_of("vim")), samples(1, 7, patches_of("vit"))
    assert (vim.target, vit.target) == (32, 0)
    assert torch.equal(vim.inputs, vit.inputs)
    drawn = digits(1, 7, "test")
    assert torch.equal(vim.reference, drawn.background)
    unchanged = (vim.inputs == vim.reference)[0, 0]
    assert not bool((unchanged & drawn.masks[0]).any())
    for model in STUDY.models:
        host = STUDY.models[model].build()
        cls = getattr(host, "cls_positions", (0,))
        assert cls == tuple((~patches_of(model)).nonzero().flatten().tolist())


def test_baselines_equal_values_by_hand() -> None:
    images = Images(samples(2, 7, patches_of("vim")))
    maps, sample = baselines(images, 0), images.samples[0]
    assert sample.foreground is not None
    for at in range(64):
        row, column = divmod(at, SIDE // PATCH)
        pixels = [
            bool(sample.foreground[y, x])
            for y in range(PATCH * row, PATCH * row + PATCH)
            for x in range(PATCH * column, PATCH * column + PATCH)
        ]
        assert float(maps["mask"][0, at]) == sum(pixels) / 16
        assert float(maps["centre"][0, at]) == pytest.approx(-(((row - 3.5) ** 2 + (column - 3.5) ** 2) ** 0.5))
    count = int(sample.foreground.sum())
    accuracy, iou = background_rows("vim", images)[:2]
    assert accuracy["value"] == pytest.approx(1 - count / SIDE**2)
    assert iou["value"] == pytest.approx((1 - count / SIDE**2) / 2)
    assert iou[PARTS] == [(0.0, float(count)), (float(SIDE**2 - count), float(SIDE**2))]


def test_a_constant_map_is_replaced_by_random_scores_and_no_other_is() -> None:
    maps = torch.stack([torch.ones(64), torch.arange(64.0)]).double()
    separated = separating(maps)
    assert len(separated[0].unique()) == 64
    assert torch.equal(separated[1], maps[1])


def test_maps_of_a_batch_are_those_of_single_images() -> None:
    """And the numbers are those of `ula.evaluate`, image by image."""
    images = Images(samples(2, 7, patches_of("vim")))
    host = STUDY.models["vim"].build().eval()
    methods = {"lrp": METHODS["lrp"], "raw": METHODS["raw"], "by code": OF_CODE["raw, published code"]}
    maps, layers = method_maps(host, images, methods)
    assert set(layers.values()) == {"all"}
    rows = mask_rows("vim", images, maps, layers)
    rows += change_rows("vim", host, images, maps, {"positive": ("reference", "positive"), "au": ("zero", "pruning")})
    table = ula.evaluate(
        {"vim": host},
        images.samples,
        {label: (of.method, dict(of.options)) for label, of in methods.items()},
        {
            **{name: name for name in ("pixel_accuracy", "mean_ap", "mean_iou", "foreground_ap")},
            "positive": ("positive_perturbation", {"masking": "reference"}),
            "au": ("pruning_au_mse", {"masking": "zero"}),
        },
        baselines=(),
        progress=False,
    )
    expected = {(row["method"], row["sample"], row["metric"]): row["value"] for row in table}
    measured = {(row["method"], row["sample"], row["metric"]): row["value"] for row in rows}
    assert measured == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_the_layer_is_the_best_on_other_images() -> None:
    scored, selection = drawn("vim", 0, Size(2, 3))
    host, best = STUDY.models["vim"].build().eval(), {"latim": METHODS["latim, best layer"]}
    maps, layers = method_maps(host, scored, best, selection)
    heat = [
        torch.nn.functional.interpolate(layer.view(-1, 1, *GRID), (SIDE, SIDE), mode="bilinear")[:, 0]
        for layer in layer_maps(host, selection, best["latim"])
    ]
    precisions = [segmentation_scores(one, selection.masks).foreground_ap for one in heat]
    assert layers["latim"] == str(precisions.index(max(precisions)))
    every = layer_maps(host, scored, best["latim"])
    assert torch.equal(maps["latim"], every[int(layers["latim"])])


def test_each_seed_has_its_images() -> None:
    every = [images.pixels for seed in SEEDS for images in drawn("vim", seed, Size(3, 3))]
    pixels = torch.cat(every).flatten(1)
    assert len(pixels.unique(dim=0)) == len(pixels)


def test_a_map_of_another_image_is_that_of_the_next() -> None:
    maps = {"raw": torch.arange(12.0).view(3, 4)}
    assert torch.equal(of_others(maps)["raw, another image"], maps["raw"][[1, 2, 0]])


def test_controls_differ_from_the_trained_model_where_they_should() -> None:
    host = STUDY.models["vim"].build().eval()
    pixels = samples(1, 7, patches_of("vim"))[0].inputs
    fresh, mixed = controls(STUDY.models["vim"].build, lambda: copy.deepcopy(host), pixels, 1).values()
    changed = {name for name, weight in mixed.state_dict().items() if not torch.equal(weight, host.state_dict()[name])}
    assert changed and all(name.startswith("layers.3.mixer.") for name in changed)
    assert not torch.equal(fresh.state_dict()["layers.0.mixer.in_proj.weight"], host.layers[0].mixer.in_proj.weight)


def rows(table: str, values: dict[tuple[str, str, str], float]) -> Results:
    """Results of three seeds and twenty samples: each value, with a small noise that all methods share."""
    tables = {}
    for seed in range(3):
        noise = torch.rand(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 100
        tables[seed] = Table(
            [
                {
                    "model": model,
                    "method": method,
                    "layer": "",
                    "sample": str(at),
                    "metric": metric,
                    "value": value + float(more) * (1 + len(method) / 10),
                    PARTS: [(value + float(more) * (1 + len(method) / 10), 1.0)],
                }
                for (model, method, metric), value in values.items()
                for at, more in enumerate(noise)
            ]
        )
    return Results({table: tables})


def test_verdicts_flip_when_the_rows_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 200)

    def verdict_of(comparison: Comparison, values: dict[tuple[str, str, str], float]) -> str:
        (row,) = outcomes([Claim.of("", HERE, comparison)], rows("t", values))
        return str(row["verdict"])

    values = {("vim", "raw", "ap"): 0.6, ("vit", "raw", "ap"): 0.3}
    swapped = {("vit", "raw", "ap"): 0.6, ("vim", "raw", "ap"): 0.3}
    forward = between("t", "ap", "raw", "vim", "vit")
    assert [verdict_of(forward, one) for one in (values, swapped)] == ["holds", "contradicted"]
    assert verdict_of(between("t", "ap", "raw", "vim", "vit", larger=False), swapped) == "holds"

    def gap(black: float, blur: float) -> str:
        values = {("vit", "raw", f"negative {name}"): 0.8 for name in ("black", "blur")}
        values |= {("vim", "raw", "negative black"): 0.8 - black, ("vim", "raw", "negative blur"): 0.8 - blur}
        comparison = narrower(["raw"])
        terms = tuple((weight, term._replace(table="t")) for weight, term in comparison.terms)
        return verdict_of(replace(comparison, terms=terms), values)

    assert (gap(0.4, 0.1), gap(0.1, 0.4)) == ("holds", "contradicted")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from evidence import digits as module

    for cached in (module._scans, module._photographs):
        cached.cache_clear()
    for package in ("sklearn", "skimage"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            patch.delitem(sys.modules, f"{package}.datasets" if package == "sklearn" else "skimage.data", raising=False)
            with pytest.raises(MissingExtraError, match=rf"needs {package}.*unilinattn\[evidence\]"):
                digits(1, 0, "train")
