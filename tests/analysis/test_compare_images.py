"""Models side by side on images without known answers, against runs of the models by themselves."""

import json
import math
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.analysis.plain import shares, spearman
from tests.host.test_image import picture, processor, transform, vision, vit
from unilinattn import explain, trace
from unilinattn.analysis import compare, report
from unilinattn.analysis.compare import SHOWN_IMAGES, compare_models
from unilinattn.analysis.comparison import RANDOM, ModelComparison
from unilinattn.analysis.inputs import named_images
from unilinattn.errors import InputError, OptionError
from unilinattn.evaluation.perturbation import TENTHS
from unilinattn.evaluation.scorers import DRAWS
from unilinattn.models.vim import VisionMamba
from unilinattn.testing import promoted
from unilinattn.tracing.trace import Trace

PICTURES = (picture(), 255 - picture(9, 9))
LABELS = {0: "cat", 1: "dog", 2: "<b>"}

pytestmark = pytest.mark.slow


@cache
def hosts() -> dict[str, nn.Module]:
    """ViM with CLS between its patches, a ViT with CLS in front, and one with smaller patches."""
    torch.manual_seed(0)
    vim = VisionMamba(8, 4, num_classes=3, embed_dim=4, depth=1, d_state=2).double().eval()
    wide: dict[str, Any] = {"num_labels": 3, "id2label": LABELS, "initializer_range": 0.5}
    return {"vim": vim, "vit": vit(**wide).double(), "fine": vit(patch_size=2, **wide).double()}


@cache
def compared() -> ModelComparison:
    with promoted():
        return compare_models(deepcopy(hosts()), images=list(PICTURES), processor=processor(), methods=["raw", "logit"])


def pixels(image: np.ndarray) -> Tensor:
    return processor()(images=Image.fromarray(image), return_tensors="pt")["pixel_values"].double()


def classes(name: str, values: Tensor) -> Tensor:
    with torch.no_grad():
        output = hosts()[name](values)
    return getattr(output, "logits", output)[0].softmax(-1)


