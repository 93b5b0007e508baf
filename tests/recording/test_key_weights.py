"""A number for each key and head that multiplies the values of a core weighs the columns of its map."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from operator import add

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.recording.test_recorded import LIMIT, draw, operator, require_complete
from unilinattn.errors import ExactnessWarning
from unilinattn.mixers import DiagonalDecay
from unilinattn.testing import relative_error

WIDTH, HEADS, LENGTH = 12, 3, 6

Mixing = Callable[["Mixer", Tensor], Tensor]
"""The outputs of heads, or their maps, from the layer and its input."""


class Mixer(nn.Module):
    """A layer of heads; `mix` makes their outputs (batch, head, token, channel)."""

    def __init__(self, mix: Mixing) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.rate, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, WIDTH)
        self.mix = mix

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (z.unflatten(2, (HEADS, -1)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        return q, k, v

    def rates(self, x: Tensor) -> Tensor:
        """Return a number for each token and head, (batch, head, token, 1)."""
        return torch.sigmoid(self.rate(x)).mT.unsqueeze(-1)

    def softmax(self, x: Tensor) -> Tensor:
        q, k, _ = self.heads(x)
        return (q @ k.mT).masked_fill(~causal(x), -torch.inf).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self, x).transpose(1, 2).flatten(2))


def causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


def gated(layer: Mixer, x: Tensor) -> Tensor:
    return layer.softmax(x) @ (layer.rates(x) * layer.heads(x)[2])


def gated_map(layer: Mixer, x: Tensor) -> Tensor:
    return layer.softmax(x) * layer.rates(x).mT


def divided(layer: Mixer, x: Tensor) -> Tensor:
    return layer.softmax(x) @ (layer.heads(x)[2] / (1 + layer.rates(x)))


def divided_map(layer: Mixer, x: Tensor) -> Tensor:
    return layer.softmax(x) / (1 + layer.rates(x)).mT


def by_einsum(layer: Mixer, x: Tensor) -> Tensor:
    return layer.softmax(x) @ torch.einsum("bhk,bhkd->bhkd", layer.rates(x)[..., 0], layer.heads(x)[2])


def wy(layer: Mixer, x: Tensor) -> Tensor:
    """The delta rule, whose strengths multiply the values of the triangular system."""
    q, k, v = layer.heads(x)
    k, rates = functional.normalize(k, dim=-1), layer.rates(x)
    system = torch.eye(x.shape[1], dtype=x.dtype, device=x.device) + (rates * k @ k.mT).tril(-1)
    return (q @ k.mT).tril() @ torch.linalg.solve_triangular(system, rates * v, upper=False, unitriangular=True)


def wy_map(layer: Mixer, x: Tensor) -> Tensor:
    """The map by the recurrence S_t = S_{t-1} + k_t b_t (v_t - S_{t-1}^T k_t)^T, on values that are units."""
    q, k, _ = layer.heads(x)
    k, rates = functional.normalize(k, dim=-1), layer.rates(x)
    units = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    state, rows = torch.zeros(*k.shape[:2], k.shape[3], x.shape[1], dtype=x.dtype, device=x.device), []
    for t in range(x.shape[1]):
        key = k[:, :, t, :, None]
        state = state + key * rates[:, :, t, :, None] * (units[t] - key.mT @ state)
        rows.append(q[:, :, t, None] @ state)
    return torch.cat(rows, 2)


def exponentials(layer: Mixer, x: Tensor) -> Tensor:
    weights = layer.rates(x).exp()
    return torch.cumsum(weights * layer.heads(x)[2], 2) / torch.cumsum(weights, 2)


def exponentials_map(layer: Mixer, x: Tensor) -> Tensor:
    return layer.rates(x).mT.expand(-1, -1, x.shape[1], -1).masked_fill(~causal(x), -torch.inf).softmax(-1)


def causal_mean(layer: Mixer, x: Tensor) -> Tensor:
    return layer.heads(x)[2].cumsum(2) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


def causal_mean_map(layer: Mixer, x: Tensor) -> Tensor:
    each = causal(x) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]
    return each.expand(len(x), HEADS, -1, -1)


def step_by_step(layer: Mixer, x: Tensor) -> Tensor:
    q, k, v = layer.heads(x)
    rows = []
    for t in range(x.shape[1]):
        weights = (k[:, :, : t + 1] @ q[:, :, t, :, None]).softmax(2)
        rows.append((weights * v[:, :, : t + 1]).sum(2))
    return torch.stack(rows, 2)


def attention(layer: Mixer, x: Tensor) -> Tensor:
    return layer.softmax(x)


MAPS: list[tuple[Mixing, Mixing]] = [
    (gated, gated_map),
    (divided, divided_map),
    (by_einsum, gated_map),
    (wy, wy_map),
    (exponentials, exponentials_map),
    (causal_mean, causal_mean_map),
    (step_by_step, attention),
]


@pytest.mark.parametrize(("mix", "maps"), MAPS)
def test_weights_of_keys_and_queries_around_a_core_are_in_its_map(mix: Mixing, maps: Mixing) -> None:
    module, x = Mixer(mix), draw(2, LENGTH, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        expected = maps(module, x)
    assert relative_error(op.matrix("core", heads=None).expand_as(expected), expected) < LIMIT


def normed_values(layer: Mixer, x: Tensor) -> Tensor:
    v = layer.heads(x)[2]
    return layer.softmax(x) @ (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6))


def divided_by_their_length(layer: Mixer, x: Tensor) -> Tensor:
    v = layer.heads(x)[2]
    return layer.softmax(x) @ (v.contiguous() / v.norm(dim=-1, keepdim=True))


def activated_values(layer: Mixer, x: Tensor) -> Tensor:
    return layer.softmax(x) @ functional.silu(layer.heads(x)[2])


def gated_by_channel(layer: Mixer, x: Tensor) -> Tensor:
    q, _, v = layer.heads(x)
    return layer.softmax(x) @ (torch.sigmoid(q) * v)


@pytest.mark.parametrize("mix", [normed_values, divided_by_their_length, activated_values, gated_by_channel])
def test_norms_and_activations_of_values_and_gates_of_channels_stay_outside(mix: Mixing) -> None:
    module, x = Mixer(mix), draw(2, LENGTH, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        assert relative_error(op.matrix("core", heads=None), module.softmax(x)) < LIMIT


def normed_sums(layer: Mixer, x: Tensor) -> Tensor:
    y = layer.heads(x)[2].cumsum(2)
    return y / y.norm(dim=-1, keepdim=True)


def normed_sums_of_gated_values(layer: Mixer, x: Tensor) -> Tensor:
    y = (layer.rates(x) * layer.heads(x)[2]).cumsum(2)
    return y / (1 + y.abs().amax(-1, keepdim=True))


@pytest.mark.parametrize("mix", [normed_sums, normed_sums_of_gated_values])
def test_a_norm_of_a_sum_of_tokens_stays_outside(mix: Mixing) -> None:
    module, x = Mixer(mix), draw(2, LENGTH, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        weights = torch.ones_like(module.rates(x)) if mix is normed_sums else module.rates(x)
        expected = causal(x) * weights.mT
    assert relative_error(op.matrix("core", heads=None).expand_as(expected), expected) < LIMIT


def exponential_mean(layer: Mixer, x: Tensor) -> Tensor:
    v = layer.heads(x)[2]
    rows = ((0.8 ** (t - j) * v[:, :, j] for j in range(t + 1)) for t in range(x.shape[1]))
    return torch.stack([reduce(add, row) for row in rows], 2)


def exponential_mean_map(layer: Mixer, x: Tensor) -> Tensor:
    t = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    return (0.8 ** (t[:, None] - t).clamp_min(0)).tril().expand(len(x), HEADS, -1, -1)


def recurrence(layer: Mixer, x: Tensor) -> Tensor:
    """The linear form of minGRU: h_t = (1 - z_t) h_{t-1} + z_t v_t."""
    z, v = torch.sigmoid(layer.heads(x)[0]), layer.heads(x)[2]
    state, states = torch.zeros_like(v[:, :, 0]), []
    for t in range(x.shape[1]):
        state = (1 - z[:, :, t]) * state + z[:, :, t] * v[:, :, t]
        states.append(state)
    return torch.stack(states, 2)


def recurrence_map(layer: Mixer, x: Tensor) -> Tensor:
    """The map of its adapter, with a head for each channel."""
    z = torch.sigmoid(layer.heads(x)[0].transpose(1, 2).flatten(2))
    ones = torch.ones_like(z[..., :1, None])
    return DiagonalDecay(ones, ones, torch.log1p(-z)[..., None], key_scale=z).materialize()


def online_softmax(layer: Mixer, x: Tensor) -> Tensor:
    """One score for each key, whose largest and sum are those of the keys read before."""
    scores, v = 3 * layer.rates(x)[..., 0], layer.heads(x)[2]
    largest, total, state = torch.full_like(scores[:, :, 0], -1e9), torch.zeros_like(scores[:, :, 0]), 0 * v[:, :, 0]
    rows = []
    for t in range(x.shape[1]):
        new = torch.maximum(largest, scores[:, :, t])
        decay, weight = (largest - new).exp(), (scores[:, :, t] - new).exp()
        total, state = total * decay + weight, state * decay[..., None] + v[:, :, t] * weight[..., None]
        largest = new
        rows.append(state / total[..., None])
    return torch.stack(rows, 2)


def online_softmax_map(layer: Mixer, x: Tensor) -> Tensor:
    scores = 3 * layer.rates(x).mT.expand(-1, -1, x.shape[1], -1)
    return scores.masked_fill(~causal(x), -torch.inf).softmax(-1)


def last_state(layer: Mixer, x: Tensor) -> Tensor:
    z, v = torch.sigmoid(layer.heads(x)[0]), layer.heads(x)[2]
    state = torch.zeros_like(v[:, :, 0])
    for t in range(x.shape[1]):
        state = (1 - z[:, :, t]) * state + z[:, :, t] * v[:, :, t]
    return state.unsqueeze(2)


def last_state_map(layer: Mixer, x: Tensor) -> Tensor:
    return recurrence_map(layer, x)[:, :, -1:]


LOOPS: list[tuple[Mixing, Mixing]] = [
    (exponential_mean, exponential_mean_map),
    (recurrence, recurrence_map),
    (online_softmax, online_softmax_map),
    (last_state, last_state_map),
]


@pytest.mark.parametrize(("mix", "maps"), LOOPS)
def test_weights_in_the_steps_of_a_loop_are_in_its_map(mix: Mixing, maps: Mixing) -> None:
    module, x = Mixer(mix), draw(2, LENGTH, WIDTH)
    assert (op := operator(module, x)).reconstruction_error() < LIMIT
    with torch.no_grad():
        expected = maps(module, x)
    assert relative_error(op.matrix("core"), expected.mean(1)) < LIMIT


def pairs(layer: Mixer, x: Tensor) -> Tensor:
    """A weight for each pair and head times copies of the values of each query."""
    return (layer.softmax(x)[..., None] * layer.heads(x)[2].unsqueeze(2)).sum(3)


def by_channel(layer: Mixer, x: Tensor) -> Tensor:
    weights = layer.heads(x)[0].exp()
    return torch.cumsum(weights * layer.heads(x)[2], 2) / torch.cumsum(weights, 2)


def scaled_mean(layer: Mixer, x: Tensor) -> Tensor:
    """Factors that are equal for all tokens weigh none."""
    scales = layer.rate.bias.repeat(4).unflatten(0, (HEADS, -1)).unsqueeze(1)
    return (scales * layer.heads(x)[2]).cumsum(2)


WARNED = [
    *((mix, True) for mix in (pairs, by_channel)),
    *((mix, False) for mix, _ in (*MAPS, *LOOPS[:-1])),
    *((mix, False) for mix in (normed_values, gated_by_channel, normed_sums, scaled_mean)),
]


@pytest.mark.parametrize(("mix", "warned"), WARNED)
def test_a_map_of_ones_warns_of_the_weights_that_it_leaves_out(mix: Mixing, warned: bool) -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    trace = ula.trace(nn.Sequential(linear, Mixer(mix)).double().eval(), draw(2, LENGTH, WIDTH), progress=False)
    with pytest.warns(ExactnessWarning, match="equal weights for all tokens") if warned else nullcontext():
        result = ula.explain(trace, method="raw", progress=False)
    assert len(result.warnings) == warned
