"""Changed inputs of a model, by which it is known what reaches its output."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.nested import mapped, tensors
from unilinattn.discovery.perturbation import special_ids
from unilinattn.host.inputs import is_ids, real_tokens


def changed_input(model: nn.Module, arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments with another value of one: noise, or other codes where they mean no place of a token."""
    value = arguments[name]
    changed = mapped(value, perturbed)
    if name.endswith("input_ids") and is_ids(value):
        # From padding a model may read which token it pools, and from other special ids where an image stands.
        special, real = (
            special_ids(model).to(value),
            real_tokens(arguments, name.replace("input_ids", "attention_mask")),
        )
        ordinary = ~torch.isin(value, special) & ~torch.isin(changed, special)
        ordinary = ordinary & real.to(value.device) if real is not None and real.shape == value.shape else ordinary
        changed = torch.where(ordinary, changed, value) if bool(ordinary.any()) else changed
    return {**arguments, name: changed}


def perturbed(t: Tensor) -> Tensor:
    """Return numbers with noise of their root mean square, or other codes of the same vocabulary."""
    if not t.is_floating_point() and not t.is_complex():
        return t if t.dtype == torch.bool else torch.where(t > 0, t - 1, t + 1)
    if t.is_complex():
        return torch.complex(perturbed(t.real), perturbed(t.imag))
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    size = wide.square().mean().sqrt()
    noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(wide)
    # Vectors of zeros beside others are padding, from which a host may read its mask.
    real = (wide != 0).any(-1, keepdim=True) if t.ndim > 1 and bool(size > 0) else 1
    return (wide + torch.where(size > 0, size, torch.ones_like(size)) * noise * real).to(t.dtype)


def has_numbers(value: Any) -> bool:
    """Tell whether a value has floating-point tensors."""
    return any(t.is_floating_point() for t in tensors(value))


def mixed_channels(value: Any) -> Tensor | None:
    """Return numbers of which each channel has those of other tokens; None for values that have no such axes.

    One order for all channels would change nothing in a model that does not tell the order of its tokens.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 3:
        return None
    length, channels = value.shape[1], value.shape[-1]
    tokens, shifts = (torch.arange(n, device=value.device) for n in (length, channels))
    order = (tokens[:, None] + 1 + shifts) % length
    shape = (1, length, *[1] * (value.ndim - 3), channels)
    return value.gather(1, order.view(shape).expand(value.shape))