@pytest.mark.parametrize(("name", "side"), [("vim", 4), ("vit", 4), ("fine", 2)])
@pytest.mark.parametrize("method", ["raw", "logit"])
def test_the_deletion_curve_is_that_of_single_runs(name: str, side: int, method: str) -> None:
    curve = []
    with promoted():
        run = trace(deepcopy(hosts()[name]), pixels(PICTURES[0]))
        scores = explain(run, method=method, target="cls").scores
        count = (8 // side) ** 2
        # CLS of ViM stands in the middle of the patches.
        keys = [0, 1, 3, 4] if name == "vim" else list(range(1, count + 1))
        heat = scores.mean(0)[0, keys] if method == "raw" else scores[0, keys]
        order = heat.argsort(descending=True).tolist()
        values = pixels(PICTURES[0])
        label = int(classes(name, values).argmax())
        for fraction in TENTHS:
            changed = values.clone()
            for patch in order[: math.ceil(fraction * count - 1e-9)]:
                row, column = divmod(patch, 8 // side)
                changed[..., side * row : side * (row + 1), side * column : side * (column + 1)] = 0
            curve.append(float(classes(name, changed)[label]))
    found = compared().models[name].deletion
    assert found[method].values[0].tolist() == pytest.approx(curve, abs=1e-10)
    assert found[RANDOM].values.shape == (2, len(TENTHS)) and DRAWS > 1
    for end in (0, -1):
        assert float(found[RANDOM].values[0, end]) == pytest.approx(curve[end], abs=1e-10)
    assert not torch.equal(found["raw"].values, found["logit"].values)


def test_maps_are_compared_patch_by_patch_wherever_cls_stands() -> None:
    orders = {"vim": [2, 0, 1, 3, 4], "vit": [0, 1, 2, 3, 4]}
    ranks, divergences = [], []
    with promoted():
        for image in PICTURES:
            maps: dict[str, list[Tensor]] = {}
            for name, order in orders.items():
                layers = trace(deepcopy(hosts()[name]), pixels(image)).layers
                maps[name] = [layer.operator.matrix(heads="mean")[0][order][:, order] for layer in layers]
            for a in maps["vim"]:
                for b in maps["vit"]:
                    rows = [(shares(p.tolist()), shares(q.tolist())) for p, q in zip(a, b, strict=True)]
                    ranks.append(sum(spearman(p, q) for p, q in rows) / len(rows))
                    for p, q in rows:
                        mean = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
                        relative = (x * math.log2(x / m) for r in (p, q) for x, m in zip(r, mean, strict=True) if x)
                        divergences.append(sum(relative) / 2)
    expected = (sum(ranks) / len(ranks), sum(divergences) / len(divergences))
    assert compared().between("vim", "vit") == pytest.approx(expected, abs=1e-10)


def test_maps_of_other_grids_are_not_compared_and_a_note_says_why() -> None:
    found = compared()
    assert found.compared[("vim", "vit")] == 2 and ("vit", "fine") not in found.compared
    assert found.between("vit", "fine") is None
    printed = " ".join(repr(found).split())
    assert (
        "The maps of vit (2 x 2 patches, 1 class token) and fine (4 x 4 patches, 1 class token) are not compared: a "
        "position is not the same part of the image." in printed
    )
    assert "The maps of vim (" in printed and "and vit (" not in printed


def test_the_image_that_each_model_read_is_kept() -> None:
    (first, second) = compared().on_images
    assert (first.name, second.name) == ("image 0", "image 1") == compared().images
    resized = np.asarray(Image.fromarray(PICTURES[0]).resize((8, 8), Image.Resampling.BILINEAR))
    assert np.abs(first.read["vit"].astype(int) - resized).max() <= 1
    # Without the mean and the standard deviation of a processor the values fill the range.
    plain = compare_models({"vit": (vit(), transform)}, images=PICTURES[0], methods=["raw"]).on_images[0].read["vit"]
    assert plain.shape == (8, 8, 3) and (plain.min(), plain.max()) == (0, 255)
    label = int(classes("vit", pixels(PICTURES[0])).argmax())
    assert first.predicted["vit"].startswith(f"{LABELS[label]} (")
    assert first.predicted["vim"].startswith("class ")
    assert compared().shown["vit"]["logit"].logit_names == ((LABELS[label],),)
    assert compared().shown["vim"]["logit"].logit_names is None


def test_the_page_draws_every_image_as_its_model_read_it() -> None:
    page = report.page([compared()])
    (data,) = [json.loads(text.split("</script>")[0]) for text in page.split('<script type="application/json">')[1:]]
    assert data["sequences"] == {"word": "Image", "names": ["image 0", "image 1"]}
    # The models read the same pixels, and each picture names those beneath it.
    for cell in data["cells"]:
        for entry in cell["pictures"]:
            assert entry["grid"] == ([4, 4] if cell["column"] == "fine" else [2, 2]) and "image" in entry
        assert {entry.get("sequence", 0) for entry in cell["pictures"]} == {0, 1}
    assert "<b> (" not in page and "patches removed, %" in page and page.count("<figure>") == 3
    numbers = report.numbers([compared()])
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers and "texts" not in numbers["comparisons"][0]
    assert numbers["comparisons"][0]["images"] == ["image 0", "image 1"]


def test_a_method_that_needs_one_class_token_is_reported_in_its_place() -> None:
    two = VisionMamba(8, 4, num_classes=3, embed_dim=4, depth=1, d_state=2, cls_position="double").eval()
    found = compare_models({"vim": (two, processor())}, images=PICTURES[0], methods=["raw", "logit"]).models["vim"]
    assert "read several tokens" in found.deletion["raw"] and found.patches == "2 x 2 patches, 2 class tokens"
    assert found.deletion["logit"].values.shape == (1, len(TENTHS))


def test_unknown_patches_leave_the_other_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trace, "image_tokens", None)
    pairs = {name: (vit(), processor()) for name in "ab"}
    found = compare_models(pairs, images=PICTURES[0], methods=["raw"])
    assert "register_image_tokens" in found.models["a"].deletion["raw"] and found.models["a"].patches == ""
    assert found.compared == {("a", "a"): 1, ("b", "b"): 1} and found.models["a"].worst_error < 1e-5
    assert "a (unknown patches) and b (unknown patches) are not compared" in " ".join(repr(found).split())
    assert "Layers" in report.page([found])


def test_few_images_are_kept_for_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SHOWN_IMAGES", 1)
    found = compare_models({"vit": (vit(), processor())}, images=list(PICTURES), methods=["raw"])
    assert [one.name for one in found.on_images] == ["image 0"] and len(found.images) == 2 and SHOWN_IMAGES > 1
    assert "Scores on 1 image" in report.page([found])


def test_curves_are_drawn_by_model_with_the_random_orders() -> None:
    figure = compared().plot()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["vim", "vit", "fine"]
    (axes,) = compared().plot(model="vit").axes
    assert axes.get_xlabel() == "patches removed, %" and axes.get_ylabel() == "probability of the predicted class"
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["raw", "logit", RANDOM]
    for name, line in lines.items():
        curve = compared().models["vit"].deletion[name]
        assert line.get_xdata().tolist() == pytest.approx([100 * fraction for fraction in TENTHS])
        assert line.get_ydata().tolist() == curve.mean.tolist()
    other = figure.axes[0]
    assert compared().plot(model="vim", ax=other) is figure
    with pytest.raises(InputError, match="`ax` holds one picture, but 3 models"):
        compared().plot(ax=other)
    with pytest.raises(OptionError, match="no model 'vin' was compared; did you mean 'vi"):
        compared().plot(model="vin")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"texts": "a text"}, OptionError, "on texts or on images, and both came"),
        ({"images": None}, OptionError, "and neither came"),
        ({"images": []}, InputError, "there are no images"),
        ({"images": "nowhere"}, InputError, "nowhere is no folder"),
        ({"images": [PICTURES[0], 3]}, InputError, "image 1 is a int; give PIL images"),
        ({"images": [torch.rand(3, 8, 8)]}, InputError, "image 0 is a Tensor"),
        ({"processor": None}, InputError, r"give a pair \(model, processor\), or also processor="),
        ({"processor": transform, "images": None, "texts": "a"}, OptionError, "processor is for images"),
        ({"models": {"a": (vit(), None)}}, InputError, "images with 'a': the input is an image, with no processor"),
        ({"processor": processor(size={"height": 8, "width": 12})}, InputError, "images with 'a': .* 8 x 12 pixels"),
        ({"models": {"a": (vision("ViTModel", "ViTConfig"), processor())}}, InputError, "no logits of classes"),
        ({"masking": "token"}, OptionError, "mask_token_id"),
    ],
)
def test_bad_input_is_refused_with_the_accepted_values(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    models = {"a": (vit(), None)} if "texts" in given and given.get("images", 0) is None else {"a": vit()}
    call: dict[str, Any] = {"models": models, "images": list(PICTURES), "processor": processor(), "methods": ["raw"]}
    call |= given
    with pytest.raises(error, match=message):
        compare_models(call.pop("models"), call.pop("texts", None), **call)


def test_the_images_of_a_folder_are_read_by_name(tmp_path: Path) -> None:
    for name in ("b.png", "a.jpg"):
        Image.fromarray(PICTURES[0]).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    assert named_images(tmp_path)[0] == ("a.jpg", "b.png")
    found = compare_models({"vit": (vit(), processor())}, images=str(tmp_path), methods=["raw"])
    assert found.images == ("a.jpg", "b.png")
    content = (tmp_path / "b.png").read_bytes()
    for damaged in (b"no image", content[: len(content) // 2]):
        (tmp_path / "b.png").write_bytes(damaged)
        with pytest.raises(InputError, match=r"b\.png cannot be read as an image: "):
            compare_models({"vit": (vit(), processor())}, images=tmp_path, methods=["raw"])
    for path in tmp_path.iterdir():
        path.rename(path.with_suffix(".txt"))
    with pytest.raises(InputError, match="holds no images; files with these endings"):
        named_images(tmp_path)
