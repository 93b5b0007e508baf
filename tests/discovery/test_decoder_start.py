"""A text for a model with an encoder and a decoder: its decoder has one token, the start."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import unilinattn as ula
from unilinattn.testing import randomize

IDS = dict(vocab_size=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)
BART = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16)
HEADS = dict(encoder_attention_heads=2, decoder_attention_heads=2)
TEXT = torch.arange(3, 18)[None]


def mvp() -> Any:
    """A decoder whose attention is computed by its module, and recorded."""
    config = transformers.MvpConfig(**BART, **HEADS, **IDS, max_position_embeddings=32)
    return transformers.MvpForConditionalGeneration(config)


def led() -> Any:
    config = transformers.LEDConfig(
        **BART,
        **HEADS,
        **IDS,
        attention_window=4,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    )
    return transformers.LEDForConditionalGeneration(config)


def t5() -> Any:
    sizes = dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **IDS))


def t5gemma2() -> Any:
    """A decoder whose mask is computed by `vmap`, in which the tensors of its tokens have no storage."""
    text = dict(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    sight = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    encoder = dict(text_config=text, vision_config=sight, mm_tokens_per_image=4)
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=39)
    return transformers.T5Gemma2ForConditionalGeneration(config)


@pytest.mark.long
@pytest.mark.parametrize("build", [mvp, led, t5])
@pytest.mark.parametrize("encoded", [15, 3, 1])
def test_the_start_of_a_decoder_has_the_layers_and_the_method_of_more_tokens(
    build: Callable[[], Any], encoded: int
) -> None:
    torch.manual_seed(0)
    model, names, methods = randomize(build().eval()), [], []
    for decoded in (1, 3):
        inputs = {"input_ids": TEXT[:, :encoded], "decoder_input_ids": torch.tensor([[2, 5, 7]])[:, :decoded]}
        traced = ula.trace(model, inputs, progress=False)
        assert max(layer.reconstruction_error() for layer in traced.layers) < 1e-5
        names.append([layer.name for layer in traced.layers])
        methods.append(ula.explain(traced, target=-1, progress=False).method)
    assert names[0] == names[1]
    assert methods == ["attn_lrp", "attn_lrp"]


@pytest.mark.long
@pytest.mark.skipif(not hasattr(transformers, "T5Gemma2Config"), reason="this transformers has no T5Gemma 2")
def test_ids_inside_vmap_are_no_lookups() -> None:
    torch.manual_seed(0)
    inputs = {"input_ids": TEXT, "decoder_input_ids": torch.tensor([[2]])}
    result = ula.explain(randomize(t5gemma2().eval()), inputs, method="logit", target=-1, progress=False)
    assert result.completeness_gap is not None and result.completeness_gap < 1e-5


def whisper() -> Any:
    sizes = dict(num_mel_bins=4, max_source_positions=10, max_target_positions=16)
    config = transformers.WhisperConfig(
        **BART, **HEADS, **IDS, **sizes, suppress_tokens=None, begin_suppress_tokens=None
    )
    return transformers.WhisperForConditionalGeneration(config)


def speech_to_text() -> Any:
    """An encoder whose positions are those of ids, a mask of its frames."""
    sizes = dict(input_feat_per_channel=4, conv_channels=8, max_source_positions=40, max_target_positions=16)
    return transformers.Speech2TextForConditionalGeneration(
        transformers.Speech2TextConfig(**BART, **HEADS, **IDS, **sizes)
    )


@pytest.mark.long
@pytest.mark.parametrize("build", [t5, mvp, whisper, speech_to_text])
def test_labels_are_the_tokens_of_the_decoder(build: Callable[[], Any]) -> None:
    """Of labels the model makes its decoder's ids, whose part stood in the bias."""
    torch.manual_seed(0)
    model, labels = randomize(build().eval()), torch.tensor([[5, 7, 11, 3, 9]])
    inputs = {"input_ids": TEXT[:, :6]}
    if build in (whisper, speech_to_text):
        inputs = {"input_features": torch.randn(1, 4, 20) if build is whisper else torch.randn(1, 20, 4)}
    shifted = torch.tensor([[IDS["decoder_start_token_id"], 5, 7, 11, 3]])
    results = [
        ula.explain(model, {**inputs, **decoded}, method="logit", target=-1, progress=False)
        for decoded in ({"labels": labels}, {"decoder_input_ids": shifted})
    ]
    assert results[0].scores.shape[1] == results[1].scores.shape[1]
    assert torch.allclose(results[0].scores, results[1].scores, rtol=1e-4, atol=1e-5)
    assert torch.allclose(results[0].extras["bias"], results[1].extras["bias"], rtol=1e-4, atol=1e-5)
