"""Layers of which later modules need more than their operator's output run by the rules of functions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

import unilinattn as ula
from tests.frozen.detached import llama_model, token_ids
from unilinattn.errors import UncoveredError
from unilinattn.frozen import passes
from unilinattn.frozen.run import frozen
from unilinattn.testing import promoted
from unilinattn.testing.hosts import randomize

Freeze = Callable[[Tensor], Tensor]

GEMMA = Gemma4TextConfig(
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    global_head_dim=4,
    vocab_size=17,
    vocab_size_per_layer_input=17,
    hidden_size_per_layer_input=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
)


def test_shares_by_the_rules_are_those_of_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    with promoted():
        trace = ula.trace(llama_model(), token_ids(), progress=False)
        expected = frozen(trace).shares(-1, 3)
        monkeypatch.setattr(passes, "without_operator", frozenset)
        shares = frozen(trace).shares(-1, 3)
    assert float((shares.tokens - expected.tokens).abs().max() / expected.size.max()) < 1e-13
    assert float((shares.bias - expected.bias).abs().max() / expected.size.max()) < 1e-13


@pytest.mark.long
def test_values_of_an_earlier_layer_are_explained() -> None:
    model = randomize(Gemma4ForCausalLM(GEMMA).double().eval())
    with promoted():
        trace = ula.trace(model, token_ids(), progress=False)
        with pytest.raises(UncoveredError, match="not one matrix and one bias"):
            _ = trace.layers[-1].operator.bias
        shares = frozen(trace).complete_shares(-1, 3)
    assert float((shares.gap / shares.size).max()) < 1e-12
    assert bool((shares.tokens[:, :-1].abs() > 0).any())


@pytest.mark.long
def test_shares_by_layer_are_refused_with_the_layer() -> None:
    with promoted():
        run = frozen(ula.trace(Gemma4ForCausalLM(GEMMA).double().eval(), token_ids(), progress=False))
        with pytest.raises(UncoveredError, match=r"layers.2.self_attn .* not one matrix and one bias"):
            run.shares(-1, 3, by="layer")


class Mixer(nn.Module):
    """Sums over the tokens, and hands on the vector of a class that stands beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.summary = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, summary: Tensor) -> tuple[Tensor, Tensor]:
        return self.value(x).cumsum(1) / x.shape[1], self.summary(summary)


class Summarised(nn.Module):
    """A model whose logits are those of the class and of the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(17, 6), nn.Linear(6, 6)
        self.layers, self.head = nn.ModuleList([Mixer(), Mixer()]), nn.Linear(6, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        summary = self.first(x[:, :1])
        for layer in self.layers:
            mixed, summary = layer(x, summary)
            x = x + mixed
        return self.head(x[:, -1] + summary[:, 0])


def test_vectors_that_a_recorded_layer_returns_beside_its_output_are_explained() -> None:
    model = randomize(Summarised().double().eval())
    trace = ula.trace(model, token_ids(), progress=False)
    assert [layer.name for layer in trace.layers] == ["layers.0", "layers.1"]
    shares = frozen(trace).complete_shares(-1, 3)
    assert float((shares.gap / shares.size).max()) < 1e-12
    # The model is affine, so a token's share is its vector times the gradient.
    vectors = model.embedding(token_ids()).detach().requires_grad_()
    model.embedding.register_forward_hook(lambda module, args, out: vectors)
    model(token_ids())[:, 3].sum().backward()
    assert vectors.grad is not None
    assert float((shares.tokens - (vectors.detach() * vectors.grad).sum(-1)).abs().max()) < 1e-12


def linear_attention(query: Tensor, key: Tensor, value: Tensor, freeze: Freeze) -> Tensor:
    """Return sums with rectified scores, where no softmax tells which operand is the value."""
    query, key = freeze(query.relu()), freeze(key.relu())
    scores = query @ key.mT
    return scores @ value / freeze(scores.sum(-1, keepdim=True) + 1)


class ValueResidual(nn.Module):
    """Linear attention over values to which those of the first layer are added, which it returns too.

    A constant beside the values is gated, which is no part of a token in an operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.gate = (nn.Linear(8, 8) for _ in range(4))
        self.constant = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, first: Tensor | None, *, freeze: Freeze) -> tuple[Tensor, Tensor]:
        value = self.value(x)
        mixed = value if first is None else value + 0.4 * first
        gated = freeze(self.gate(x).sigmoid()) * self.constant
        return linear_attention(self.query(x), self.key(x), mixed, freeze) + gated, value


class Inner(nn.Module):
    """Linear attention as a module, which has hooks in some runs."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, freeze: Freeze) -> Tensor:
        return linear_attention(query, key, value, freeze)


class Joint(nn.Module):
    """Linear attention over the tokens of two streams, which returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.attention = Inner()

    def forward(self, x: Tensor, other: Tensor, *, freeze: Freeze) -> tuple[Tensor, Tensor]:
        both = torch.cat([x, other], 1)
        mixed = self.attention(self.query(both), self.key(both), self.value(both), freeze=freeze)
        return mixed[:, : x.shape[1]], mixed[:, x.shape[1] :]


class Layered(nn.Module):
    """Adds layers to a stream; what each returns in addition reaches the next one."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(8, 5)
        self.joins = layer is Joint

    def forward(self, inputs_embeds: Tensor, other: Tensor | None = None, freeze: Freeze = Tensor.clone) -> Tensor:
        x, first = inputs_embeds, other
        for layer in self.layers:
            mixed, returned = layer(x, first, freeze=freeze)
            x = x + mixed
            first = first + returned if self.joins else first if first is not None else returned
        return self.head(x)


@pytest.mark.parametrize("layer", [ValueResidual, Joint])
def test_what_a_recorded_layer_returns_in_addition_has_the_values_of_its_operator(layer: type[nn.Module]) -> None:
    model = randomize(Layered(layer).double().eval())
    draws = torch.Generator().manual_seed(0)
    streams = [torch.randn(2, n, 8, generator=draws, dtype=torch.float64) for n in ((7, 4) if layer is Joint else (7,))]
    inputs = dict(zip(("inputs_embeds", "other"), streams, strict=False))
    run = frozen(ula.trace(model, inputs, progress=False))
    shares = run.complete_shares(-1, lambda output: output[:, -1, 3])
    leaves = [stream.clone().requires_grad_() for stream in streams]
    gradients = torch.autograd.grad(model(*leaves, freeze=Tensor.detach)[:, -1, 3].sum(), leaves)
    expected = torch.cat([(x * g).sum(2).detach() for x, g in zip(leaves, gradients, strict=True)], 1)
    assert float((shares.tokens - expected).abs().max() / expected.abs().max()) < 1e-12
