"""ViM's published sizes as timm models; timm is imported only when a function of this module is called."""

from typing import Any

from unilinattn.models.vim import VisionMamba

NAMES = (
    "vim_tiny_patch16_224",
    "vim_small_patch16_224",
    "vim_base_patch16_224",
    "vim_tiny_patch16_stride8_224",
    "vim_small_patch16_stride8_224",
)
"""The models that `register_with_timm` registers."""

# timm reads a module's data configurations from this name; these are those of the published training.
default_cfgs: dict[str, dict[str, Any]] = {
    name: {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    for name in NAMES
}


def register_with_timm() -> None:
    """Make `timm.create_model("vim_tiny_patch16_224")` and the other `NAMES` build a `VisionMamba`.

    Options of `VisionMamba` pass through, including `num_classes` and `in_chans`. Load published weights from a local
    file into the model's state dict; no download is registered. A second call changes nothing.

    Raises `ImportError` if timm is missing.
    """
    from timm.models import is_model, register_model

    for name in NAMES:
        if not is_model(name):
            register_model(globals()[name])


def vim_tiny_patch16_224(pretrained: bool = False, **options: Any) -> VisionMamba:
    """Build ViM tiny: 192 channels, 14 by 14 patches."""
    return _build("vim_tiny_patch16_224", pretrained, {"embed_dim": 192, **options})


def vim_small_patch16_224(pretrained: bool = False, **options: Any) -> VisionMamba:
    """Build ViM small: 384 channels, 14 by 14 patches."""
    return _build("vim_small_patch16_224", pretrained, {"embed_dim": 384, **options})


def vim_base_patch16_224(pretrained: bool = False, **options: Any) -> VisionMamba:
    """Build ViM base: 768 channels, 14 by 14 patches."""
    return _build("vim_base_patch16_224", pretrained, {"embed_dim": 768, **options})


def vim_tiny_patch16_stride8_224(pretrained: bool = False, **options: Any) -> VisionMamba:
    """Build ViM tiny with stride 8: 192 channels, 27 by 27 patches that overlap by half."""
    return _build("vim_tiny_patch16_stride8_224", pretrained, {"embed_dim": 192, "stride": 8, **options})


def vim_small_patch16_stride8_224(pretrained: bool = False, **options: Any) -> VisionMamba:
    """Build ViM small with stride 8: 384 channels, 27 by 27 patches that overlap by half."""
    return _build("vim_small_patch16_stride8_224", pretrained, {"embed_dim": 384, "stride": 8, **options})


def _build(name: str, pretrained: bool, options: dict[str, Any]) -> VisionMamba:
    from timm.models import build_model_with_cfg

    return build_model_with_cfg(VisionMamba, name, pretrained, **options)
