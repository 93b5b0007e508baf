"""A small ViT that tells the colour of a square on a grey picture, trained in a few seconds."""

from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 60, 220)}
SIZE, SQUARE = 32, 8


def picture(colour: str, row: int, column: int, seed: int = 0) -> Image.Image:
    """Return a noisy grey picture with a square of a colour in one cell of its 4 x 4 cells."""
    pixels = np.random.default_rng(seed).integers(90, 166, (SIZE, SIZE, 1)).repeat(3, axis=2)
    pixels[SQUARE * row : SQUARE * (row + 1), SQUARE * column : SQUARE * (column + 1)] = COLOURS[colour]
    return Image.fromarray(pixels.astype(np.uint8))


@cache
def squares(steps: int = 80) -> tuple[ViTForImageClassification, Any]:
    """Train the model, and return it with its image processor."""
    torch.manual_seed(0)
    processor = ViTImageProcessor(size={"height": SIZE, "width": SIZE})
    config = ViTConfig(
        image_size=SIZE,
        patch_size=SQUARE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.1,
        id2label=dict(enumerate(COLOURS)),
    )
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = np.random.default_rng(1)
    for step in range(steps):
        labels = random.integers(0, len(COLOURS), 16)
        names = [list(COLOURS)[label] for label in labels]
        pictures = [picture(name, *random.integers(0, 4, 2), seed=step) for name in names]
        optimizer.zero_grad()
        model(**processor(images=pictures, return_tensors="pt"), labels=torch.tensor(labels)).loss.backward()
        optimizer.step()
    return model.eval(), processor
