"""Autograd functions of `rules.live`: the identity with a weight, and functions of one value with either derivative."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unilinattn.rules.slopes import frozen_slope


@dataclass
class Paths:
    """The weights by which a backward pass takes the paths through products; they may change between passes.

    Attributes:
        value: the weight of a carried value in its product with a factor that the tokens decided, such as a gate.
        factor: the weight of that factor.
        values: the weight of values in their product with the matrix of a token mixer.
        matrix: the weight of the factors of that matrix.
    """

    value: float = 0.5
    factor: float = 0.5
    values: float = 0.5
    matrix: float = 0.5

    def become(self, other: "Paths") -> None:
        """Take the weights of another one, for the next backward pass."""
        vars(self).update(vars(other))

    def weighted(self, tensor: Tensor, share: str, scale: float = 1.0) -> Tensor:
        """Return a tensor whose gradient is multiplied by `scale` and the weight of a `share`, "" for neither one."""
        weighted: Tensor = _Weighted.apply(tensor, self, share, scale)
        return weighted


@dataclass(eq=False)
class Derivative:
    """Which derivative a function of one value has in backward passes: its own, or its frozen slope."""

    is_slope: bool = False


def differentiated(
    derivative: Derivative, name: str, func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Return `func(x, ...)`, whose derivative is computed in the first backward pass that needs it."""
    result: Tensor = _OfOneValue.apply(x, derivative, name, lambda point: func(point, *args, **kwargs))
    return result


class _OfOneValue(torch.autograd.Function):
    """A function of one value with a `Derivative`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, derivative: Derivative, name: str, func: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.derivative, ctx.name, ctx.func, ctx.slope = derivative, name, func, None
        return func(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        if ctx.slope is None:
            ctx.slope = _at(ctx.derivative, ctx.name, ctx.func, ctx.saved_tensors[0])
        return grad * ctx.slope, None, None, None


def _at(derivative: Derivative, name: str, func: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if derivative.is_slope:
        return frozen_slope(name, func, x)[0]
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        return torch.autograd.grad(func(point).sum(), point)[0]


class _Weighted(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a weight that is read in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, paths: Paths, share: str, scale: float) -> Tensor:
        ctx.paths, ctx.share, ctx.scale = paths, share, scale
        ctx.set_materialize_grads(False)
        # A tensor that was written in place may be again, after the graph has saved it.
        return x.clone() if x._version else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        weight = ctx.scale * (getattr(ctx.paths, ctx.share) if ctx.share else 1)
        # Without a gradient, nothing before it is computed.
        return (grad * weight if grad is not None and weight else None), None, None, None
