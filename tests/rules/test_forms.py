"""Frozen forms of functions between layers, against forms with hand-detached factors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from unilinattn.rules.freezing import Freezing

ROWS = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(1, 3, 4)


RULES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    # Each function and its frozen form, which is affine in the argument.
    "silu": (functional.silu, lambda x: x * torch.sigmoid(x.detach())),
    "gelu": (functional.gelu, lambda x: x * (1 + torch.erf(x.detach() / 2**0.5)) / 2),
    "tanh": (torch.tanh, lambda x: x * torch.tanh(x.detach()) / x.detach()),
    "sigmoid": (torch.sigmoid, lambda x: x * (torch.sigmoid(x.detach()) - 0.5) / x.detach() + 0.5),
    "relu": (torch.relu, lambda x: x * (x.detach() > 0)),
    "square": (torch.square, lambda x: x * x.detach()),
    "cube": (lambda x: x**3, lambda x: x * x.detach() ** 2),
    "root": (lambda x: x * (x * x + 1).sqrt(), lambda x: x * (x.detach() ** 2 + 1).sqrt()),
    "gated unit": (
        lambda x: functional.silu(x[..., :2]) * x[..., 2:],
        lambda x: functional.silu(x[..., :2].detach()) * x[..., 2:],
    ),
    "limited gated unit": (
        lambda x: functional.silu(x[..., :2].clamp(max=1)) * x[..., 2:].clamp(-1, 1),
        lambda x: (
            functional.silu(x[..., :2].detach().clamp(max=1))
            * (x[..., 2:] * x[..., 2:].detach().clamp(-1, 1) / x[..., 2:].detach())
        ),
    ),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), lambda x: x * torch.sigmoid(1.702 * x.detach())),
    "gelu written out": (
        lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3)))),
        lambda x: x * functional.gelu(x.detach(), approximate="tanh") / x.detach(),
    ),
    "glu": (functional.glu, lambda x: x[..., :2] * torch.sigmoid(x[..., 2:].detach())),
    "router": (
        lambda x: (x.softmax(-1)[..., :1] * x) / x.norm(),
        lambda x: x.detach().softmax(-1)[..., :1] * x / x.detach().norm(),
    ),
    "layer norm": (
        lambda x: functional.layer_norm(x, (4,), ROWS[0, 0] + 3, ROWS[0, 1]),
        lambda x: (
            (x - x.mean(-1, keepdim=True))
            / (x.detach().var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
            * (ROWS[0, 0] + 3)
            + ROWS[0, 1]
        ),
    ),
    "rms norm": (
        lambda x: functional.rms_norm(x, (4,), ROWS[0, 0], 1e-6),
        lambda x: x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + 1e-6) * ROWS[0, 0],
    ),
    "group norm": (
        lambda x: functional.group_norm(x.mT, 2, ROWS[0, 0], ROWS[0, 1]).mT,
        lambda x: (
            torch.cat(
                [
                    (g - g.mean((1, 2), keepdim=True))
                    / (g.detach().var((1, 2), correction=0, keepdim=True) + 1e-5).sqrt()
                    for g in x.split(2, -1)
                ],
                -1,
            )
            * ROWS[0, 0]
            + ROWS[0, 1]
        ),
    ),
    "instance norm": (
        lambda x: functional.instance_norm(x.mT, weight=ROWS[0, 0], bias=ROWS[0, 1]).mT,
        lambda x: (
            (x - x.mean(1, keepdim=True)) / (x.detach().var(1, correction=0, keepdim=True) + 1e-5).sqrt() * ROWS[0, 0]
            + ROWS[0, 1]
        ),
    ),
    "instance norm of running numbers": (
        lambda x: functional.instance_norm(x.mT, ROWS[0, 0], ROWS[0, 1] ** 2, use_input_stats=False).mT,
        lambda x: (x - ROWS[0, 0]) / (ROWS[0, 1] ** 2 + 1e-5).sqrt(),
    ),
    "attention": (
        lambda x: functional.scaled_dot_product_attention(x, x, x),
        lambda x: (x.detach() @ x.detach().mT / 2).softmax(-1) @ x,
    ),
    "linear": (
        lambda x: functional.linear(x, ROWS[0], ROWS[0, :, 0]),
        lambda x: x @ ROWS[0].mT + ROWS[0, :, 0],
    ),
    "convolution": (
        lambda x: functional.conv1d(x, ROWS[0, :, None, :2], ROWS[0, :, 0], groups=3),
        lambda x: x[..., :-1] * ROWS[0, :, :1] + x[..., 1:] * ROWS[0, :, 1:2] + ROWS[0, :, :1],
    ),
    "constants": (lambda x: 1 - torch.cat([x + 2, ROWS], 1) * 3, lambda x: 1 - torch.cat([x + 2, ROWS], 1) * 3),
    "filled": (lambda x: x.masked_fill(ROWS > 0, 5.0), lambda x: torch.where(ROWS > 0, torch.full_like(ROWS, 5), x)),
    "mix": (
        lambda x: torch.lerp(x, x * 2, torch.sigmoid(x[..., :1])),
        lambda x: x + x * torch.sigmoid(x[..., :1].detach()),
    ),
}


def _through(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a function's value, gradient x argument, and the part of constants."""
    x = (ROWS + 0.1).requires_grad_()
    weight = torch.linspace(1, 2, 100, dtype=torch.float64)
    with forward_ad.dual_level(), torch.enable_grad():
        with Freezing(lambda: "here", lambda func, args, result: result):
            y = function(x.clone())
        tangent = forward_ad.unpack_dual(y).tangent
        (grad,) = torch.autograd.grad((y.flatten() * weight[: y.numel()]).sum(), x)
    return y.detach(), grad, torch.zeros_like(y) if tangent is None else tangent.detach()


@pytest.mark.parametrize("name", RULES)
def test_each_rule_equals_its_frozen_form(name: str) -> None:
    function, by_hand = RULES[name]
    value, grad, constants = _through(function)
    x = (ROWS + 0.1).requires_grad_()
    expected = by_hand(x)
    weight = torch.linspace(1, 2, 100, dtype=torch.float64)
    (reference,) = torch.autograd.grad((expected.flatten() * weight[: expected.numel()]).sum(), x)
    assert torch.allclose(value, function(x).detach(), rtol=1e-12)
    assert torch.allclose(grad, reference, rtol=1e-11, atol=1e-12)
    linear = torch.autograd.functional.jvp(by_hand, ROWS + 0.1, ROWS + 0.1)[1]
    assert torch.allclose(value - constants, linear, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("written", ["add_", "mul_", "setitem", "buffer", "relu", "copy_"])
def test_in_place_operations_are_complete(written: str) -> None:
    def function(x: Tensor) -> Tensor:
        if written == "add_":
            return x.add_(2.0).mul(3)
        if written == "mul_":
            x *= ROWS
            return x
        if written == "setitem":
            x[:, 1] = 4.0
            return x
        if written == "relu":
            return functional.relu(x - 1, inplace=True)
        out = torch.ones_like(ROWS)
        if written == "copy_":
            return out.copy_(x)
        out[:, :2] = x[:, 1:]
        return out

    value, grad, constants = _through(function)
    assert torch.allclose(value, function(ROWS + 0.1))
    weight = torch.linspace(1, 2, 100, dtype=torch.float64)[: value.numel()]
    assert torch.allclose((grad * (ROWS + 0.1)).sum(), ((value - constants).flatten() * weight).sum(), rtol=1e-12)
    assert bool((grad != 0).any())
