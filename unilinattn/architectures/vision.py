"""Places of the patches and of CLS in the sequences of vision models."""

from typing import Any

from torch import nn

from unilinattn.registry import ImageTokens, register_image_tokens

_HF = "transformers.models"


@register_image_tokens(
    f"{_HF}.beit.modeling_beit.BeitEmbeddings",
    f"{_HF}.clip.modeling_clip.CLIPVisionEmbeddings",
    f"{_HF}.dinov2.modeling_dinov2.Dinov2Embeddings",
    f"{_HF}.vit.modeling_vit.ViTEmbeddings",
    f"{_HF}.vit_msn.modeling_vit_msn.ViTMSNEmbeddings",
)
def cls_first(module: Any, height: int, width: int) -> ImageTokens | None:
    """CLS, then the patches row by row."""
    return _after(_projection(module), height, width, 1)


@register_image_tokens(f"{_HF}.deit.modeling_deit.DeiTEmbeddings")
def distilled(module: Any, height: int, width: int) -> ImageTokens | None:
    """CLS, the distillation token, then the patches."""
    return _after(_projection(module), height, width, 2)


@register_image_tokens(f"{_HF}.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersEmbeddings")
def registers(module: Any, height: int, width: int) -> ImageTokens | None:
    """CLS, the registers, then the patches."""
    return _after(_projection(module), height, width, 1 + module.config.num_register_tokens)


@register_image_tokens(f"{_HF}.siglip.modeling_siglip.SiglipVisionEmbeddings")
def only_patches(module: Any, height: int, width: int) -> ImageTokens | None:
    """The patches row by row, without CLS."""
    return _after(_projection(module), height, width, 0)


@register_image_tokens("timm.models.vision_transformer.VisionTransformer")
def timm_vit(module: Any, height: int, width: int) -> ImageTokens | None:
    """CLS if the model has one, the distillation token or the registers, then the patches."""
    embedding = module.patch_embed
    if getattr(embedding, "dynamic_img_pad", False):
        return None
    return _after(getattr(embedding, "proj", None), height, width, module.num_prefix_tokens, module.cls_token is None)


@register_image_tokens("unilinattn.models.vim.VisionMamba")
def vim(module: Any, height: int, width: int) -> ImageTokens | None:
    """The patches row by row, with CLS where the model's `cls_position` puts it."""
    classes, (rows, columns) = module.cls_positions, module.grid_size
    patches = [position for position in range(rows * columns + len(classes)) if position not in classes]
    return ImageTokens((rows, columns), tuple(patches), tuple(classes))


def _projection(module: Any) -> nn.Module | None:
    """Return the convolution that makes patches of pixels."""
    patches = getattr(module, "patch_embeddings", None)
    return getattr(module, "patch_embedding", None) if patches is None else patches.projection


def _after(projection: Any, height: int, width: int, special: int, no_cls: bool = False) -> ImageTokens | None:
    """Return the places of patches behind `special` tokens, the first of which is CLS.

    None if the patches are not made by one convolution without padding.
    """
    if not isinstance(projection, nn.Conv2d) or projection.padding not in ((0, 0), "valid"):
        return None
    sides = zip((height, width), projection.kernel_size, projection.stride, strict=True)
    rows, columns = ((side - kernel) // stride + 1 for side, kernel, stride in sides)
    patches = tuple(range(special, special + rows * columns))
    return ImageTokens((rows, columns), patches, () if no_cls or not special else (0,))
