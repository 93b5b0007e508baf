"""Denoisers of diffusers: they read an image of noise, its time, and often the vectors of a text."""

import torch
from torch import Tensor

from tools.systems_models import Built, system

NOISE, TEXT = (1, 4, 8, 8), (1, 9, 16)
"""The shapes of an image of noise, and of the vectors of a text."""

ATTENTION = dict(num_attention_heads=2, attention_head_dim=8)

UNET = dict(
    sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4
)


def _conditioned(width: int = 16) -> dict[str, Tensor]:
    return {"timestep": torch.tensor([500]), "encoder_hidden_states": torch.randn(1, 9, width)}


@system("DiT", "diffusers")
def dit() -> Built:
    """Attention between an image's patches, modulated by a class and a time."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        **ATTENTION, in_channels=4, out_channels=4, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=1000
    )
    labels = {"timestep": torch.tensor([500]), "class_labels": torch.tensor([3])}
    return model, {"hidden_states": torch.randn(NOISE), **labels}


@system("PixArt", "diffusers")
def pixart() -> Built:
    """Attention between patches, and from patches to a text."""
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        **ATTENTION,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=16,
        caption_channels=16,
        num_embeds_ada_norm=1000,
        use_additional_conditions=False,
    )
    return model, {"hidden_states": torch.randn(NOISE), **_conditioned()}


@system("Stable Diffusion 3", "diffusers")
def stable_diffusion_3() -> Built:
    """Attention between the patches and the words of both streams."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        **ATTENTION,
        sample_size=8,
        in_channels=4,
        num_layers=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    )
    return model, {"hidden_states": torch.randn(NOISE), "pooled_projections": torch.randn(1, 16), **_conditioned()}


@system("FLUX.1", "diffusers")
def flux() -> Built:
    """Blocks of two streams, and then of one, modulated by a vector of the time and the text."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    packed = {"hidden_states": torch.randn(1, 16, 4), "img_ids": places, "txt_ids": torch.zeros(9, 3)}
    vectors = {"pooled_projections": torch.randn(1, 16), "encoder_hidden_states": torch.randn(TEXT)}
    return model, {**packed, **vectors, "timestep": torch.tensor([0.5])}


@system("U-Net", "diffusers")
def unet() -> Built:
    """Convolutions to which a time is added, and attention between pixels and to a text: Stable Diffusion 1 and 2."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        **UNET,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    )
    return model, {"sample": torch.randn(NOISE), **_conditioned()}


@system("U-Net without a text", "diffusers")
def unconditional_unet() -> Built:
    """Convolutions to which a time is added, and attention between pixels: DDPM."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    return model, {"sample": torch.randn(NOISE), "timestep": torch.tensor([500])}
