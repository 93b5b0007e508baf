"""The adapters on timm's models: attention of ViT and DeiT with all options, and ViM."""

from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from unilinattn import explain, trace
from unilinattn.errors import InputError
from unilinattn.testing import Host, check_architecture, check_operator, randomize
from unilinattn.testing.hosts.timm import HOSTS
from unilinattn.tracing.layer import Layer

timm = pytest.importorskip("timm", reason="needs timm", exc_type=ImportError)


class Block(nn.Module):
    """A residual connection around timm's attention, with the same arguments."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attn = timm.layers.Attention(8, num_heads=2, norm_layer=timm.layers.LayerNorm, **settings)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return x + self.attn(x, attn_mask=attn_mask, is_causal=is_causal)


def block(fused: bool = True, **settings: Any) -> nn.Module:
    model = randomize(Block(**settings).eval()).double()
    model.attn.fused_attn = fused
    return model


def core_output(layer: Layer) -> Tensor:
    """The values after the only core of a layer with one chain of stages, as a leaf that requires a gradient."""
    x, (chain,) = layer.input, layer.operator.chains.values()
    for stage in chain:
        x = stage.apply(x)
        if stage.role == "core":
            break
    return x.detach().requires_grad_()


def tokens(length: int = 7) -> Tensor:
    return torch.randn(2, length, 8, dtype=torch.float64)


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_every_law_holds(host: Host) -> None:
    verdict = check_architecture(host.model(), host.inputs())
    assert len(verdict.layers) == host.layers
    assert {layer.architecture for layer in verdict.layers} == {host.architecture}
    for layer in verdict.layers:
        assert layer.errors.keys() == {"float32", "float64", "promoted"}
        assert layer.errors["promoted"] <= 1e-10


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"gated": True, "qkv_bias": True},
        {"scale_norm": True, "gated": True},
        {"attn_head_dim": 3, "dim_out": 5, "proj_bias": False},
        {"qk_norm": True, "qkv_bias": True},
    ],
    ids=str,
)
def test_every_option_of_the_module_is_exact(settings: dict[str, Any], fused: bool) -> None:
    module = randomize(timm.layers.Attention(8, num_heads=2, norm_layer=timm.layers.LayerNorm, **settings).eval())
    module.fused_attn = fused
    check_operator(trace(nn.Sequential(module.double()), tokens()).layers[0].operator)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mask", ["boolean", "a sequence", "a head", "added", "causal"])
def test_masks_are_applied_as_in_the_host(mask: str, fused: bool) -> None:
    x = tokens()
    window = (torch.arange(7)[:, None] - torch.arange(7)).abs() < 3
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    options = {
        "boolean": {"attn_mask": window},
        "a sequence": {"attn_mask": real[:, None, None].expand(-1, -1, 7, -1)},
        "a head": {"attn_mask": torch.stack([window, window | window.T.tril()])[None]},
        "added": {"attn_mask": torch.randn(2, 1, 7, 7, dtype=torch.float64)},
        "causal": {"is_causal": True},
    }[mask]
    op = trace(block(fused), {"x": x, **options}).layers[0].operator
    check_operator(op)
    core = op.matrix("core", heads=None)
    torch.testing.assert_close(core.sum(-1), torch.ones_like(core.sum(-1)))
    if mask == "causal":
        assert torch.equal(core, core.tril())
    elif mask != "added":
        assert bool((core[~options["attn_mask"].expand_as(core)] == 0).all())


def test_plain_attention_has_one_matrix_in_all_scopes_and_a_gate_only_in_unified() -> None:
    op = trace(block(), tokens()).layers[0].operator
    for scope in ("mixer", "unified"):
        torch.testing.assert_close(op.matrix(scope), op.matrix("core"))
    gated = trace(block(gated=True), tokens()).layers[0].operator
    torch.testing.assert_close(gated.matrix("mixer"), gated.matrix("core"))
    assert not torch.allclose(gated.matrix("unified"), gated.matrix("core"))


def test_any_function_may_take_the_place_of_the_norm() -> None:
    model = block(scale_norm=True)
    model.attn.norm = nn.Tanh()
    (layer,) = trace(model, tokens()).layers
    assert layer.reconstruction_error() < 1e-5


SMALL = dict(embed_dim=24, depth=2, num_heads=2)

RECORDED = {
    "windows": ("swin_tiny_patch4_window7_224", dict(img_size=28, embed_dim=8, depths=(2, 1), num_heads=(2, 2))),
    "an mlp over the tokens": ("mixer_s32_224", dict(img_size=64)),
    "talking heads": ("cait_xxs24_224", dict(img_size=32, **SMALL)),
    "relative positions": ("beit_base_patch16_224", dict(img_size=32, **SMALL)),
}
"""timm's name and settings of models whose mixers have no adapter."""


