"""Which arguments of a layer are functions of a padding mask of the model's call."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor


def masks_in(arguments: Mapping[str, Any]) -> list[Bool[Tensor, "batch token"]]:
    """Return the padding masks among a model's arguments: those with a number for each token that are named so."""
    named = (value for name, value in arguments.items() if "mask" in name and isinstance(value, Tensor))
    return [value != 0 for value in named if value.ndim == 2]


def functions_of(
    masks: Sequence[Bool[Tensor, "batch token"]], arguments: Mapping[str, Any], shape: Sequence[int]
) -> Iterator[str]:
    """Yield the names of arguments that have one number at all real tokens of a mask and one at the padded ones.

    Such as a cast, an inverse, or a mask that is added to scores, with any axes of one element. Of a mask without
    padding, which a model may make itself of `shape` (batch, token), the number is 0 or 1.
    """
    every = [*masks, torch.ones(tuple(shape), dtype=torch.bool, device="cpu")]
    for name, value in arguments.items():
        if isinstance(value, Tensor) and any(_is_function(value, mask) for mask in every):
            yield name


def _is_function(value: Shaped[Tensor, "..."], mask: Bool[Tensor, "batch token"]) -> bool:
    if value.numel() != mask.numel() or value.squeeze().shape != mask.squeeze().shape or value.is_complex():
        return False
    numbers, real = value.detach().flatten(), mask.flatten().to(value.device)
    groups = [group for group in (numbers[real], numbers[~real]) if group.numel()]
    is_number = all(bool((group == group[0]).all()) for group in groups)
    return is_number and (len(groups) == 2 or float(numbers[0]) in (0.0, 1.0))
