"""Functions that a host writes by hand have the relevances and shares of torch's functions."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.frozen.detached import worst
from tests.frozen.gates import LEVEL
from tests.frozen.test_rules import LOGIT, Gated, with_mixer
from unilinattn.frozen.live import LiveRun
from unilinattn.frozen.passes import FREEZE, HALF
from unilinattn.frozen.run import frozen
from unilinattn.rules.functions import opened
from unilinattn.testing import tolerance
from unilinattn.tracing.trace import Trace

Function = Callable[[Tensor], Tensor]

EXACT = tolerance("law", torch.float64)

ACTIVATIONS: dict[str, tuple[Function, Function]] = {
    # torch's function, and the one that is written by hand.
    "relu as a mask": (torch.relu, lambda x: x * (x > 0)),
    "relu as a choice": (torch.relu, lambda x: torch.where(x > 0, x, 0.0)),
    "leaky relu": (lambda x: functional.leaky_relu(x, 0.2), lambda x: torch.where(x > 0, x, 0.2 * x)),
    "silu": (functional.silu, lambda x: x * (0.5 + 0.5 * torch.tanh(x / 2))),
    "silu as a quotient": (functional.silu, lambda x: x / (1 + torch.exp(-x))),
    "gelu": (functional.gelu, lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
    "hard swish": (functional.hardswish, lambda x: x * (x / 6 + 0.5).clamp(0, 1)),
    "hard swish by relu6": (functional.hardswish, lambda x: x * functional.relu6(x + 3) / 6),
    "softsign": (functional.softsign, lambda x: x / (1 + x.abs())),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + torch.exp(-x))),
    "sigmoid as a reciprocal": (torch.sigmoid, lambda x: (1 + torch.exp(-x)).reciprocal()),
    "sigmoid of exponentials": (torch.sigmoid, lambda x: x.exp() / (1 + x.exp())),
    "tanh of exponentials": (torch.tanh, lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1)),
    "softplus": (functional.softplus, lambda x: torch.log(1 + torch.exp(x))),
    "softplus by log1p": (functional.softplus, lambda x: torch.log1p(torch.exp(x))),
    "softplus without overflow": (
        functional.softplus,
        lambda x: torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0),
    ),
}


def normed(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=0.0)


GATES: dict[str, tuple[Function, Function]] = ACTIVATIONS | {
    "hard sigmoid": (functional.hardsigmoid, lambda x: (x / 6 + 0.5).clamp(0, 1)),
    "hard sigmoid by hardtanh": (functional.hardsigmoid, lambda x: functional.hardtanh(x / 6 + 0.5, 0.0, 1.0)),
    "exponential": (torch.exp, lambda x: 1 / torch.exp(-x)),
}


SUMS = {"tanh of exponentials", "softplus without overflow"}
"""Sums of exponentials, which are frozen in a product, and of activations."""

NORMS: dict[str, tuple[Function, Function]] = {
    "variance and mean": (
        normed,
        lambda x: (lambda variance, mean: (x - mean) / variance.sqrt())(*torch.var_mean(x, -1, False, keepdim=True)),
    ),
    "deviation and mean": (
        normed,
        lambda x: (lambda deviation, mean: (x - mean) / deviation)(*torch.std_mean(x, -1, correction=0, keepdim=True)),
    ),
    "vector norm": (
        lambda x: functional.normalize(x, dim=-1),
        lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    ),
    "addcdiv": (
        lambda x: 0.3 + functional.normalize(x, dim=-1),
        lambda x: torch.addcdiv(LEVEL, x, torch.linalg.norm(x, dim=-1, keepdim=True)),
    ),
}


def traces(first: Function, other: Function, *, gate: bool) -> list[Trace]:
    """Return models with a function and the one that it is compared with, as a gate or as an activation."""

    def module(function: Function) -> nn.Module:
        torch.manual_seed(0)
        return Gated(lambda g, u, o: function(g) * u if gate else function(g))

    return [with_mixer(module(function))[1] for function in (first, other)]


def require_same(first: Trace, other: Trace) -> None:
    for rule in (FREEZE, HALF):
        expected, actual = (frozen(each, rule=rule).shares(-1, LOGIT).tokens for each in (first, other))
        assert worst(actual, expected) <= EXACT
    relevances, by_hand = (LiveRun(each).relevances(-1, LOGIT) for each in (first, other))
    for name in ("tokens", "content", "control"):
        assert worst(getattr(by_hand, name), getattr(relevances, name)) <= EXACT, name


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_by_hand_are_those_of_torch(name: str) -> None:
    require_same(*traces(*ACTIVATIONS[name], gate=False))


@pytest.mark.parametrize("name", sorted(GATES.keys() - SUMS))
def test_gates_by_hand_are_those_of_torch(name: str) -> None:
    require_same(*traces(*GATES[name], gate=True))


@pytest.mark.parametrize("name", NORMS)
def test_norms_by_hand_are_those_of_torch(name: str) -> None:
    require_same(*traces(*NORMS[name], gate=False))


@pytest.mark.parametrize("arguments", [(), (False,), (-1,), ([0, 1], False, True)])
def test_moments_have_the_axes_of_torch(arguments: tuple[object, ...]) -> None:
    x = torch.arange(24.0, dtype=torch.float64).sin().unflatten(0, (2, 3, 4))
    for function in (torch.var_mean, torch.std_mean):
        call = opened(function.__name__, function, (x, *arguments), {})
        assert call is not None
        for actual, expected in zip(call(), function(x, *arguments), strict=True):
            assert actual.shape == expected.shape and worst(actual, expected) <= EXACT


def test_a_long_loop_of_functions_of_one_value_is_a_value() -> None:
    def looped(x: Tensor) -> Tensor:
        for _ in range(2000):
            x = 0.999 * x
        return x.clamp(0, 1)

    def scaled(x: Tensor) -> Tensor:
        return (0.999**2000 * x).clamp(0, 1)

    require_same(*traces(scaled, looped, gate=True))
