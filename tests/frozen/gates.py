"""Products of a gate, a value and another value, as a host writes them, with their forms detached by hand."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

INNER = 5
HALF_MASK = torch.arange(INNER) % 2 == 0
LEVEL = torch.tensor(0.3, dtype=torch.float64)


def share(one: Tensor, other: Tensor) -> Tensor:
    """Return a product of which each factor gets half of the relevance."""
    return (one * other.detach() + one.detach() * other) / 2


def sloped(function: Callable[[Tensor], Tensor], x: Tensor, at_zero: float = 0.0) -> Tensor:
    """Return a function of one value with its slope to zero detached."""
    return x * ((function(x) - at_zero) / x).detach() + at_zero


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x).detach()


def sigmoid(x: Tensor) -> Tensor:
    return sloped(torch.sigmoid, x, 0.5)


def tanh(x: Tensor) -> Tensor:
    return sloped(torch.tanh, x)


def relu(x: Tensor) -> Tensor:
    return x * (x > 0)


def written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[..., 1:] = x[..., 1:]
    return out


def rectified(x: Tensor) -> Tensor:
    out = x.clone()
    out[out < 0] = 0
    return out


def filled(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x).mul_(1.5)


class Case(NamedTuple):
    """A product of a gate, a value and another value, and its forms detached by hand."""

    live: Callable[[Tensor, Tensor, Tensor], Tensor]
    freeze: Callable[[Tensor, Tensor, Tensor], Tensor]
    half: Callable[[Tensor, Tensor, Tensor], Tensor]


def gate_of(function: Callable[[Tensor], Tensor], form: Callable[[Tensor], Tensor]) -> Case:
    """Return the case of an activated gate times a value: the gate is frozen, or shares the relevance."""
    return Case(
        lambda g, u, o: function(g) * u,
        lambda g, u, o: form(g).detach() * u,
        lambda g, u, o: share(form(g), u),
    )


def frozen_gate_of(function: Callable[[Tensor], Tensor]) -> Case:
    """Return the case of a gate that is frozen by both rules, because it is not zero at zero."""

    def constant_gate(g: Tensor, u: Tensor, o: Tensor) -> Tensor:
        return function(g).detach() * u

    return Case(lambda g, u, o: function(g) * u, constant_gate, constant_gate)


def shared_values(function: Callable[[Tensor], Tensor], form: Callable[[Tensor], Tensor] | None = None) -> Case:
    """Return the case of a function that is no activation: its product with a value is shared by both rules."""

    def halves(g: Tensor, u: Tensor, o: Tensor) -> Tensor:
        return share((form or function)(g), u)

    return Case(lambda g, u, o: function(g) * u, halves, halves)


def shared_by(live: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Case:
    """Return the case of two activated factors, which share the relevance by both rules."""

    def halves(g: Tensor, u: Tensor, o: Tensor) -> Tensor:
        return share(silu(g), tanh(u))

    return Case(live, halves, halves)


def experts(weigh: Callable[[Tensor, Tensor], Tensor]) -> Case:
    """Return the case of weights of two experts, which are frozen by both rules, as factors of all channels."""

    def frozen_weights(g: Tensor, u: Tensor, o: Tensor) -> Tensor:
        return (relu(g[..., None, :2]).detach() * torch.stack([u, o], -1)).sum(-1)

    return Case(
        lambda g, u, o: weigh(functional.relu(g[..., :2]), torch.stack([u, o], -1)), frozen_weights, frozen_weights
    )


CASES = {
    "silu": gate_of(functional.silu, silu),
    "relu": gate_of(functional.relu, relu),
    "relu as a limit": gate_of(lambda g: g.clamp(min=0), relu),
    "relu as a limit in place": gate_of(lambda g: g.clone().clamp_(0), relu),
    "relu as a maximum": gate_of(lambda g: torch.maximum(torch.zeros((), dtype=g.dtype), g), relu),
    "relu as a mask": gate_of(lambda g: g * (g > 0), relu),
    "relu as a mask of numbers": gate_of(lambda g: (g >= 0).to(g.dtype) * g, relu),
    "relu as a choice": gate_of(lambda g: torch.where(g > 0, g, 0.0), relu),
    "relu as a fill": gate_of(lambda g: g.masked_fill(g < 0, 0.0), relu),
    "relu as written zeros": gate_of(rectified, relu),
    "leaky relu as a choice": gate_of(
        lambda g: torch.where(g > 0, g, 0.2 * g), lambda g: torch.where(g > 0, g, 0.2 * g)
    ),
    "square of a mask": gate_of(lambda g: (g * (g > 0)) ** 2, lambda g: relu(g) * relu(g).detach()),
    "mask of tokens": shared_values(lambda g: g * (g.sum(-1, keepdim=True) > 0)),
    "limits of a size": shared_values(lambda g: g.clamp(-0.2, 0.3), lambda g: sloped(lambda x: x.clamp(-0.2, 0.3), g)),
    "hard sigmoid as limits": frozen_gate_of(lambda g: (g / 6 + 0.5).clamp(0, 1)),
    "hard sigmoid as a clip": frozen_gate_of(lambda g: torch.clip(0.2 * g + 0.5, min=0, max=1)),
    "hard sigmoid as a hardtanh": frozen_gate_of(lambda g: functional.hardtanh(g / 6 + 0.5, 0, 1)),
    "hard sigmoid as one limit after the other": frozen_gate_of(lambda g: (g / 6 + 0.5).clamp(min=0).clamp(max=1)),
    "hard sigmoid in place": frozen_gate_of(lambda g: functional.relu6(g + 3, inplace=True) / 6),
    "step from zero": gate_of(lambda g: g.clamp(0, 0.3), lambda g: sloped(lambda x: x.clamp(0, 0.3), g)),
    "hard swish": gate_of(lambda g: g * functional.relu6(g + 3) / 6, lambda g: g * functional.hardsigmoid(g).detach()),
    "silu as a quotient": gate_of(lambda g: g / (1 + torch.exp(-g)), silu),
    "silu as a product": gate_of(lambda g: g * (1 + torch.exp(-g)).reciprocal(), silu),
    "softsign as a quotient": gate_of(lambda g: g / (1 + g.abs()), lambda g: g / (1 + g.abs()).detach()),
    "maximum with another constant": Case(
        lambda g, u, o: torch.maximum(g, LEVEL) * u,
        lambda g, u, o: share(torch.maximum(g, LEVEL), u),
        lambda g, u, o: share(torch.maximum(g, LEVEL), u),
    ),
    "absolute value": gate_of(torch.abs, lambda g: g * g.sign().detach()),
    "square": gate_of(lambda g: torch.square(functional.relu(g)), lambda g: relu(g) * relu(g).detach()),
    "power": gate_of(lambda g: functional.silu(g) ** 3, lambda g: silu(g) * silu(g).detach() ** 2),
    "product with itself": gate_of(lambda g: (s := functional.silu(g)) * s, lambda g: silu(g) * silu(g).detach()),
    "constant factor": gate_of(lambda g: 2.5 * functional.silu(g), lambda g: 2.5 * silu(g)),
    "frozen factor": gate_of(lambda g: functional.silu(g) * g.softmax(-1), lambda g: silu(g) * g.softmax(-1).detach()),
    "gate of tokens": gate_of(
        lambda g: functional.silu(g) * g.sum(-1, keepdim=True),
        lambda g: silu(g) * g.sum(-1, keepdim=True).detach(),
    ),
    "divisor": gate_of(
        lambda g: functional.silu(g) / g.norm(dim=-1, keepdim=True),
        lambda g: silu(g) / g.norm(dim=-1, keepdim=True).detach(),
    ),
    "limit": gate_of(
        lambda g: functional.silu(g).clamp(-0.1, 0.3), lambda g: sloped(lambda s: s.clamp(-0.1, 0.3), silu(g))
    ),
    "mask": gate_of(
        lambda g: functional.silu(g).masked_fill(HALF_MASK, 0.0), lambda g: silu(g).masked_fill(HALF_MASK, 0.0)
    ),
    "padding": gate_of(
        lambda g: functional.pad(functional.silu(g)[..., 1:], (1, 0)),
        lambda g: functional.pad(silu(g)[..., 1:], (1, 0)),
    ),
    "written entries": gate_of(lambda g: written(functional.silu(g)), lambda g: written(silu(g))),
    "written in place": gate_of(lambda g: filled(functional.silu(g)), lambda g: 1.5 * silu(g)),
    "overwritten": gate_of(lambda g: torch.sigmoid(g).zero_().add_(functional.silu(g)), silu),
    "filled by name": gate_of(lambda g: torch.sigmoid(g).fill_(value=2.0).sub_(2.0).add_(functional.silu(g)), silu),
    "joined": gate_of(
        lambda g: torch.cat([functional.silu(g[..., :2]), g[..., 2:]], -1),
        lambda g: torch.cat([silu(g[..., :2]), g[..., 2:]], -1),
    ),
    "sum of activations": gate_of(
        lambda g: functional.silu(g) + functional.relu(g).flip(-1), lambda g: silu(g) + relu(g).flip(-1)
    ),
    "sigmoid": frozen_gate_of(torch.sigmoid),
    "sigmoid with a factor": frozen_gate_of(lambda g: 2 * torch.sigmoid(g) / 3),
    "activation plus a constant": frozen_gate_of(lambda g: 1 + torch.tanh(g)),
    "constant less an activation": frozen_gate_of(lambda g: 1 - torch.relu(g)),
    "square of a sigmoid": frozen_gate_of(lambda g: torch.sigmoid(g).square()),
    "glu": Case(
        lambda g, u, o: functional.glu(torch.cat([u, g], -1)),
        lambda g, u, o: u * torch.sigmoid(g).detach(),
        lambda g, u, o: u * torch.sigmoid(g).detach(),
    ),
    "three factors": Case(
        lambda g, u, o: functional.silu(g) * u * o,
        lambda g, u, o: (functional.silu(g) * u).detach() * o,
        lambda g, u, o: share(share(silu(g), u), o),
    ),
    "gate of tokens on the other side": Case(
        lambda g, u, o: o.mean(-1, keepdim=True) * functional.silu(g) * u,
        lambda g, u, o: (o.mean(-1, keepdim=True) * functional.silu(g)).detach() * u,
        lambda g, u, o: share(o.mean(-1, keepdim=True).detach() * silu(g), u),
    ),
    "gate in an einsum": Case(
        lambda g, u, o: torch.einsum("blc,blc->blc", functional.silu(g), u),
        lambda g, u, o: silu(g).detach() * u,
        lambda g, u, o: share(silu(g), u),
    ),
    "sigmoid gate in an einsum": Case(
        lambda g, u, o: torch.einsum("...c,...c->...c", u, torch.sigmoid(g)),
        lambda g, u, o: torch.sigmoid(g).detach() * u,
        lambda g, u, o: torch.sigmoid(g).detach() * u,
    ),
    "einsum with a diagonal": Case(
        lambda g, u, o: torch.einsum("blcc,blc->blc", g[..., None].expand(*g.shape, INNER), u),
        lambda g, u, o: share(g, u),
        lambda g, u, o: share(g, u),
    ),
    "weights of experts in an einsum": experts(
        lambda weights, values: torch.einsum("ble,blce->blc", weights, values),
    ),
    "weights of experts in a product": experts(lambda weights, values: (values @ weights[..., None]).squeeze(-1)),
    "weights of experts as a row": experts(
        lambda weights, values: torch.matmul(weights[..., None, :], values.mT).squeeze(-2)
    ),
    # A gated value is zero at zero, so it shares relevance like an activation.
    "sigmoid gate of a factor": Case(
        lambda g, u, o: torch.sigmoid(g) * u * o,
        lambda g, u, o: (torch.sigmoid(g) * u).detach() * o,
        lambda g, u, o: share(torch.sigmoid(g).detach() * u, o),
    ),
    "glu as a factor": Case(
        lambda g, u, o: functional.glu(torch.cat([u, g], -1)) * o,
        lambda g, u, o: (torch.sigmoid(g) * u).detach() * o,
        lambda g, u, o: share(torch.sigmoid(g).detach() * u, o),
    ),
    # The same function gets the same shares, however it is written.
    "silu and tanh": shared_by(lambda g, u, o: functional.silu(g) * torch.tanh(u)),
    "silu written out and tanh": shared_by(lambda g, u, o: g * torch.sigmoid(g) * torch.tanh(u)),
    "silu as a glu and tanh": shared_by(lambda g, u, o: functional.glu(torch.cat([g, g], -1)) * torch.tanh(u)),
    "sigmoid and silu": Case(
        lambda g, u, o: 2 * torch.sigmoid(2 * g) * functional.silu(u),
        lambda g, u, o: (1 + torch.tanh(g)).detach() * silu(u),
        lambda g, u, o: (1 + torch.tanh(g)).detach() * silu(u),
    ),
    "sigmoid written out and silu": Case(
        lambda g, u, o: (1 + torch.tanh(g)) * functional.silu(u),
        lambda g, u, o: (1 + torch.tanh(g)).detach() * silu(u),
        lambda g, u, o: (1 + torch.tanh(g)).detach() * silu(u),
    ),
}
