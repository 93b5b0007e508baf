"""Targets of decoders whose tokens are object queries, which are no keys of the scores."""

from typing import Any

import pytest
import torch
import transformers

import unilinattn as ula
from unilinattn.testing import randomize


def detr(queries: int) -> Any:
    """A DETR whose decoder has its own tokens: object queries, which are no tokens of the image."""
    sizes = dict(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])
    attention = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32)
    config = transformers.DetrConfig(
        **attention,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        num_queries=queries,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=transformers.ResNetConfig(**sizes, out_features=["stage4"]),
    )
    return randomize(transformers.DetrForObjectDetection(config).eval()).double().requires_grad_(False)


@pytest.mark.long
@pytest.mark.parametrize("queries", [4, 5, 3])
def test_a_target_is_a_query_of_the_decoder(queries: int) -> None:
    # The image has four tokens.
    generator = torch.Generator().manual_seed(0)
    model, pixels = detr(queries), torch.randn(1, 3, 64, 64, generator=generator, dtype=torch.float64)
    traced, rows = ula.trace(model, pixels, progress=False), model(pixels).logits[0].amax(-1)
    for target in (0, -1, queries - 1):
        result = ula.explain(traced, method="logit", target=target, progress=False)
        torch.testing.assert_close(result.extras["logit"].flatten(), rows[target][None])
        assert result.completeness_gap is not None and float(result.completeness_gap) < 1e-12
        assert f"at position {target % queries} of 'decoder' = " in repr(result)
    every = ula.explain(traced, method="logit", progress=False)
    assert every.sizes["query"] == queries and every.sizes["key"] == 4
    assert every.streams == {"query": {"decoder": queries}, "key": {"encoder": 4}}


@pytest.mark.parametrize("method", ["raw", "alti"])
def test_cross_attention_of_equal_lengths_names_both_streams(method: str) -> None:
    sizes = dict(vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_decoder_layers=1, num_heads=4)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    inputs = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "decoder_input_ids": torch.tensor([[13, 14, 15, 16]])}
    traced = ula.trace(randomize(model.eval()), inputs, progress=False)
    assert "EncDecAttention" in traced.layers[2].name
    every = ula.explain(traced, method=method, layers=[2], progress=False)
    assert every.streams == {"query": {"decoder": 4}, "key": {"encoder": 4}} and not every.queries_are_keys
    # A query's number is no key: none is left out as its own token.
    largest = every.scores.flatten().abs().argmax()
    query, key = divmod(int(largest), 4)
    assert f"EncDecAttention, {query} <- {key} " in repr(every)
    own = ula.explain(traced, method=method, layers=[1], progress=False)
    assert own.streams == {} and own.queries_are_keys
    one = ula.explain(traced, method=method, layers=[2], target=-1, progress=False)
    assert "at position 3 of 'decoder'" in repr(one)
