"""Which operand is the value where no softmax made weights: scores as products, steps of loops, input matrices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.recording.test_frozen_module import as_one_stage
from tests.recording.test_recorded import LIMIT, draw, operator
from unilinattn.testing import relative_error

LENGTH, WIDTH, STATES = 6, 8, 3

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mixes values, of which it is linear, by queries and keys, all (batch, token, channel)."""


def causal(scores: Tensor) -> Tensor:
    return scores * torch.ones(LENGTH, LENGTH).tril()


def _row(q: Tensor, k: Tensor, v: Tensor, t: int) -> Tensor:
    return q[:, t : t + 1] @ k[:, : t + 1].mT @ v[:, : t + 1]


def _looped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, outputs = v.new_zeros(len(v), WIDTH, WIDTH), []
    for t in range(LENGTH):
        state = 0.9 * state + torch.einsum("b,bk,bv->bkv", q[:, t, 0].sigmoid(), k[:, t], v[:, t])
        outputs.append((state * q[:, t, :, None]).sum(1))
    return torch.stack(outputs, 1)


def _turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A recurrence of pairs of channels that turn."""
    state, outputs = v[:, 0], [v[:, 0]]
    for t in range(1, LENGTH):
        turn = torch.tanh(q[:, t])
        state = state * torch.tanh(k[:, t]) + state.roll(1, -1) * turn + v[:, t]
        outputs.append(state)
    return torch.stack(outputs, 1)


def _windows(v: Tensor) -> Tensor:
    return functional.pad(v, (0, 0, 2, 0)).unfold(1, 3, 1)


def _written(q: Tensor, k: Tensor, v: Tensor, input_matrix: Tensor) -> Tensor:
    """A state-space model whose values are the last factor of what is written."""
    written = input_matrix * v[..., None]
    return (written.cumsum(1) * q[:, :, None, :STATES]).sum(-1)


FORMS: dict[str, Mix] = {
    "masked": lambda q, k, v: causal(q @ k.mT) @ v,
    "masked, as a sum": lambda q, k, v: torch.einsum("bij,bjd->bid", causal(q @ k.mT), v),
    "values first": lambda q, k, v: (v.mT @ causal(q @ k.mT).mT).mT,
    "values first, as a sum": lambda q, k, v: torch.einsum("bjd,bij->bid", v, causal(q @ k.mT)),
    "one sum": lambda q, k, v: torch.einsum("bik,bjk,bjd,ij->bid", q, k, v, causal(torch.ones(1)).to(v)),
    "values before keys": lambda q, k, v: torch.einsum("bjd,bjk,bik,ij->bid", v, k, q, causal(torch.ones(1)).to(v)),
    "by element": lambda q, k, v: (causal(q @ k.mT)[..., None] * v[:, None]).sum(2),
    "by channel": lambda q, k, v: (functional.relu(q[:, :, None] - k[:, None]) * v[:, None]).sum(2),
    "rectified": lambda q, k, v: causal(functional.relu(q @ k.mT)) @ v,
    "squared": lambda q, k, v: causal((q @ k.mT) ** 2) @ v,
    "convolved": lambda q, k, v: causal(functional.avg_pool2d(q @ k.mT, 3, 1, 1)) @ v,
    "features": lambda q, k, v: causal((functional.elu(q) + 1) @ (functional.elu(k) + 1).mT) @ v,
    "normalised": lambda q, k, v: causal(functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT) @ v,
    "row by row": lambda q, k, v: torch.cat([_row(q, k, v, t) for t in range(LENGTH)], 1),
    "states": lambda q, k, v: torch.einsum("btk,btkv->btv", q, torch.einsum("btk,btv->btkv", k, v).cumsum(1)),
    "steps, three operands": _looped,
    "turning states": _turned,
    "input matrix": lambda q, k, v: _written(q, k, v, functional.softplus(q)[..., None] * k[:, :, None, :STATES]),
    "input matrix by channel": lambda q, k, v: _written(q, k, v, torch.stack([q, k, q + k], -1)),
    "gated output": lambda q, k, v: torch.stack([q[:, t] * v[:, : t + 1].sum(1) for t in range(LENGTH)], 1),
    "taps by channel": lambda q, k, v: (torch.stack([q, k, q - k], -1) * _windows(v)).sum(-1),
    "taps": lambda q, k, v: (q[..., None] * _windows(v)).sum(-1),
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda v: v,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


class Mixer(nn.Module):
    def __init__(self, mix: Mix, activation: str) -> None:
        super().__init__()
        self.mix, self.activation = mix, ACTIVATIONS[activation]
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.query(x), self.key(x), self.activation(self.value(x)))

    @torch.no_grad()
    def frozen(self, x: Tensor, other: Tensor) -> Tensor:
        """The output for other values, with queries, keys and slopes of the activation frozen, f(0) left out."""
        q, k, projected = self.query(x), self.key(x), self.value(x)
        slope = (self.activation(projected) - self.activation(torch.zeros_like(projected))) / projected
        return self.mix(q, k, slope * self.value(other))

    def contributions(self, x: Tensor) -> Tensor:
        """The parts of the output that come from each token, (batch, query, key, channel)."""
        single = torch.eye(LENGTH).to(x)[:, None, :, None] * x
        return torch.stack([self.frozen(x, each) for each in single], 2)


GATED = {"by channel", "gated output", "taps", "taps by channel", "input matrix", "input matrix by channel"}
"""Products by element, in which an activation with f(0) != 0, such as a sigmoid, is a gate."""


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("form", "activation"), [(f, a) for f in FORMS for a in ACTIVATIONS if a != "sigmoid" or f not in GATED]
)
def test_values_are_those_that_are_mixed_in_any_order_of_the_product(
    form: str, activation: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whole:
        as_one_stage(monkeypatch)
    module, x = Mixer(FORMS[form], activation).double(), draw(2, LENGTH, WIDTH)
    op = operator(module, x)
    assert op.reconstruction_error() < LIMIT
    assert relative_error(op.contributions(range(LENGTH)), module.contributions(x)) < LIMIT
    # Contributions of a value and of a key of one token are equal, and maps of other inputs are not.
    other = draw(2, LENGTH, WIDTH, seed=1)
    assert relative_error(op.apply(other, bias=False), module.frozen(x, other)) < LIMIT


@pytest.mark.parametrize("power", [lambda y: y.pow(2), lambda y: y * y, lambda y: y])
def test_the_norm_of_a_gated_output_reads_no_state(power: Callable[[Tensor], Tensor]) -> None:
    def scaled(y: Tensor) -> Tensor:
        return torch.rsqrt(power(y).mean(-1, keepdim=True).abs() + 1)

    def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FORMS["states"](q, k, v) * torch.tanh(k)

    def normed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = gated(q, k, v)
        return y * scaled(y)

    module, x = Mixer(normed, "silu").double(), draw(2, LENGTH, WIDTH)
    op = operator(module, x)
    scale = scaled(gated(module.query(x), module.key(x), functional.silu(module.value(x))))
    module.mix = gated
    expected = module.contributions(x) * scale[:, :, None]
    assert relative_error(op.contributions(range(LENGTH)), expected) < LIMIT


@pytest.mark.parametrize("seed", range(8))
def test_scores_of_rectified_queries_are_no_values_at_any_input(seed: int) -> None:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bjd,bij->bid", v, causal(functional.relu(q) ** 2 @ (functional.relu(k) ** 2).mT))

    module, x = Mixer(mix, "silu").double(), draw(2, LENGTH, WIDTH, seed=seed)
    op, other = operator(module, x), draw(2, LENGTH, WIDTH, seed=seed + 100)
    assert relative_error(op.apply(other, bias=False), module.frozen(x, other)) < LIMIT
