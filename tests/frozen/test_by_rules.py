"""Attention whose values have no matrix from its input runs by the rules of functions in the frozen run."""

import pytest
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
        monkeypatch.setattr(passes, "unmapped", frozenset)
        shares = frozen(trace).shares(-1, 3)
    assert float((shares.tokens - expected.tokens).abs().max() / expected.size.max()) < 1e-13
    assert float((shares.bias - expected.bias).abs().max() / expected.size.max()) < 1e-13


def test_values_of_an_earlier_layer_are_explained() -> None:
    model = randomize(Gemma4ForCausalLM(GEMMA).double().eval())
    with promoted():
        trace = ula.trace(model, token_ids(), progress=False)
        with pytest.raises(UncoveredError, match="not one matrix and one bias"):
            _ = trace.layers[-1].operator.bias
        shares = frozen(trace).complete_shares(-1, 3)
    assert float((shares.gap / shares.size).max()) < 1e-12
    assert bool((shares.tokens[:, :-1].abs() > 0).any())


def test_shares_by_layer_are_refused_with_the_layer() -> None:
    with promoted():
        run = frozen(ula.trace(Gemma4ForCausalLM(GEMMA).double().eval(), token_ids(), progress=False))
        with pytest.raises(UncoveredError, match=r"layers.2.self_attn .* not one matrix and one bias"):
            run.shares(-1, 3, by="layer")
