"""Parallel forms of a gated recurrence, written in functions of torch, contribute what its closed form does."""

from collections.abc import Callable

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from tests.recording.test_frozen_module import as_one_stage
from tests.recording.test_recorded import LIMIT, draw, operator, out_of_place
from unilinattn.testing import relative_error

LENGTH, WIDTH = 8, 16

Scan = Callable[[Tensor, Tensor], Tensor]
"""Returns the states h_t = a_t h_(t-1) + v_t of decays (batch, token, ...) and values of a shape they broadcast to."""


def halves(a: Tensor, v: Tensor) -> Tensor:
    """The last state of each first half is added to all of the second half (Sklansky, 1960)."""
    for half in (1, 2, 4):
        decays, states = (x.unflatten(1, (-1, 2 * half)) for x in (a, v))
        last = half - 1
        behind = states[:, :, half:] + decays[:, :, half:] * states[:, :, last:half]
        product = decays[:, :, half:] * decays[:, :, last:half]
        a = torch.cat([decays[:, :, :half], product], 2).flatten(1, 2)
        v = torch.cat([states[:, :, :half], behind], 2).flatten(1, 2)
    return v


def halves_in_place(a: Tensor, v: Tensor) -> Tensor:
    # Memory in the order (batch, ..., channel, token), as a copy of a transposed product has.
    a, v = (x.movedim(1, -1).contiguous().movedim(-1, 1).clone() for x in (a, v))
    for half in (1, 2, 4):
        decays, states = (x.unflatten(1, (-1, 2 * half)) for x in (a, v))
        states[:, :, half:].add_(decays[:, :, half:] * states[:, :, half - 1 : half])
        decays[:, :, half:].mul_(decays[:, :, half - 1 : half])
    return v


def steps(a: Tensor, v: Tensor) -> Tensor:
    """Each state is added to the one 1, 2, 4 tokens later (Hillis and Steele, 1986)."""
    for step in (1, 2, 4):
        pad = (0, 0) * (v.ndim - 2) + (step, 0)
        v = v + a * functional.pad(v, pad)[:, :-step]
        a = a * functional.pad(a, pad, value=1.0)[:, :-step]
    return v


def rolls(a: Tensor, v: Tensor) -> Tensor:
    tokens = torch.arange(LENGTH).view(1, -1, *[1] * (v.ndim - 2))
    for step in (1, 2, 4):
        v = v + torch.where(tokens >= step, a * v.roll(step, 1), 0.0)
        a = torch.where(tokens >= step, a * a.roll(step, 1), a)
    return v


def tree(a: Tensor, v: Tensor) -> Tensor:
    """Pairs are joined, their states computed, and those between them filled in (Blelloch, 1990)."""
    if v.shape[1] == 1:
        return v
    odd = tree(a[:, 1::2] * a[:, ::2], a[:, 1::2] * v[:, ::2] + v[:, 1::2])
    even = torch.cat([v[:, :1], a[:, 2::2] * odd[:, :-1] + v[:, 2::2]], 1)
    return torch.stack([even, odd], 2).flatten(1, 2)


def products(a: Tensor, v: Tensor) -> Tensor:
    product = a.cumprod(1)
    return product * (v / product).cumsum(1)


def logarithms(a: Tensor, v: Tensor) -> Tensor:
    total = a.log().cumsum(1)
    return total.exp() * (v * (-total).exp()).cumsum(1)


def pairs(a: Tensor, v: Tensor) -> Tensor:
    total = a.log().cumsum(1)
    causal = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)).view(LENGTH, LENGTH, *[1] * (v.ndim - 2))
    decays = (total[:, :, None] - total[:, None]).masked_fill(~causal, -torch.inf).exp()
    return torch.einsum("bts...,bs...->bt...", decays.expand(*decays.shape[:3], *v.shape[2:]), v)


