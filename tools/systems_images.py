"""Models of images of other packages, for `tools.systems`."""

from collections.abc import Callable
from typing import Any

from tools.systems_models import TOKENS, VOCABULARY, WIDTH, Built, ids, image, system


@system("ViT of torchvision", "torchvision")
def _torchvision_vit() -> Built:
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 4, 2, 4, WIDTH, 32, num_classes=5), image(16)


@system("Swin of torchvision", "torchvision")
def _swin() -> Built:
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], WIDTH, [2, 2], [2, 4], [4, 4], num_classes=5), image(16)


@system("CLIP", "open-clip-torch")
def _clip() -> Built:
    from open_clip.model import CLIP

    vision = dict(image_size=16, layers=2, width=64, patch_size=8)
    text = dict(context_length=TOKENS, vocab_size=VOCABULARY, width=WIDTH, heads=4, layers=2)
    return CLIP(WIDTH, vision, text).eval(), {"image": image(16), "text": ids()}


@system("image tower of CLIP", "open-clip-torch")
def _clip_image() -> Built:
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(16, 8, WIDTH, 2, 4, 2.0, output_dim=8), image(16)


@system("CoCa's text tower", "open-clip-torch")
def _clip_text() -> Built:
    from open_clip.transformer import TextTransformer

    return TextTransformer(TOKENS, VOCABULARY, WIDTH, 4, 2, output_dim=8), ids()


_VIT = dict(image_size=16, patch_size=4, num_classes=5, dim=WIDTH, depth=2, heads=2, mlp_dim=32)
_HEAD = dict(dim_head=8)

_VIT_PYTORCH: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "ViT": ("vit", "ViT", {**_VIT, **_HEAD}, 16),
    "SimpleViT": ("simple_vit", "SimpleViT", {**_VIT, **_HEAD}, 16),
    "DeepViT": ("deepvit", "DeepViT", {**_VIT, **_HEAD}, 16),
    "CaiT": ("cait", "CaiT", {**_VIT, **_HEAD, "cls_depth": 1}, 16),
    "parallel ViT": ("parallel_vit", "ViT", {**_VIT, **_HEAD}, 16),
    "ViT for small datasets": ("vit_for_small_dataset", "ViT", {**_VIT, **_HEAD}, 16),
    "ViT with register tokens": ("simple_vit_with_register_tokens", "SimpleViT", {**_VIT, **_HEAD}, 16),
    "ViT with value residuals": ("simple_vit_with_value_residual", "SimpleViT", {**_VIT, **_HEAD}, 16),
    "ViT with patch merger": ("vit_with_patch_merger", "ViT", {**_VIT, **_HEAD, "patch_merge_num_tokens": 4}, 16),
    "XCiT": ("xcit", "XCiT", {**_VIT, **_HEAD, "cls_depth": 1}, 16),
    "RvT": ("rvt", "RvT", {**_VIT, **_HEAD}, 16),
    "PiT": ("pit", "PiT", {**_VIT, **_HEAD, "depth": (1, 1)}, 16),
    "T2T-ViT": ("t2t", "T2TViT", dict(image_size=32, num_classes=5, dim=WIDTH, depth=2, heads=2, mlp_dim=32), 32),
    "CrossViT": (
        "cross_vit",
        "CrossViT",
        dict(image_size=16, num_classes=5, sm_dim=WIDTH, lg_dim=24, sm_patch_size=4, lg_patch_size=8, depth=1)
        | dict(lg_enc_depth=1, cross_attn_depth=1, sm_enc_mlp_dim=32, lg_enc_mlp_dim=32),
        16,
    ),
    "LeViT": (
        "levit",
        "LeViT",
        dict(image_size=64, num_classes=5, dim=(16, 24), depth=1, heads=2, mlp_mult=2, stages=2),
        64,
    ),
    "CvT": (
        "cvt",
        "CvT",
        dict(num_classes=5, s1_emb_dim=16, s2_emb_dim=16, s3_emb_dim=24, s1_heads=1, s2_heads=2, s3_heads=3)
        | dict(s2_depth=1, s3_depth=1),
        32,
    ),
    "Twins-SVT": (
        "twins_svt",
        "TwinsSVT",
        dict(num_classes=5)
        | {f"s{i}_{name}": n for i in range(1, 5) for name, n in dict(depth=1, local_patch_size=2, global_k=2).items()}
        | dict(s1_emb_dim=8, s2_emb_dim=8, s3_emb_dim=16, s4_emb_dim=16, s1_patch_size=2),
        32,
    ),
    "MaxViT": (
        "max_vit",
        "MaxViT",
        dict(num_classes=5, dim=16, depth=(1, 1), dim_head=8, window_size=2, dim_conv_stem=16),
        32,
    ),
    "NesT": (
        "nest",
        "NesT",
        dict(image_size=16, patch_size=2, num_classes=5, dim=8, heads=2, num_hierarchies=2, block_repeats=1),
        16,
    ),
    "MobileViT": (
        "mobile_vit",
        "MobileViT",
        dict(image_size=(64, 64), dims=[16, 16, 16], channels=[8] * 11, num_classes=5, depths=(1, 1, 1)),
        64,
    ),
    "CCT": (
        "cct",
        "CCT",
        dict(img_size=32, embedding_dim=16, num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=5)
        | dict(positional_embedding="learnable"),
        32,
    ),
    "CrossFormer": (
        "crossformer",
        "CrossFormer",
        dict(dim=(32, 32, 32, 32), depth=(1, 1, 1, 1), global_window_size=(4, 2, 1, 1), local_window_size=2)
        | dict(num_classes=5),
        64,
    ),
    "RegionViT": (
        "regionvit",
        "RegionViT",
        dict(dim=(32, 32, 32, 32), depth=(1, 1, 1, 1), window_size=2, num_classes=5),
        64,
    ),
}  # fmt: skip


def _vit_pytorch(file: str, name: str, settings: dict[str, Any], size: int) -> Callable[[], Built]:
    def build() -> Built:
        from importlib import import_module

        model = getattr(import_module(f"vit_pytorch.{file}"), name)(**settings)
        return model, image(size)

    return build


for _name, _arguments in _VIT_PYTORCH.items():
    system(_name, "vit-pytorch")(_vit_pytorch(*_arguments))
