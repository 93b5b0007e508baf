"""`content` of `attn_lrp` is what `logit` gives, in layers that a loop over tokens and its gates make."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.tracing.models import WIDTH, Model, ids


class GatedLoop(nn.Module):
    """h[t] = a[t] h[t-1] + (1 - a[t]) u[t], times an activated gate, as gated linear RNNs write it."""

    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.decay, self.value, self.gate, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.activation = gate

    def forward(self, x: Tensor) -> Tensor:
        a, u = torch.sigmoid(self.decay(x)), self.value(x)
        state, states = torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            state = a[:, t] * state + (1 - a[:, t]) * u[:, t]
            states.append(state)
        return x + self.output(torch.stack(states, 1) * self.activation(self.gate(x)))


@pytest.mark.parametrize("gate", [functional.silu, functional.gelu, torch.sigmoid])
def test_the_state_of_a_gated_loop_is_a_value(gate: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Model(GatedLoop(gate), GatedLoop(gate)).double().eval()
    trace = ula.trace(model, ids(length=6, batch=1), progress=False)
    content = ula.explain(trace, method="attn_lrp", target=-1, logit=3, progress=False).extras["content"]
    shares = ula.explain(trace, method="logit", target=-1, logit=3, measure="centered", progress=False).scores
    torch.testing.assert_close(content, shares, rtol=0, atol=1e-12)
    assert bool((shares[0, :-1].abs() > 1e-6).all())
