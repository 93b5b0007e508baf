"""The models of the vision study: Vision Mamba and ViT for grey images of 32 x 32 pixels."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

import unilinattn as ula
from evidence.digits import CLASSES, GRID, PATCH, SIDE
from unilinattn.models.vim import VisionMamba
from unilinattn.optional import import_extra

CONTROLS = ("random weights", "a random last mixer")
"""Models that show nothing of a digit, or less; the second is trained but for the weights of its last mixer."""

WIDTH = 64
"""Width of the ViT."""

BRIGHTNESS = 0.32
"""Mean brightness of the training images."""

CONTRAST = 0.18
"""Standard deviation of the training images' pixels, rounded."""


def vision_mamba(cls_position: str) -> nn.Module:
    """Return an untrained ViM of width 48 with 4 blocks and 4 states a channel."""
    host = VisionMamba(
        SIDE, PATCH, in_chans=1, num_classes=CLASSES, embed_dim=48, depth=4, d_state=4, cls_position=cls_position
    )
    _spread(host)
    _normalised(host.patch_embed.proj)
    return host


def vision_transformer() -> nn.Module:
    """Return an untrained ViT of width 64 with 4 layers; its positions start from two-dimensional sines."""
    transformers = import_extra("transformers", "hf")
    config = transformers.ViTConfig(
        image_size=SIDE,
        patch_size=PATCH,
        num_channels=1,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        num_labels=CLASSES,
    )
    host: Any = transformers.ViTForImageClassification(config)
    _spread(host)
    embeddings = host.vit.embeddings
    patches = embeddings.patch_embeddings.projection
    nn.init.xavier_uniform_(patches.weight.flatten(1))
    _normalised(patches)
    with torch.no_grad():
        embeddings.position_embeddings[0, 1:] = sines(WIDTH)
    model: nn.Module = host
    return model


def _spread(host: nn.Module) -> None:
    """Draw the weights of linear layers by Xavier; models of this width learn slowly from the classes' own.

    The weights of the step sizes of ViM, which start in a range of their own, stay.
    """
    for name, module in host.named_modules():
        if isinstance(module, nn.Linear) and "dt_proj" not in name:
            nn.init.xavier_uniform_(module.weight)


def _normalised(patches: nn.Conv2d) -> None:
    """Start a projection of patches as that of pixels (x - mean) / deviation, so that the model's own zero is black."""
    assert patches.bias is not None
    with torch.no_grad():
        patches.weight /= CONTRAST
        patches.bias.copy_(-BRIGHTNESS * patches.weight.sum((1, 2, 3)))


def sines(width: int) -> Float[Tensor, "patch width"]:
    """Return positions of patches: sines and cosines of the row in one half, of the column in the other.

    Source: Vaswani et al., "Attention Is All You Need" (2017), 3.5, in each half; the wavelengths end at 20 pi patches
    in place of 20,000 pi, because a grid has 8 on a side.
    """
    rates = torch.exp(-math.log(10) * torch.arange(width // 4) / (width // 4))
    places = torch.meshgrid(*(torch.arange(size) for size in GRID), indexing="ij")
    angles = [place.flatten()[:, None] * rates for place in places]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], -1)


def logits(host: nn.Module, pixels: Float[Tensor, "image 1 side side"]) -> Float[Tensor, "image classes"]:
    """Return the logits of either kind of model."""
    output = host(pixels)
    return output if isinstance(output, Tensor) else output.logits


def patches_of(model: str) -> Bool[Tensor, " token"]:
    """Return True at the tokens of patches, False at the CLS token."""
    count = GRID[0] * GRID[1]
    patches = torch.ones(count + 1, dtype=torch.bool)
    patches[count // 2 if model == "vim" else 0] = False
    return patches


def controls(
    build: Callable[[], nn.Module], load: Callable[[], nn.Module], pixels: Tensor, seed: int
) -> dict[str, nn.Module]:
    """Return, by name, a model with random weights, and the trained one with those of its last mixer.

    `pixels`: images, whose trace names the last mixer.
    """
    torch.manual_seed(seed)
    fresh, host = build().eval(), load()
    last = ula.trace(host, pixels, progress=False).layers[-1].name
    weights = {name: weight for name, weight in fresh.state_dict().items() if name.startswith(f"{last}.")}
    host.load_state_dict({**host.state_dict(), **weights})
    return dict(zip(CONTROLS, (fresh, host), strict=True))