@pytest.mark.parametrize("name", RECORDED)
def test_mixers_without_an_adapter_are_recorded(name: str) -> None:
    import timm

    entry, settings = RECORDED[name]
    model = timm.create_model(entry, **settings).eval()
    image = torch.randn(1, 3, settings["img_size"], settings["img_size"])
    layers = trace(model, image).layers
    assert {layer.architecture for layer in layers} <= {"recorded", "timm-attention"}
    assert sum(layer.architecture == "recorded" for layer in layers) >= 2
    assert all(layer.reconstruction_error() < 1e-5 for layer in layers)


MORE = {
    "a class token beside the patches": ("pit_ti_224", dict(img_size=64)),
    "states of a scan": ("efficientvim_m1", {}),
    "an enlarged attention": ("lowformer_b0", {}),
}
"""timm's name and settings of models whose layers return more vectors than their output, or enlarge an image."""


@pytest.mark.parametrize("name", MORE)
def test_the_shares_of_models_whose_layers_return_more_or_enlarge_images_add_up(name: str) -> None:
    import timm

    entry, settings = MORE[name]
    model = randomize(timm.create_model(entry, num_classes=5, **settings).eval())
    scores = explain(model, torch.randn(1, 3, 64, 64), method="logit", target=-1)
    assert bool(scores.scores.isfinite().all()) and scores.completeness_gap < 1e-4


def test_vision_models_are_explained_from_their_class_logits() -> None:
    host = HOSTS[0]
    for method in ("raw", "rollout", "attribution", "latim", "alti"):
        scores = explain(host.model(), host.inputs(), method=method, target=0).scores
        assert scores.shape[-1] == host.length


def test_gradients_at_the_core_pass_norm_and_gate() -> None:
    (layer,) = trace(block(gated=True, qk_norm=True, scale_norm=True), tokens()).layers
    module, grad, mixed = layer.module, torch.randn_like(layer.output), core_output(layer)
    gate = torch.sigmoid(module.gate(layer.input))
    (expected,) = torch.autograd.grad(module.proj(module.norm(mixed) * gate), mixed, grad)
    (actual,) = layer.core_pullback()(grad)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("vit_tiny_patch16_224", {}, ((2, 3), (1, 2, 3, 4, 5, 6), (0,))),
        ("vit_tiny_patch16_224", {"reg_tokens": 2}, ((2, 3), (3, 4, 5, 6, 7, 8), (0,))),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}, ((2, 3), (0, 1, 2, 3, 4, 5), ())),
        ("deit_tiny_distilled_patch16_224", {}, ((2, 3), (2, 3, 4, 5, 6, 7), (0,))),
    ],
)
def test_patches_and_cls_of_images(name: str, settings: dict[str, Any], expected: Any) -> None:
    sizes = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 16, "num_heads": 4, "depth": 1, "num_classes": 3}
    model, pixels = timm.create_model(name, **{**sizes, **settings}).eval(), torch.rand(1, 3, 8, 12)
    found = trace(model, pixels)
    known = found.image_tokens
    assert known is not None and (known.grid, known.patches, known.cls) == expected
    for at, place in enumerate(known.patches):
        row, column = divmod(at, 3)
        other = pixels.clone()
        other[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
        moved = (trace(model, other).layers[0].input - found.layers[0].input).abs().amax((0, 2)) > 1e-5
        assert moved.nonzero().flatten().tolist() == [place]


def test_pictures_by_a_transform() -> None:
    model = timm.create_model("vit_tiny_patch16_224", embed_dim=12, num_heads=2, depth=1, num_classes=3).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    image = Image.new("RGB", (300, 250), "red")
    result = explain(model, image, processor=transform)
    assert torch.equal(result.scores, explain(model, transform(image)[None]).scores)
    assert result.grid == (14, 14) and result.cls == (0,)
    with pytest.raises(InputError, match="the image has 10 x 10 pixels, and VisionTransformer takes 224 x 224"):
        trace(model, torch.rand(1, 3, 10, 10))
