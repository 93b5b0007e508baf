"""Layers of which later modules need more than their operator's output run by the rules of functions."""

import pytest
from torch import Tensor, nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

import unilinattn as ula
from tests.frozen.detached import llama_model, token_ids
from unilinattn.errors import UncoveredError
from unilinattn.frozen import passes
from unilinattn.frozen.run import frozen
from unilinattn.testing import promoted
from unilinattn.testing.hosts import randomize

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
