"""Images as inputs: their pixels, and the places of patches and of CLS in real vision models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

import unilinattn as ula
from unilinattn.errors import InputError, OptionError
from unilinattn.models.vim import VisionMamba
from unilinattn.registry import ImageTokens, overridden, register_image_tokens

SMALL: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, patch_size=4, image_size=8
)


def vision(name: str, config: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**{**SMALL, **settings})).eval()


def vit(**settings: Any) -> nn.Module:
    return vision("ViTForImageClassification", "ViTConfig", **settings)


def vim(cls_position: str) -> nn.Module:
    return VisionMamba((8, 12), 4, num_classes=3, embed_dim=4, depth=1, d_state=2, cls_position=cls_position).eval()


def picture(height: int = 10, width: int = 14) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def processor(**settings: Any) -> Any:
    # Its import takes seconds, and every process that collects the tests imports this file.
    kind = transformers.models.vit.image_processing_pil_vit.ViTImageProcessorPil
    return kind(**{"size": {"height": 8, "width": 8}, **settings})


def transform(image: Any) -> Tensor:
    """A callable from a PIL image to a tensor, as timm's transforms are."""
    pixels = np.array(image.resize((8, 8), Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1


HOSTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "vit": (lambda: vit(image_size=[8, 12]), (8, 12)),
    "deit": (lambda: vision("DeiTForImageClassification", "DeiTConfig", image_size=[8, 12]), (8, 12)),
    "dinov2": (lambda: vision("Dinov2Model", "Dinov2Config"), (8, 8)),
    "registers": (lambda: vision("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"), (8, 8)),
    "beit": (lambda: vision("BeitModel", "BeitConfig"), (8, 8)),
    "clip": (lambda: vision("CLIPVisionModel", "CLIPVisionConfig"), (8, 8)),
    "siglip": (lambda: vision("SiglipVisionModel", "SiglipVisionConfig", vision_use_head=False), (8, 8)),
    "vit_msn": (lambda: vision("ViTMSNModel", "ViTMSNConfig"), (8, 8)),
    "vim": (lambda: vim("middle"), (8, 12)),
    "vim, CLS at both ends": (lambda: vim("double"), (8, 12)),
}


@pytest.mark.parametrize("host", HOSTS)
def test_the_pixels_of_a_patch_change_its_token(host: str) -> None:
    if host == "beit" and transformers.__version__ == "5.6.2":
        pytest.skip("transformers 5.6.2 has BEiT outside of its attention interface")
    build, (height, width) = HOSTS[host]
    model, pixels = build(), torch.rand(1, 3, height, width)
    trace = ula.trace(model, pixels)
    known = trace.image_tokens
    assert known is not None and known.grid == (height // 4, width // 4)
    before = trace.layers[0].input
    changed = []
    for row in range(height // 4):
        for column in range(width // 4):
            other = pixels.clone()
            other[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
            moved = (ula.trace(model, other).layers[0].input - before).abs().amax((0, 2)) > 1e-5
            changed += moved.nonzero().flatten().tolist()
    assert list(known.patches) == changed
    assert not set(known.cls) & set(changed) and (known.cls or host == "siglip")


@pytest.mark.parametrize("host", ["vit", "deit", "vim"])
def test_cls_is_the_token_that_class_logits_read(host: str) -> None:
    build, (height, width) = HOSTS[host]
    result = ula.explain(build(), torch.rand(1, 3, height, width), method="rollout", target="cls")
    assert result.cls is not None and list(result.cls) == result.options["target"]


@pytest.mark.long
@pytest.mark.parametrize("way", [processor(), transform], ids=["image processor", "transform"])
def test_images_are_explained_like_their_pixels(way: Any) -> None:
    model, array = vit(), picture()
    image = Image.fromarray(array)
    pixels = transform(image)[None] if way is transform else way(images=image, return_tensors="pt")["pixel_values"]
    expected = ula.explain(model, pixels)
    for given in (image, array, [image], image.convert("RGBA")):
        result = ula.explain(model, given, processor=way)
        assert torch.equal(result.scores, expected.scores)
        assert (result.grid, result.patches, result.cls) == ((2, 2), (1, 2, 3, 4), (0,))
    both = ula.explain(model, [image, picture(6, 20)], processor=way)
    assert torch.allclose(both.scores[0], expected.scores[0], atol=1e-6) and len(both.scores) == 2


def test_a_processor_serves_models_with_another_name_for_pixels() -> None:
    model, image = VisionMamba(8, 4, num_classes=3, embed_dim=4, depth=1, d_state=2).eval(), picture()
    pixels = processor()(images=Image.fromarray(image), return_tensors="pt")["pixel_values"]
    assert torch.equal(ula.explain(model, image, processor=processor()).scores, ula.explain(model, pixels).scores)


def test_images_have_the_dtype_of_the_model() -> None:
    model = vit()
    half = ula.trace(vit().bfloat16(), picture(), processor=processor())
    assert half.output.logits.dtype == torch.bfloat16
    traced = ula.trace(model, picture(), processor=processor())
    compared = ula.compare({"vit": traced}, methods=["logit"])["vit"]["logit"]
    assert torch.equal(compared.scores, ula.explain(traced, method="logit").scores)


def test_labels_of_images_are_kept_in_files_and_pictures(tmp_path: Path) -> None:
    result = ula.explain(vim("middle"), torch.rand(1, 3, 8, 12))
    loaded = ula.Attribution.load(result.save(tmp_path / "result.safetensors"))
    assert (loaded.grid, loaded.patches, loaded.cls) == ((2, 3), (0, 1, 2, 4, 5, 6), (3,))
    shown = ula.explain(vim("middle"), torch.rand(1, 3, 8, 12), method="rollout", target="cls").plot()
    assert shown.axes[0].images[0].get_array().shape == (2, 3)


def test_unknown_patches_stay_unknown() -> None:
    model, pixels = vision("IJepaModel", "IJepaConfig"), torch.rand(1, 3, 8, 8)
    name = "transformers.models.ijepa.modeling_ijepa.IJepa"
    right, more = ImageTokens((2, 2), (0, 1, 2, 3), ()), ImageTokens((2, 2), (1, 2, 3, 4), (0,))
    for places, known in (({}, None), ({"Embeddings": right}, right), ({"Embeddings": more}, None)):
        with overridden():
            for host, tokens in places.items():
                register_image_tokens(name + host)(lambda *_, tokens=tokens: tokens)
            assert ula.trace(model, pixels).image_tokens == known
    with overridden():
        register_image_tokens(f"{name}Embeddings", f"{name}Model")(lambda *_: right)
        # Two modules say where the tokens are.
        assert ula.trace(model, pixels).image_tokens is None
        with pytest.raises(OptionError, match="have image tokens already"):
            register_image_tokens(f"{name}Model")(lambda *_: right)
    result = ula.explain(model, pixels, method="latim", grid=(2, 2))
    assert (result.grid, result.patches, result.cls) == ((2, 2), None, None)
    with pytest.raises(InputError, match=r"grid \(5, 5\) are more than the 5 keys"):
        ula.explain(vit(), pixels, grid=(5, 5))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"patches": (0, 1)}, "2 patches do not fill the grid None"),
        ({"grid": (1, 3), "patches": (0, 1)}, r"2 patches do not fill the grid \(1, 3\)"),
        ({"grid": (1, 2), "patches": (0, 4)}, "different ones of the 4 keys"),
        ({"grid": (1, 2), "patches": (0, 1), "cls": (1,)}, "different ones of the 4 keys"),
    ],
)
def test_places_that_do_not_fit_the_scores_are_refused(labels: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ula.Attribution(scores=torch.zeros(1, 4), dims=("batch", "key"), method="raw", **labels)


BAD: list[tuple[Any, Any, str]] = [
    (picture(), None, "the input is an image, with no processor; pass processor=AutoImageProcessor"),
    (picture(), "vit", "the input is an image, with str as processor"),
    (picture().astype(np.float32), processor(), r"the image is a float32 ndarray of shape \(10, 14, 3\); give a PIL"),
    (picture()[..., 0], processor(), r"the image is a uint8 ndarray of shape \(10, 14\); give"),
    (picture()[:0], processor(), r"the image has shape \(0, 14, 3\), no pixels"),
    ([picture(), "cat.png"], processor(), "the image is a str; give"),
    ([], processor(), "the inputs are an empty list"),
    (torch.rand(1, 3, 8, 8), processor(), "a torch.float32 Tensor .* processed already need no processor"),
    ([picture(), picture(12)], processor(do_resize=False), "3 x 10 x 14 for image 0 and 3 x 12 x 14 for image 1"),
    (picture(12, 16), processor(do_resize=False), "12 x 16 pixels, and ViTForImageClassification takes 8 x 8"),
    (picture(), lambda image: image, "the processor function returned Image; a transform returns a floating-point"),
    (picture(), lambda image: torch.zeros(8, 8), r"returned a torch.float32 tensor of shape \(8, 8\)"),
]


@pytest.mark.parametrize(("inputs", "way", "message"), BAD)
def test_invalid_images_are_refused(inputs: Any, way: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ula.trace(vit(), inputs, processor=way)
