"""Images of several sizes as packed tokens, (token, channel), whose patches take the places of a text's tokens."""

from typing import Any

import pytest
import torch
import transformers

import unilinattn as ula
from unilinattn.errors import UncoveredError
from unilinattn.testing import promoted
from unilinattn.testing.hosts import randomize

GRIDS = torch.tensor([[1, 4, 4], [1, 2, 4]])
"""(time, height, width) of each image, of which 2 x 2 patches are one token of the text."""


def inputs() -> dict[str, Any]:
    ids = torch.tensor([[3, 4, 4, 4, 4, 7, 3, 4, 4, 9, 8]])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == 4).long(),
        "image_grid_thw": GRIDS,
        "pixel_values": torch.randn(24, 3 * 2 * 2 * 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    }


def qwen() -> Any:
    """Qwen2-VL, whose vision attention calls the attention function once for each image."""
    text = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=20)
    vision = dict(depth=2, embed_dim=16, hidden_size=16, num_heads=2, patch_size=2, temporal_patch_size=2)
    rope = {"type": "mrope", "mrope_section": [2, 1, 1], "rope_theta": 10000, "rope_type": "default"}
    config = transformers.Qwen2VLConfig(
        text_config={**text, "num_key_value_heads": 1, "rope_parameters": rope, "bos_token_id": 0, "eos_token_id": 1},
        vision_config={**vision, "spatial_merge_size": 2},
        image_token_id=4,
        video_token_id=5,
        vision_start_token_id=3,
    )
    return randomize(transformers.Qwen2VLForConditionalGeneration(config).double().eval())


@pytest.mark.long
def test_each_image_is_a_sequence_of_the_packed_tokens() -> None:
    with promoted():
        trace = ula.trace(qwen(), inputs(), progress=False)
        vision = [layer for layer in trace.layers if ".visual.blocks." in layer.name]
        assert [tuple(layer.input.shape) for layer in vision] == [(1, 24, 16)] * 2
        assert max(layer.reconstruction_error() for layer in trace.layers) < 1e-12
        matrix = vision[0].operator.matrix("core")[0]
    assert bool((matrix[:16, 16:] == 0).all()) and bool((matrix[16:, :16] == 0).all()) and bool(matrix[17, 22] > 0)


@pytest.mark.long
def test_the_merging_of_packed_patches_is_a_layer() -> None:
    with promoted():
        trace = ula.trace(qwen(), inputs(), progress=False)
        (merger,) = (layer for layer in trace.layers if layer.name.endswith(".merger"))
        assert merger.input.shape == (1, 24, 16) and merger.output.shape == (1, 6, 16)
        assert merger.reconstruction_error() < 1e-12
        reads = merger.operator.contributions(5)
    assert bool((reads[0, :20] == 0).all()) and bool((reads[0, 20:] != 0).any())


@pytest.mark.long
def test_the_shares_of_text_and_patches_add_up() -> None:
    with promoted():
        result = ula.explain(qwen(), inputs(), method="logit", target=-1, progress=False)
    assert result.scores.shape == (1, 11) and result.completeness_gap is not None
    assert result.completeness_gap < 1e-10
    assert bool((result.scores[0, 1:5].abs() > 0).all())


@pytest.mark.long
def test_images_that_are_added_to_deeper_layers_too_are_refused_by_name() -> None:
    # Qwen3-VL adds features of its vision tower to the stream of the text; it accepts no ids without their places.
    text = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=20)
    vision = dict(depth=2, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, temporal_patch_size=2)
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000}
    config = transformers.Qwen3VLConfig(
        text_config={**text, "num_key_value_heads": 1, "head_dim": 8, "rope_parameters": rope},
        vision_config={**vision, "out_hidden_size": 16, "spatial_merge_size": 2, "deepstack_visual_indexes": [0]},
        image_token_id=4,
        vision_start_token_id=3,
    )
    model = randomize(transformers.Qwen3VLForConditionalGeneration(config).double().eval())
    with pytest.raises(UncoveredError, match="pixel_values"):
        ula.explain(model, inputs(), method="logit", target=-1, progress=False)


@pytest.mark.long
def test_patches_with_their_places_are_a_stream_beside_the_text() -> None:
    """Pix2Struct reads the row and the column of a patch from its first channels, so that noise is no other input."""
    sizes = dict(hidden_size=8, d_kv=4, d_ff=8, num_heads=2)
    vision = dict(sizes, patch_embed_hidden_size=12, num_hidden_layers=1, num_attention_heads=2)
    text = dict(sizes, vocab_size=20, num_layers=1)
    config = transformers.Pix2StructConfig(text_config=text, vision_config=vision)
    model = randomize(transformers.Pix2StructForConditionalGeneration(config).double().eval())
    patches = torch.randn(1, 6, 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    patches[..., 0], patches[..., 1] = torch.arange(6) // 3 + 1, torch.arange(6) % 3 + 1
    arguments = {"flattened_patches": patches, "decoder_input_ids": torch.tensor([[0, 5, 6]])}
    with promoted():
        result = ula.explain(model, arguments, method="logit", target=-1, progress=False)
    assert result.streams["key"] == {"encoder": 6, "decoder": 3}
    assert result.completeness_gap is not None and result.completeness_gap < 1e-10
    assert bool((result.scores.abs() > 1e-9).all())