def chunks(a: Tensor, v: Tensor) -> Tensor:
    h, states = torch.zeros_like(v[:, :1]), []
    for decays, values in zip(a.split(4, 1), v.split(4, 1), strict=True):
        states.append(out_of_place(decays, values) + decays.cumprod(1) * h)
        h = states[-1][:, -1:]
    return torch.cat(states, 1)


SCANS: tuple[Scan, ...] = (
    out_of_place,
    halves,
    halves_in_place,
    steps,
    rolls,
    tree,
    products,
    logarithms,
    pairs,
    chunks,
)

DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "exponential": lambda x: torch.exp(-functional.softplus(x)),
    "one minus": lambda x: 1 - x.sigmoid(),
    "root": lambda x: x.sigmoid().sqrt(),
    "square": lambda x: x.sigmoid() ** 2,
    "above a half": lambda x: 0.5 + 0.5 * x.sigmoid(),
}


class Recurrence(nn.Module):
    """Values that pass a gate or an activation, and decays for each channel or for each of some heads."""

    def __init__(self, scan: Scan, decay: str, values: str, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.value, self.input_gate = (
            nn.Linear(WIDTH, heads),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.scan, self.decay, self.values = scan, DECAYS[decay], values

    def forward(self, x: Tensor) -> Tensor:
        a, v = self.decay(self.gate(x))[..., None], self.value(x).unflatten(-1, (self.gate.out_features, -1))
        return self.scan(a, self.gated(x, a, v)).flatten(2)

    def gated(self, x: Tensor, a: Tensor, v: Tensor) -> Tensor:
        match self.values:
            case "gated":
                return v * self.input_gate(x).sigmoid().view(v.shape)
            case "one minus the decay":
                return (1 - a) * v
            case "activated":
                return functional.silu(v)
        return v

    @torch.no_grad()
    def contributions(self, x: Tensor) -> Float[Tensor, "batch query key channel"]:
        """The products of the decays between two tokens, times the frozen gate of a value without its bias."""
        a, v = self.decay(self.gate(x))[..., None], self.value(x).unflatten(-1, (self.gate.out_features, -1))
        factor = self.gated(x, a, v) / v
        linear = functional.linear(x, self.value.weight).view(v.shape)
        sent = torch.zeros(len(x), LENGTH, LENGTH, WIDTH, dtype=x.dtype)
        for key in range(LENGTH):
            for query in range(key, LENGTH):
                decayed = a[:, key + 1 : query + 1].prod(1) * factor[:, key] * linear[:, key]
                sent[:, query, key] = decayed.flatten(1)
        return sent


@pytest.mark.parametrize("values", ["linear", "gated", "one minus the decay", "activated"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_scan_contributes_what_the_closed_form_does(
    scan: Scan, decay: str, values: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whole:
        if scan is halves_in_place:
            pytest.skip("autograd cannot pass values that are written over")
        as_one_stage(monkeypatch)
    for heads in (4, WIDTH):
        module, x = Recurrence(scan, decay, values, heads).double(), draw(2, LENGTH, WIDTH)
        op = operator(module, x)
        assert op.reconstruction_error() < LIMIT
        assert relative_error(op.contributions(range(LENGTH)), module.contributions(x)) < LIMIT


def test_a_state_times_gates_of_several_tokens_is_no_gate() -> None:
    class Last(Recurrence):
        def forward(self, x: Tensor) -> Tensor:
            decayed = self.gate(x).sigmoid() * self.value(x)[:, -1:]
            return self.input_gate(x).sigmoid() * decayed

    module, x = Last(out_of_place, "sigmoid", "linear", WIDTH).double(), draw(2, LENGTH, WIDTH)
    # Its parameters are drawn here.
    op = operator(module, x)
    gates = module.gate(x).sigmoid() * module.input_gate(x).sigmoid()
    expected = gates * functional.linear(x[:, -1:], module.value.weight)
    assert relative_error(op.contributions(range(LENGTH))[:, :, -1], expected) < LIMIT
