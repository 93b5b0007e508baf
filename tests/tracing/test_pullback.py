"""Gradients inside of recorded layers, and the refusal of those that a recorded operator cannot know."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

import unilinattn as ula
from tests.hosts import named
from tests.tracing.models import WIDTH, Block, Model, added, ids
from unilinattn.errors import UncoveredError
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import randomize


@cache
def traced(name: str) -> ula.Trace:
    host = named(name)
    return ula.trace(host.model().double(), host.inputs(), progress=False)


def draw(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)


def test_a_gradient_passes_the_projection_behind_a_recorded_core() -> None:
    layer = traced("gpt-j").layers[0]
    grad = draw(layer.output)
    expected = grad @ layer.module.out_proj.weight
    (at_core,) = layer.core_pullback()(grad)
    assert relative_error(at_core, expected.detach()) < 1e-12
    assert relative_error(layer.before_output(grad), expected.detach()) < 1e-12


def test_the_cores_of_a_sum_have_a_gradient_each() -> None:
    layer = traced("fnet").layers[0]
    grad = draw(layer.output)
    wave = torch.fft.fft(torch.eye(grad.shape[-1], dtype=grad.dtype))
    # Tokens are mixed by cosines and by sines, then channels alike, and both are added; a sign stands in either matrix.
    at_cores = layer.core_pullback()(grad)
    for each, matrix in zip(at_cores, (wave.real, wave.imag), strict=True):
        assert min(relative_error(each, sign * grad @ matrix) for sign in (1, -1)) < 1e-12


class Gated(nn.Module):
    """Attention whose output is gated: by its own tokens, or by the mixed ones."""

    def __init__(self, *, of_mixed: bool, activation: str = "sigmoid") -> None:
        super().__init__()
        self.of_mixed, self.activation = of_mixed, activation
        self.inner, self.gate, self.outer = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = functional.scaled_dot_product_attention(*self.inner(x).chunk(3, -1), is_causal=True)
        gate = self.gate(mixed if self.of_mixed else x)
        return self.outer(mixed * (gate.sigmoid() if self.activation == "sigmoid" else gate.softmax(-1)) * 2)


def test_a_gate_of_its_own_tokens_is_a_factor_of_the_gradient() -> None:
    model = Model(Block(added, Gated(of_mixed=False))).double().eval()
    (layer,) = ula.trace(model, ids(), progress=False).layers
    grad, module = draw(layer.output), layer.module
    (at_core,) = layer.core_pullback()(grad)
    expected = 2 * (grad @ module.outer.weight) * module.gate(layer.input).sigmoid()
    assert layer.architecture == "recorded" and relative_error(at_core, expected.detach()) < 1e-12


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_a_gate_of_the_mixed_tokens_is_refused(activation: str) -> None:
    model = Model(Block(added, Gated(of_mixed=True, activation=activation))).double().eval()
    (layer,) = ula.trace(model, ids(), progress=False).layers
    with pytest.raises(UncoveredError, match=r"what follows its core \(gate\) is a constant"):
        layer.core_pullback()(layer.output)


class Normed(nn.Module):
    """Attention whose output is normed: all of its channels, those of each head, or after a residual."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(WIDTH, 3 * WIDTH), norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(functional.scaled_dot_product_attention(*self.inner(x).chunk(3, -1), is_causal=True), x)

    def after(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        size = self.norm.normalized_shape[0]
        if size < WIDTH:
            return self.outer(self.norm(mixed.unflatten(-1, (-1, size))).flatten(-2))
        return self.norm(self.outer(mixed) + x) if isinstance(self.norm, nn.LayerNorm) else self.outer(self.norm(mixed))


@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-3), nn.RMSNorm(WIDTH // 2, eps=0.1)])
def test_a_gradient_passes_a_norm_behind_a_recorded_core(norm: nn.Module) -> None:
    (layer,) = ula.trace(Model(Block(added, randomize(Normed(norm)))).double().eval(), ids(), progress=False).layers
    grad, module, x = draw(layer.output), layer.module, layer.input
    values = module.inner(x).chunk(3, -1)
    mixed = functional.scaled_dot_product_attention(*values, is_causal=True).detach().requires_grad_()
    (expected,) = torch.autograd.grad(module.after(mixed, x), mixed, grad)
    assert layer.architecture == "recorded" and relative_error(layer.core_pullback()(grad)[0], expected) < 1e-12


class NormedByHand(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = functional.scaled_dot_product_attention(*self.inner(x).chunk(3, -1), is_causal=True)
        return self.outer(mixed / mixed.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("method", ["attention_grad", "transformer_attribution"])
def test_a_norm_by_hand_behind_a_recorded_core_is_refused(method: str) -> None:
    model = Model(Block(added, NormedByHand(of_mixed=False))).double().eval()
    with pytest.raises(UncoveredError, match=r"is recorded, and what follows its core \(gate\) is a constant"):
        ula.explain(model, ids(), method=method, target=-1)


@pytest.mark.parametrize("name", ["gpt-j", "deberta v2"])
@pytest.mark.parametrize("method", ["attention_grad", "transformer_attribution", "attribution"])
def test_methods_by_gradients_run_on_recorded_layers(method: str, name: str) -> None:
    scores = ula.explain(traced(name), method=method, target=-1).scores
    assert bool(scores.isfinite().all()) and bool(scores.any())
