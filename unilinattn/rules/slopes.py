"""Frozen slopes of activations: f(p) = slope(p) p + f(0)."""

from collections.abc import Callable

import torch
from torch import Tensor

from unilinattn.rules.functions import HOMOGENEOUS


def frozen_slope(name: str, func: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slope (f(p) - f(0)) / p of a function of one value at each p, and f(0)."""
    zero = torch.zeros((), dtype=point.dtype, device=point.device, requires_grad=True)
    if name == "silu":
        return torch.sigmoid(point), zero.detach()
    if name in HOMOGENEOUS:
        # Also of one whose slope differs between channels.
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            return torch.autograd.grad(func(point).sum(), point)[0], zero.detach()
    level = func(zero.detach())
    difference = DIFFERENCES.get(name, lambda x: func(x) - level)
    with torch.enable_grad():
        (limit,) = torch.autograd.grad(difference(zero), zero)
    # At p = 0 the slope is its limit f'(0); the quotient of the smallest numbers would be imprecise or 0 / 0.
    near = point.abs() < torch.finfo(point.dtype).tiny
    return torch.where(near, limit, difference(point) / point.masked_fill(near, 1)), level


def _log_sigmoid_difference(point: Tensor) -> Tensor:
    # With a = |p|, log sigmoid(p) = (p - a) / 2 - log(1 + exp(-a)) and log sigmoid(0) = -log 2. No exponential
    # overflows, and 1 + exp(-a) = 2 (1 + expm1(-a) / 2) leaves no difference of two logarithms.
    size = point.abs()
    return (point - size) / 2 - torch.log1p(torch.expm1(-size) / 2)


DIFFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda point: torch.tanh(point / 2) / 2,
    "hardsigmoid": lambda point: point.clamp(-3, 3) / 6,
    "log_sigmoid": _log_sigmoid_difference,
    "logsigmoid": _log_sigmoid_difference,
}
"""f(p) - f(0) in closed form for functions with f(0) != 0: the difference of two values cancels near zero."""
