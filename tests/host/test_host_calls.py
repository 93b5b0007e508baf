"""Hosts whose embedding, cache, coordinates, eager function or keys differ from those of most models."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from unilinattn.call.attention_interface import capture
from unilinattn.errors import UnilinattnError
from unilinattn.host.inputs import vocabulary_size
from unilinattn.testing import TOLERANCES, left_as_found, relative_error
from unilinattn.testing.hosts.basic import transformers_model

SMALL = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
XLM = dict(vocab_size=20, emb_dim=8, n_layers=1, n_heads=2, n_langs=1, max_position_embeddings=16)
VISION = dict(SMALL, image_size=8, patch_size=4)


def model_of(name: str, config: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers_model(name, config, **settings)().eval()


def ids(length: int = 5) -> Tensor:
    return torch.randint(3, 17, (2, length), generator=torch.Generator().manual_seed(1))


def clip() -> nn.Module:
    text = dict(SMALL, vocab_size=20, max_position_embeddings=16, eos_token_id=19)
    return model_of("CLIPModel", "CLIPConfig", text_config=text, vision_config=VISION, projection_dim=8)


def test_a_model_whose_input_embedding_is_unknown_is_traced() -> None:
    model = clip()
    with pytest.raises(NotImplementedError):
        model.get_input_embeddings()
    assert vocabulary_size(model) is None
    trace = ula.trace(model, {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 8, 8)}, progress=False)
    assert [layer.name.split(".")[0] for layer in trace.layers] == ["vision_model", "text_model"]
    assert all(layer.reconstruction_error() < TOLERANCES["layer", torch.float32] for layer in trace.layers)


@pytest.mark.long
def test_such_a_model_of_one_tower_is_recorded() -> None:
    model = model_of("CanineModel", "CanineConfig", **SMALL)
    trace = ula.trace(model, {"input_ids": ids(9)}, progress=False)
    assert {layer.input.shape[1] for layer in trace.layers} >= {2, 9}
    assert all(layer.reconstruction_error() < TOLERANCES["layer", torch.float32] for layer in trace.layers)


@pytest.mark.parametrize("name", ["XLMWithLMHeadModel", "FlaubertForSequenceClassification"])
def test_a_cache_that_the_host_always_fills_is_copied_in_the_search_for_mixers(name: str) -> None:
    model = model_of(name, "XLMConfig" if name.startswith("XLM") else "FlaubertConfig", **XLM)
    with left_as_found(model):
        trace = ula.trace(model, {"input_ids": ids()}, progress=False)
    assert {layer.architecture for layer in trace.layers} == {"recorded"}
    assert all(layer.reconstruction_error() < TOLERANCES["layer", torch.float32] for layer in trace.layers)


@pytest.mark.skipif(transformers.__version__ == "5.6.2", reason="Pix2Struct of transformers 5.6.2 is refused")
def test_row_and_column_numbers_inside_the_input_are_not_perturbed() -> None:
    sizes = dict(hidden_size=8, patch_embed_hidden_size=12, d_ff=8, d_kv=4, num_hidden_layers=1, num_attention_heads=2)
    model = model_of("Pix2StructVisionModel", "Pix2StructVisionConfig", **sizes, seq_len=8)
    patches = 9 * torch.randn(2, 8, 14, generator=torch.Generator().manual_seed(0))
    patches[..., 0], patches[..., 1] = torch.arange(8) // 4, torch.arange(8) % 4
    trace = ula.trace(model, {"flattened_patches": patches, "attention_mask": torch.ones(2, 8)}, progress=False)
    assert trace.layers[0].reconstruction_error() < TOLERANCES["layer", torch.float32]


def test_a_tower_runs_by_the_eager_function_that_its_own_code_names() -> None:
    # A ratio below one would merge tokens after the last layer.
    sizes = dict(VISION, intermediate_size=8, pixel_shuffle_ratio=1.0)
    outputs = dict(vision_output_dim=8, projector_input_dim=8, projector_output_dim=8)
    model = model_of("Llama4VisionModel", "Llama4VisionConfig", **sizes, **outputs)
    pixels = torch.randn(2, 3, 8, 8)
    trace = ula.trace(model, {"pixel_values": pixels}, progress=False)
    assert trace.layers[0].reconstruction_error() < TOLERANCES["layer", torch.float32]
    with torch.no_grad():
        expected = model(pixels).last_hidden_state
    assert relative_error(trace.output.last_hidden_state, expected) <= TOLERANCES["layer", torch.float32]


def test_a_tower_without_the_usual_name_in_its_file_uses_its_own() -> None:
    sizes = dict(SMALL, horizon_length=4, patch_length=4, context_length=16, freq_size=3, head_dim=4)
    model = model_of("TimesFmModel", "TimesFmConfig", **sizes)
    series = {"past_values": torch.randn(2, 16), "past_values_padding": torch.zeros(2, 16), "freq": torch.zeros(2, 1)}
    series["freq"] = series["freq"].long()
    trace = ula.trace(model, series, progress=False)
    assert trace.layers[0].reconstruction_error() < TOLERANCES["layer", torch.float32]


def merged() -> tuple[nn.Module, dict[str, Tensor]]:
    """A decoder whose attention has its own tokens and the encoder's as keys."""
    text = dict(SMALL, vocab_size=20, num_key_value_heads=1, head_dim=4, layer_types=["full_attention"])
    encoder = {"text_config": text, "vision_config": VISION, "image_token_index": 19, "mm_tokens_per_image": 4}
    model = model_of("T5Gemma2ForConditionalGeneration", "T5Gemma2Config", encoder=encoder, decoder=text)
    return model, {"input_ids": ids(), "decoder_input_ids": ids()}


