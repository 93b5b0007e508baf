"""Softmax attention to windows of a model's tokens, and what merges patches between such layers."""

import pytest
import torch
import transformers
from torch import nn

import unilinattn as ula
from unilinattn.testing import promoted
from unilinattn.testing.hosts import randomize

LIMIT = 1e-10


def swin() -> nn.Module:
    """Return a Swin Transformer: windows of 4 x 4 patches in a grid of 10 x 10, padded, then shifted by two."""
    sizes = dict(image_size=40, patch_size=4, window_size=4, embed_dim=8, depths=[2, 1], num_heads=[2, 2])
    config = transformers.SwinConfig(**sizes, num_labels=5)
    return randomize(transformers.SwinForImageClassification(config).double().eval())


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 40, 40, generator=generator, dtype=torch.float64)


@pytest.mark.long
def test_the_module_around_an_attention_to_windows_has_the_tokens_of_the_model(image: torch.Tensor) -> None:
    with promoted():
        made = ula.trace(swin(), image, progress=False)
        assert [tuple(layer.output.shape[:2]) for layer in made.layers] == [(2, 100), (2, 100), (2, 25), (2, 25)]
        assert max(layer.operator.reconstruction_error() for layer in made.layers) < LIMIT


@pytest.mark.long
@pytest.mark.parametrize("method", ["logit", "lrp", "attn_lrp", "rollout", "attribution"])
def test_a_model_of_shifted_windows_is_explained(image: torch.Tensor, method: str) -> None:
    with promoted():
        result = ula.explain(swin(), image, method=method, target=-1, progress=False)
    assert bool(result.scores.isfinite().all())
    # Maps have a key for each token of both grids, shares one for each token of the first.
    assert result.scores.shape == (2, 125 if method in ("rollout", "attribution") else 100)
    if method in ("logit", "lrp"):
        assert result.completeness_gap is not None and result.completeness_gap < LIMIT


@pytest.mark.long
def test_tokens_of_a_window_reach_only_their_window(image: torch.Tensor) -> None:
    made = ula.trace(swin(), image, progress=False)
    for layer, shift in zip(made.layers[:2], (0, 2), strict=True):
        # The grid of 10 x 10 is padded to 12 x 12, and windows end after 4, 8 and 12 columns of the shifted grid.
        window = (torch.arange(10) - shift) % 12 // 4
        # What the shift brings from the other end of the image is masked.
        region = torch.where(torch.arange(10) < shift, 3, window)
        row, column = region.repeat_interleave(10), region.repeat(10)
        same = (row[:, None] == row) & (column[:, None] == column)
        vectors = layer.operator.contributions(torch.arange(100)).norm(dim=-1)
        assert bool((vectors[:, ~same] < 1e-12).all()) and bool((vectors[:, same] > 1e-9).all())


def test_images_of_one_text_are_no_windows() -> None:
    sizes = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=4, patch_size=2)
    text = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=20)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=19, vision_feature_layer=-1
    )
    model = randomize(transformers.LlavaForConditionalGeneration(config).double().eval())
    ids = torch.tensor([[3, *[19] * 8, 4, 5]])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 4, 4, dtype=torch.float64)}
    made = ula.trace(model, inputs, progress=False)
    assert [tuple(layer.output.shape[:2]) for layer in made.layers] == [(2, 5), (1, 11)]
    assert [layer.kind for layer in made.layers] == ["softmax attention"] * 2


