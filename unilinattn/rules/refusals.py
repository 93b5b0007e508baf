"""Factors that are added to values, which are errors, and values whose gradient a host stops, which are none."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.errors import UncoveredError

PACKAGE = __name__.partition(".")[0]


def is_stopped_by_host(name: str) -> bool:
    """Tell whether the function that a mode intercepts is the `detach` of a host: a stop of gradients for its training.

    The operators of this package, which run beside the host's code, detach what they freeze. Of the calls under way,
    the innermost one that is the forward of a module or of this package tells whose code it is.
    """
    frame = sys._getframe(1) if name == "detach" else None
    while frame is not None:
        code = frame.f_code
        # Also a region of a host's own forward, which is a module of this package.
        if code.co_name == "forward" and isinstance(frame.f_locals.get("".join(code.co_varnames[:1])), nn.Module):
            return True
        is_mode = code.co_name == "__torch_function__"
        if not is_mode and frame.f_globals.get("__name__", "").startswith(f"{PACKAGE}."):
            return False
        frame = frame.f_back
    return False


def added_factor(value: Tensor, like: Tensor, where: str, origin: str) -> Tensor:
    """Return a factor that a host adds to a carried tensor `like`; a gradient that reaches it is an `UncoveredError`.

    A model may compute what is not explained, such as the boxes beside the classes of a detector. `where` names the
    module, and `origin` the function that made the factor.
    """
    message = (
        f"{where} adds the output of {origin!r} to values that depend on the tokens. The frozen run has a rule for "
        "this function in products only, so its output would count as a bias. Report the model's class."
    )
    added: Tensor = _AddedFactor.apply(value, like, message)
    return added


class _AddedFactor(torch.autograd.Function):
    """The identity of a factor, whose gradient reaches the carried tensor to which it is added."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, like: Tensor, message: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.message = message
        return value.clone()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, like: Any, message: Any) -> Tensor | None:
        return None if tangent is None else tangent.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None
        # A gradient that has a graph is a map, whose values come later; inside of `vmap` they are unknown.
        if torch.is_grad_enabled() or torch._C._functorch.is_functorch_wrapped_tensor(grad) or bool(grad.any()):
            raise UncoveredError(ctx.message)
        return None, None, None
