"""Caches are told by what they are: states of earlier tokens are refused, empty ones and other inputs are not."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from unilinattn.errors import InputError, UncoveredError
from unilinattn.testing import randomize

IDS = torch.tensor([[1, 2, 3, 4, 5]])

GAP = 1e-10
"""Largest completeness gap in float64."""

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def gpt2() -> Any:
    """Return a model that computes in float64 throughout."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config).double().eval()


class Robot(nn.Module):
    """A model of ids that reads the state of a robot, a vector for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2()
        self.project = nn.Linear(3, 32).double()

    def forward(self, input_ids: Tensor, state: Tensor | None = None, cache: Any = None) -> Any:
        x = self.inner.get_input_embeddings()(input_ids)
        if state is not None:
            x = torch.cat([self.project(state)[:, None], x[:, 1:]], 1)
        return self.inner(inputs_embeds=x)


class Caching(nn.Module):
    """A model that makes a cache in each call, and fills it while it reads the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2()

    def forward(self, input_ids: Tensor) -> Any:
        return self.inner(input_ids, use_cache=True)


def test_a_vector_by_the_name_of_a_state_is_an_input() -> None:
    model, state = Robot().eval(), torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)
    result = ula.explain(model, {"input_ids": IDS, "state": state}, method="lrp", target=-1, progress=False)
    with torch.no_grad():
        logits = model(IDS, state).logits[0, -1]
    assert float(result.extras["logit"]) == pytest.approx(float(logits.max()), rel=GAP)
    assert result.completeness_gap is not None
    assert result.completeness_gap <= GAP
    # The state is the first token.
    assert abs(float(result.scores[0, 0])) > 1e-6


@pytest.mark.parametrize("name", ["state", "cache"])
def test_nested_states_by_these_names_are_refused(name: str) -> None:
    states = [(torch.ones(1, 2), torch.ones(1, 2))]
    with pytest.raises(InputError, match=f"the model was given {name} with the states of earlier tokens"):
        ula.trace(Robot().eval(), {"input_ids": IDS, name: states}, progress=False)


def test_the_states_of_rwkv_are_refused() -> None:
    torch.manual_seed(0)
    config = transformers.RwkvConfig(vocab_size=64, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    model = transformers.RwkvForCausalLM(config).eval()
    states = model(IDS, use_cache=True).state
    with pytest.raises(InputError, match="the model was given state with the states of earlier tokens"):
        ula.trace(model, {"input_ids": IDS, "state": states}, progress=False)


def test_an_empty_cache_with_a_window_is_left_out() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**TEXT, sliding_window=3)
    model = transformers.MistralForCausalLM(config).eval()
    cache = transformers.DynamicCache(config=config)
    trace = ula.trace(model, {"input_ids": IDS, "past_key_values": cache}, progress=False)
    assert len(trace.layers) == 2
    assert cache.get_seq_length() == 0
    model(IDS, past_key_values=cache)
    with pytest.raises(InputError, match="the model was given past_key_values with the states of earlier tokens"):
        ula.trace(model, {"input_ids": IDS, "past_key_values": cache}, progress=False)


def test_a_cache_that_a_model_fills_while_it_reads_its_tokens_has_no_earlier_ones() -> None:
    model = Caching().eval()
    result = ula.explain(model, IDS, method="lrp", target=-1, progress=False)
    expected = ula.explain(model.inner, IDS, method="lrp", target=-1, progress=False)
    assert result.completeness_gap is not None
    assert result.completeness_gap <= GAP
    torch.testing.assert_close(result.scores, expected.scores, rtol=GAP, atol=GAP)


class Inside(nn.Module):
    """A language model that mixes tokens in its own forward, by the keys of a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projections = nn.Embedding(64, 16), nn.ModuleList([nn.Linear(16, 48), nn.Linear(16, 48)])

    def forward(self, input_ids: Tensor, past_key_values: Any) -> Tensor:
        x = self.embedding(input_ids)
        for number, project in enumerate(self.projections):
            query, key, value = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in project(x).chunk(3, -1))
            key, value = past_key_values.update(key, value, number)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + mixed.transpose(1, 2).flatten(2)
        return x


class Outside(nn.Module):
    """A model that makes the cache of another one, and reads how many tokens are in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inside(), nn.Linear(16, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        cache = transformers.DynamicCache()
        x = self.inner(input_ids, past_key_values=cache)
        result: Tensor = self.head(x) / cache.get_seq_length()
        return result


def test_a_cache_of_a_module_that_mixes_in_its_own_forward_is_filled_once() -> None:
    torch.manual_seed(0)
    model = Outside().double().eval()
    # Each number of tokens is recorded once.
    for ids in (IDS, torch.tensor([[1, 2, 3, 4, 5, 6, 7]])):
        traced = ula.trace(model, ids, progress=False)
        assert [layer.name for layer in traced.layers] == ["inner.region_0", "inner.region_1"]
        torch.testing.assert_close(traced.output, model(ids), rtol=GAP, atol=GAP)
        result = ula.explain(traced, method="logit", target=-1, progress=False)
        assert result.completeness_gap is not None and result.completeness_gap <= GAP


def test_a_cache_that_another_module_filled_is_refused_with_the_module_that_reads_it() -> None:
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {"model_type": "gemma", **TEXT},
            "vision_config": {"model_type": "siglip_vision_model", **vision, "image_size": 28, "patch_size": 14},
            "image_token_index": 63,
            "projection_dim": 32,
        },
        dit_config={"model_type": "gemma", **TEXT},
        chunk_size=4,
        max_state_dim=8,
        max_action_dim=8,
    )
    model = transformers.PI0ForConditionalGeneration(config).eval()
    inputs = {
        "state": torch.randn(1, 8),
        "noise": torch.randn(1, 4, 8),
        "timestep": torch.tensor([0.5]),
        "input_ids": torch.tensor([[63, 63, 63, 63, 5, 7]]),
        "pixel_values": torch.randn(1, 1, 3, 28, 28),
        "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
    }
    with pytest.raises(UncoveredError, match=r"model\.dit \(GemmaModel\) was given past_key_values"):
        ula.trace(model, inputs, progress=False)


@pytest.mark.long
def test_packed_positions_are_explained_as_the_call_reads_them() -> None:
    """transformers finds packed sequences in the positions of a call without a cache only."""
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30)
    model = randomize(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))).eval()
    packed = {"input_ids": torch.arange(8)[None], "position_ids": torch.arange(4).repeat(2)[None]}
    for cached in ({}, {"use_cache": True}):
        with pytest.raises(InputError, match="returns another output with a cache"):
            ula.trace(model, packed | cached)
    result = ula.explain(model, packed | {"use_cache": False}, method="logit", target=-1, progress=False)
    assert not bool(result.scores[:, :4].any())
    plain = {"input_ids": torch.arange(8)[None], "position_ids": torch.arange(8)[None], "use_cache": True}
    assert not ula.trace(model, plain).warnings