def mllama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a model whose text reads two tiles of five patches, each filled up to eight, and its inputs."""
    heads = dict(num_attention_heads=2, hidden_size=8)
    vision = dict(heads, image_size=8, patch_size=4, vision_output_dim=16, intermediate_layers_indices=[0])
    vision |= dict(num_hidden_layers=1, num_global_layers=1, intermediate_size=12, max_num_tiles=2)
    text = dict(heads, vocab_size=20, num_hidden_layers=2, num_key_value_heads=2, intermediate_size=12)
    text |= dict(cross_attention_layers=[1], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    ratios = dict(supported_aspect_ratios=[[1, 1], [1, 2]])
    config = transformers.MllamaConfig(
        vision_config=transformers.MllamaVisionConfig(**vision, **ratios),
        text_config=transformers.MllamaTextConfig(**text, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        image_token_index=20,
    )
    model = randomize(transformers.MllamaForConditionalGeneration(config).double().eval())
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "input_ids": torch.tensor([[3, 20, 4, 5]]),
        "pixel_values": torch.randn(1, 1, 2, 3, 8, 8, generator=generator, dtype=torch.float64),
        "aspect_ratio_mask": torch.ones(1, 1, 2, dtype=torch.long),
        "aspect_ratio_ids": torch.tensor([[2]]),
        "cross_attention_mask": torch.ones(1, 4, 1, 2, dtype=torch.long),
    }
    return model, inputs


@pytest.mark.long
def test_tiles_of_an_image_are_one_sequence_of_keys() -> None:
    model, inputs = mllama()
    with promoted():
        made = ula.trace(model, inputs, progress=False)
        cross = next(layer for layer in made.layers if layer.name.endswith("cross_attn"))
        # Five patches of each tile, the class token among them.
        assert cross.operator.matrix(port="encoder").shape[-2:] == (4, 10)
        assert cross.reconstruction_error() < LIMIT
        result = ula.explain(made, method="logit", target=-1, progress=False)
    assert result.streams is not None and list(result.streams["key"].values()) == [16, 4]
    assert result.completeness_gap is not None and result.completeness_gap < LIMIT


@pytest.mark.parametrize("side", [8, 12])
def test_a_neck_that_permutes_an_image_has_the_tokens_of_its_model(side: int) -> None:
    """The grid has 8 or 12 rows; 12 is the number of channels behind the neck, too."""
    sizes = dict(hidden_size=16, output_channels=12, num_hidden_layers=1, num_attention_heads=2, mlp_dim=16)
    sizes |= dict(image_size=4 * side, patch_size=4, num_pos_feats=6, window_size=0, global_attn_indexes=[0])
    model = randomize(transformers.SamVisionModel(transformers.SamVisionConfig(**sizes)).double().eval())
    image = torch.randn(1, 3, 4 * side, 4 * side, dtype=torch.float64)
    with promoted():
        neck = ula.trace(model, image, progress=False).layers[-1]
        assert (tuple(neck.input.shape), tuple(neck.output.shape)) == ((1, side**2, 16), (1, side**2, 12))
        assert neck.operator.reconstruction_error() < LIMIT
        norms = neck.operator.contributions(side + 1)[0].norm(dim=-1).reshape(side, side)
    # The convolution of 3 x 3 pixels around the second one of the second row.
    assert bool((norms[:3, :3] > 1e-9).all()) and int((norms > 1e-9).sum()) == 9


@pytest.mark.long
def test_a_trial_inside_a_run_leaves_the_hidden_states_that_the_host_collects() -> None:
    """LLaVA-NeXT takes the last but one hidden state of its vision tower, whose layers the search calls again."""
    sizes = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=4, patch_size=2)
    text = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=20)
    shapes = dict(image_grid_pinpoints=[[4, 4]], vision_feature_layer=-2)
    config = transformers.LlavaNextConfig(vision_config=vision, text_config=text, image_token_id=19, **shapes)
    model = randomize(transformers.LlavaNextForConditionalGeneration(config).double().eval())
    inputs = {"input_ids": torch.tensor([[3, *[19] * 10, 4, 5]]), "image_sizes": torch.tensor([[4, 4]])}
    inputs["pixel_values"] = torch.randn(1, 2, 3, 4, 4, dtype=torch.float64)
    with promoted():
        with torch.no_grad():
            logits = model(**inputs).logits
        made = ula.trace(model, inputs, progress=False)
    assert [tuple(layer.output.shape[:2]) for layer in made.layers] == [(2, 5), (2, 5), (1, 13), (1, 13)]
    assert torch.allclose(made.output.logits, logits, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("method", ["contribution", "knockout"])
def test_layers_and_scores_of_an_image_are_the_same_in_a_batch(method: str) -> None:
    """SegFormer convolves tokens between two projections, and they lie in another order for one image than for two.

    Its attention to fewer keys is recorded although its class has an adapter, also in runs without some edges.
    """
    sizes = dict(hidden_sizes=[8, 12], decoder_hidden_size=8, depths=[1, 1], num_attention_heads=[1, 2])
    strides = dict(num_encoder_blocks=2, sr_ratios=[2, 1], strides=[4, 2], patch_sizes=[7, 3], mlp_ratios=[2, 2])
    model = randomize(transformers.SegformerForImageClassification(transformers.SegformerConfig(**sizes, **strides)))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with promoted():
        model.double().eval()
        both, single = ula.trace(model, images, progress=False), ula.trace(model, images[1:], progress=False)
        scores = ula.explain(both, method=method, target=-1, progress=False).scores[1]
        assert torch.allclose(scores, ula.explain(single, method=method, target=-1, progress=False).scores[0], 1e-9)
    assert [layer.name for layer in both.layers] == [layer.name for layer in single.layers]
    assert any(layer.name.endswith(".0.mlp") for layer in both.layers)
    assert bool((scores != 0).any())
