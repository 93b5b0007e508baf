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


def noisy_beside(t: Tensor, output: Tensor, perturbed: Bool[Tensor, " token"] | Bool[Tensor, "batch token"]) -> Tensor:
    """Add noise to the perturbed tokens of what a layer returns beside its output, such as keys of several heads.

    A vector of each sequence, such as a state, comes from all of them. Weights of attention, which sum to 1, tensors
    without an axis of as many tokens, and what has four axes beside a feature map, are left.
    """
    length = perturbed.shape[-1]
    axis = _token_axis(t, length) if t.ndim < 4 or output.ndim == 3 else None
    if not t.is_floating_point() or isinstance(t, nn.Parameter) or (axis is None and t.ndim != 2):
        return t
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(t.shape[-1], generator=generator, device="cpu").to(t).expand(t.shape)
    if axis is None:
        return t + noise
    first = len(t) if perturbed.ndim == 2 and len(perturbed) == len(t) else 1
    shape = [first, *(length if each == axis else 1 for each in range(1, t.ndim))]
    return t + noise * perturbed.view(-1, length)[:first].to(t.device).view(shape)


def _token_axis(t: Tensor, length: int) -> int | None:
    """Return the axis of tokens of a tensor that a layer returned beside its output, None for one without."""
    axes = [axis for axis, size in enumerate(t.shape) if axis and size == length]
    if not axes:
        return None
    if axes[-2:] == [t.ndim - 2, t.ndim - 1]:
        sums = t.sum(-1)
        if torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
            return None
    # Of several, the last axis numbers channels, and heads come before tokens more often than after them.
    return ([axis for axis in axes if axis < t.ndim - 1] or axes)[-1]


def exchanged(x: Tensor, tokens: Bool[Tensor, "batch token"]) -> Tensor:
    """Give some tokens the values of others among them, some twice: of a b c d the 1st, 2nd and 4th become d d b.

    The values stay those of the input, so that each is valid. Those of all tokens together change too: a mean of all
    tokens shows no permutation.
    """
    result, values = x.clone(), x[tokens].roll(1, dims=0)
    values[1::2] = values[: 2 * (len(values) // 2) : 2].clone()
    result[tokens] = values
    return result
