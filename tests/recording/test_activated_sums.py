"""Activations that a layer mixes, plus a constant, times a gate: the sum is a value, no activation of one number."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.recording.test_states import Model
from unilinattn.testing import relative_error

LENGTH, WIDTH = 7, 6

MIXED: dict[str, Callable[["Gated", Tensor], Tensor]] = {
    "a matrix of parameters": lambda layer, v: layer.tokens.tril() @ v,
    "einsum": lambda layer, v: torch.einsum("qk,bkc->bqc", layer.tokens, v),
    "sums of earlier tokens": lambda layer, v: v.cumsum(1),
    "a mean": lambda layer, v: v.mean(1, keepdim=True).expand_as(v),
    "a convolution": lambda layer, v: (
        functional.conv1d(functional.pad(v.mT, (2, 0)), layer.kernel[:, None], groups=WIDTH).mT
    ),
    "a long convolution": lambda layer, v: torch.fft.irfft(
        torch.fft.rfft(v, n=2 * LENGTH, dim=1) * torch.fft.rfft(layer.tokens[0, :, None], n=2 * LENGTH, dim=0),
        n=2 * LENGTH,
        dim=1,
    )[:, :LENGTH],
}


class Gated(nn.Module):
    """mixed(silu(W x)) plus a constant, times a gate; perhaps a loop over tokens behind it."""

    def __init__(self, mixed: str, *, activated: bool, loop: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.value, self.gate, self.decay = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tokens, self.kernel = nn.Parameter(torch.randn(LENGTH, LENGTH)), nn.Parameter(torch.randn(WIDTH, 3))
        self.constant, self.matrix = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.mixed, self.activated, self.loop = MIXED[mixed], activated, loop

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        entered, gate, decay = self.value(x), self.gate(x), torch.sigmoid(self.decay(x))
        gate = functional.silu(gate) if self.activated else gate
        slope = torch.sigmoid(entered)
        if frozen:
            slope, gate, decay = slope.detach(), gate.detach(), decay.detach()
        y = (self.mixed(self, entered * slope if frozen else functional.silu(entered)) + self.constant) * gate
        if not self.loop:
            return y
        # A product with a matrix at each step has no map of numbers, so the layer is one stage.
        states = [torch.zeros_like(y[:, 0])]
        for t in range(y.shape[1]):
            states.append((decay[:, t] * states[-1]) @ self.matrix + y[:, t])
        return torch.stack(states[1:], 1)


@pytest.mark.parametrize("loop", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("mixed", MIXED)
def test_a_sum_of_activations_plus_a_constant_is_a_value(mixed: str, activated: bool, loop: bool) -> None:
    model = Model(Gated(mixed, activated=activated, loop=loop)).eval().double()
    ids = torch.randint(20, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    trace = ula.trace(model, ids, progress=False)
    scores = ula.explain(trace, method="logit", target=-1, logit=3, progress=False).scores
    x = model.embedding(ids).detach().requires_grad_()
    model.head(x + model.layer(x, frozen=True))[:, -1, 3].sum().backward()
    assert x.grad is not None
    assert relative_error(scores, (x * x.grad).sum(2)) < 1e-12


CHANNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, weight: functional.linear(x, weight),
    "matmul": lambda x, weight: x @ weight,
    "einsum": lambda x, weight: torch.einsum("btc,dc->btd", x, weight),
    "einsum with dots": lambda x, weight: torch.einsum("...c,dc->...d", x, weight),
    "a convolution of one token": lambda x, weight: functional.conv1d(x.mT, weight[..., None]).mT,
}


class Adapted(nn.Module):
    """A mean of earlier tokens, times a constant plus a map of activated channels, as in a low-rank adapter."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.constant, self.form = nn.Parameter(torch.randn(WIDTH)), CHANNELS[form]

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return mixed * (self.constant + self.form(torch.tanh(x @ self.first), self.second))


@pytest.mark.parametrize("form", CHANNELS)
def test_a_constant_plus_a_map_of_activated_channels_is_a_gate(form: str) -> None:
    """A gate that is not zero at zero is frozen by the half rule too, so that relevances are shares."""
    model = Model(nn.Sequential(Adapted(form), Adapted(form))).eval().double()
    ids = torch.randint(20, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    trace = ula.trace(model, ids, progress=False)
    lrp, logit = (ula.explain(trace, method=name, target=-1, logit=3).scores for name in ("lrp", "logit"))
    assert relative_error(lrp, logit) < 1e-12