@pytest.mark.long
def test_keys_of_two_streams_in_one_attention_are_two_ports() -> None:
    model, inputs = merged()
    with left_as_found(model):
        trace = ula.trace(model, inputs, progress=False)
    layer = trace.layers[1]
    assert layer.architecture == "recorded" and len(layer.ports) == 2
    assert all(layer.reconstruction_error() < TOLERANCES["layer", torch.float32] for layer in trace.layers)


def test_cross_attention_whose_norm_stands_inside_is_recorded() -> None:
    sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=20)
    model = model_of("BertLMHeadModel", "BertConfig", **sizes, is_decoder=True, add_cross_attention=True)
    inputs = {"input_ids": ids(), "encoder_hidden_states": torch.randn(2, 4, 8)}
    trace = ula.trace(model, inputs, progress=False)
    assert [layer.architecture for layer in trace.layers] == ["bert", "bert"]
    assert all(layer.reconstruction_error() < TOLERANCES["layer", torch.float32] for layer in trace.layers)


@pytest.mark.long
@pytest.mark.skipif(transformers.__version__ == "5.6.2", reason="about hosts of newer versions of transformers")
@pytest.mark.parametrize(
    ("name", "config", "inputs"),
    [
        # Its forward passes its keyword arguments on, and sets `use_cache` too.
        ("MimiEncoderModel", "MimiEncoderConfig", {"input_values": torch.ones(1, 1, 3200)}),
        # A signal that is cut like tokens would be too short for its last convolutions, which name no stride.
        ("WavLMForXVector", "WavLMConfig", {"input_values": torch.linspace(-1, 1, 12800)[None]}),
        # It copies its configuration in its forward.
        ("NeoMMEModel", "NeoMMEConfig", {"input_ids": torch.tensor([[3, 4, 5]])}),
    ],
)
def test_hosts_of_unusual_calls_are_traced_or_refused(name: str, config: str, inputs: dict[str, Tensor]) -> None:
    from tools.sweep_configs import tiny_config

    torch.manual_seed(0)
    model = getattr(transformers, name)(tiny_config(getattr(transformers, config))).eval()
    with torch.no_grad():
        model(**inputs)
    try:
        ula.trace(model, inputs, progress=False)
    except UnilinattnError as error:
        assert str(error)


@pytest.mark.skipif(
    not hasattr(transformers, "NemotronAsrStreamingEncoder"), reason="this transformers has no NemotronAsrStreaming"
)
def test_attention_that_combines_the_mask_with_scores_of_its_own_reads_the_mask_of_its_implementation() -> None:
    sizes = dict(SMALL, num_mel_bins=8, subsampling_factor=2, subsampling_conv_channels=4)
    model = model_of("NemotronAsrStreamingEncoder", "NemotronAsrStreamingEncoderConfig", **sizes)
    signal = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(0))
    calls: list[Any] = []
    with torch.no_grad():
        own = model(signal).last_hidden_state
        with capture(model, lambda module, record: calls.append(record)):
            captured = model(signal).last_hidden_state
    assert len(calls) == 1
    assert relative_error(captured, own) < TOLERANCES["layer", torch.float32]


def test_the_layers_of_a_run_share_the_causal_mask() -> None:
    model = model_of("GPT2LMHeadModel", "GPT2Config", vocab_size=20, n_embd=8, n_layer=3, n_head=2)
    layers = ula.trace(model, {"input_ids": ids()}, progress=False).layers
    masks = {id(layer.seen[0].record.mask) for layer in layers}
    assert len(layers) == 3 and len(masks) == 1
