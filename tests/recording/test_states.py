"""Gated recurrences as loops, written in several ways, from several first states: their gates are frozen."""

from collections.abc import Callable, Iterable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from unilinattn.errors import UncoveredError
from unilinattn.testing import relative_error

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The next state, from a gate, the state and a value."""

STEPS: dict[str, Step] = {
    "sum": lambda a, h, v: a * h + (1 - a) * v,
    "sum in another order": lambda a, h, v: (1 - a) * v + h * a,
    "step to the value": lambda a, h, v: h + (1 - a) * (v - h),
    "step from the value": lambda a, h, v: h - (1 - a) * (h - v),
    "lerp": lambda a, h, v: torch.lerp(v, h, a),
    "addcmul": lambda a, h, v: torch.addcmul((1 - a) * v, a, h),
    "a constant": lambda a, h, v: a * h + v + 0.3,
    "two gates": lambda a, h, v: (a * a.flip(-1)) * h + v,
    "tanh": lambda a, h, v: (2 * a - 1).tanh() * h + v,
    "where": lambda a, h, v: torch.where(a > 0.5, a * h, 0.5 * h) + v,
}

FIRST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zeros": lambda learned, like: torch.zeros_like(like),
    "learned": lambda learned, like: learned.expand_as(like),
    "learned, broadcast": lambda learned, like: learned,
}

OUTPUT: dict[str, Callable[[Tensor], Tensor]] = {
    "no gate": lambda z: torch.ones_like(z),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


class Recurrence(nn.Module):
    def __init__(
        self, step: Step, first: Callable[[Tensor, Tensor], Tensor], output: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decay, self.value, self.gate, self.out = (nn.Linear(6, 6) for _ in range(4))
        self.state, self.step, self.first, self.output = nn.Parameter(torch.randn(6)), step, first, output

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        gates = self.decay(x).mul(2).add(1).sigmoid(), self.output(2 * self.gate(x))
        decay, gate = (t.detach() for t in gates) if frozen else gates
        value = self.value(x)
        states = [self.first(self.state, value[:, 0])]
        for t in range(x.shape[1]):
            states.append(self.step(decay[:, t], states[-1], value[:, t]))
        return self.out(torch.stack(states[1:], 1) * gate)


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(20, 6), layer, nn.Linear(6, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x + self.layer(x))


def misses(step: Step, length: int, outputs: Iterable[str] = OUTPUT) -> Iterator[tuple[str, str, float]]:
    """Yield the error of the shares for each first state and output gate, against autograd with detached gates."""
    ids = torch.randint(20, (1, length), generator=torch.Generator().manual_seed(1))
    for first, output in product(FIRST, outputs):
        model = Model(Recurrence(step, FIRST[first], OUTPUT[output])).eval().double()
        scores = ula.explain(model, ids, method="logit", target=-1, logit=3, progress=False).scores
        x = model.embedding(ids).detach().requires_grad_()
        model.head(x + model.layer(x, frozen=True))[:, -1, 3].sum().backward()
        assert x.grad is not None
        yield first, output, relative_error(scores, (x * x.grad).sum(-1))


@pytest.mark.long
@pytest.mark.parametrize("name", STEPS)
def test_gates_of_a_recurrence_are_frozen(name: str) -> None:
    assert [(first, output) for first, output, error in misses(STEPS[name], 5) if error > 1e-10] == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["step to the value", "where"])
def test_gates_of_a_long_recurrence_are_frozen(name: str) -> None:
    assert [(first, output) for first, output, error in misses(STEPS[name], 90, ["silu"]) if error > 1e-7] == []


def test_a_learned_state_times_a_decay_that_is_no_gate_is_refused() -> None:
    """The exponential of a value is frozen, and its product would be a bias that tokens decide."""
    layer = Recurrence(lambda a, h, v: (-functional.softplus(a)).exp() * h + v, FIRST["learned"], OUTPUT["silu"])
    with pytest.raises(UncoveredError, match="the output of 'mul' depends on the tokens and is added to their values"):
        ula.explain(Model(layer).eval(), torch.arange(5)[None], method="logit", target=-1, progress=False)
