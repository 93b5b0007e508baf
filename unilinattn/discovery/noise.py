"""Perturbations of tensors at some tokens: noise, and values exchanged between tokens."""

import torch
from jaxtyping import Bool
from torch import Tensor, nn


def noisy(t: Tensor, perturbed: Bool[Tensor, " token"] | Bool[Tensor, "batch token"]) -> Tensor:
    """Add noise of the tensor's root mean square to the perturbed tokens, which are along its second axis.

    Channels of whole numbers are left, unless all are: a host may look them up, such as the row and column of a patch.
    """
    wide = t.detach().to(torch.promote_types(t.dtype, torch.float32))
    size = wide.square().mean().sqrt()
    size = torch.where((size > 0) & size.isfinite(), size, torch.ones_like(size))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(t.shape[1:], generator=generator, device="cpu").to(wide)
    # (token,) becomes (token, 1) for a (batch, token, channel), and (batch, token) becomes (batch, token, 1).
    factor = perturbed.to(t.device).view(*perturbed.shape, *[1] * (t.ndim - 2))
    whole = (wide == wide.round()).flatten(0, -2).all(0)
    return (wide + size * noise * factor * (~whole | whole.all())).to(t.dtype)


def noisy_beside(t: Tensor, perturbed: Bool[Tensor, " token"] | Bool[Tensor, "batch token"]) -> Tensor:
    """Add noise to the perturbed tokens of what a layer returns beside its output, such as keys of several heads.

    A vector of each sequence, such as a state, comes from all of them. Weights of attention, which have two axes of as
    many tokens, and tensors without one, such as other feature maps, are left.
    """
    axes = [axis for axis, size in enumerate(t.shape) if axis and size == perturbed.shape[-1]]
    if t.ndim > 3 and axes == [1]:
        # These are heads, or channels of a feature map.
        return t
    if not t.is_floating_point() or isinstance(t, nn.Parameter) or len(axes) > 1 or (not axes and t.ndim != 2):
        return t
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(t.shape[-1], generator=generator, device="cpu").to(t).expand(t.shape)
    if not axes:
        return t + noise
    first = len(t) if perturbed.ndim == 2 and len(perturbed) == len(t) else 1
    shape = [first, *(size if axis in axes else 1 for axis, size in enumerate(t.shape) if axis)]
    return t + noise * perturbed.view(-1, perturbed.shape[-1])[:first].to(t.device).view(shape)


def exchanged(x: Tensor, tokens: Bool[Tensor, "batch token"]) -> Tensor:
    """Give some tokens the values of others among them, some twice: of a b c d the 1st, 2nd and 4th become d d b.

    The values stay those of the input, so that each is valid. Those of all tokens together change too: a mean of all
    tokens shows no permutation.
    """
    result, values = x.clone(), x[tokens].roll(1, dims=0)
    values[1::2] = values[: 2 * (len(values) // 2) : 2].clone()
    result[tokens] = values
    return result
