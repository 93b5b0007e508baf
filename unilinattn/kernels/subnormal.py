"""Decays and operands of products without subnormal numbers, which some processors multiply fifty times slower.

Decayed factors pass through the numbers below the smallest normal one, `tiny` (1.2e-38 in float32, 2.2e-308 in
float64), on their way to zero. The functions here set such numbers to zero before a product reads them, and change no
other number. Setting a number to zero changes it by less than `tiny`, so a product of rows x with columns w changes by
less than `tiny` times sum |x| + sum |w|. For ordinary factors that is below the rounding of any result a few digits
above `tiny`; smaller results have already lost those digits to gradual underflow. The threshold is absolute, so a row
whose entries are all small, such as 1e-37, keeps them.

Sums and products of normal numbers can be subnormal, so operands are flushed after the last operation before the
product.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Inexact
from torch import Tensor
from torch.nn import functional

COMPARED = {"cpu": 1 << 16, "cuda": 1 << 26}
"""Numbers of a factor that are compared at once: on a CPU they fit its cache, on a GPU each comparison waits for it."""

_threshold = torch.ops.aten.threshold.out
_hardshrink = torch.ops.aten.hardshrink.out


def decays(exponent: Inexact[Tensor, "*shape"], out: Tensor | None = None) -> Inexact[Tensor, "*shape"]:
    """Return exp of log-decays, exactly zero where it would be subnormal; `out` may be `exponent`."""
    if exponent.is_complex():
        return flushed_(torch.exp(exponent, out=out))
    # The exponential of the bound is normal under any rounding.
    bound = float(math.ceil(math.log(torch.finfo(exponent.dtype).tiny)))
    if out is not None:
        return _threshold(exponent, bound, -torch.inf, out=out).exp_()
    return functional.threshold(exponent, bound, -torch.inf).exp_()


def flushed(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
    """Return a copy with zeros for numbers up to `tiny`, with the gradient of the identity."""
    if tensor.is_complex():
        return torch.view_as_complex(flushed(torch.view_as_real(tensor.resolve_conj())))
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _Flush.apply(tensor)
    return functional.hardshrink(tensor, torch.finfo(tensor.dtype).tiny)


def flushed_(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
    """Return `flushed` of a tensor that no other operation has read, in place unless it has a gradient."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return flushed(tensor)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    _hardshrink(real, torch.finfo(real.dtype).tiny, out=real)
    return tensor


def flushed_given(factor: Float[Tensor, "batch head row col"]) -> Float[Tensor, "batch head row col"]:
    """Return a factor unchanged if it has no subnormal number, else `flushed` of it: most factors need no copy."""
    tiny = torch.finfo(factor.dtype).tiny
    most = COMPARED.get(factor.device.type, COMPARED["cpu"])
    # Rows of a factor in another order of memory would be copied.
    parts = factor.detach().flatten(0, 2 if factor.is_contiguous() else 1)
    blocks = parts.split(max(1, most // max(1, parts[:1].numel())))
    return (
        factor if all(torch.equal(block, functional.hardshrink(block, tiny)) for block in blocks) else flushed(factor)
    )


class _Flush(torch.autograd.Function):
    """`flushed` with the gradient of the identity, so that a factor of zero also has a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return functional.hardshrink(tensor, torch.finfo(tensor.dtype).tiny)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return flushed(grad)
