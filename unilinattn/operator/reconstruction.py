"""The relative error of a layer's output."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def worst_error(
    output: Float[Tensor, "batch query out"],
    reference: Float[Tensor, "batch query out"],
    mask: Bool[Tensor, "batch query"] | None = None,
) -> float:
    """Return ||output - reference|| / ||reference|| of the worst sequence, over real positions (`mask` is true)."""
    # The norm of a float16 output can overflow.
    wide = torch.promote_types(reference.dtype, torch.float32)
    reference = reference.to(wide)
    difference = output.to(wide) - reference
    if mask is not None:
        difference, reference = difference * mask[..., None], reference * mask[..., None]
    error, scale = difference.flatten(1).norm(dim=1), reference.flatten(1).norm(dim=1)
    return float((error / scale.clamp_min(torch.finfo(wide).tiny)).max())
