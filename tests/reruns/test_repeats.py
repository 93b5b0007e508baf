"""Inputs of a model of texts and images, on which a run computes several copies at once, or only one."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import unilinattn as ula
from unilinattn.reruns import rerun
from unilinattn.reruns.rerun import repeats
from unilinattn.scoring import numbers
from unilinattn.testing import promoted, relative_error
from unilinattn.testing.hosts import randomize
from unilinattn.tracing.trace import Trace

LIMIT = 1e-10
TEXT = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
TEXT |= dict(num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIGHT = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, patch_size=4)


def listed() -> tuple[nn.Module, dict[str, Any]]:
    """Return a model that reads the patches of all images in one list, and its inputs."""
    text = TEXT | dict(head_dim=8, rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]})
    config = transformers.PaddleOCRVLConfig(
        text_config=text,
        vision_config=SIGHT | dict(image_size=16),
        image_token_id=31,
        video_token_id=30,
        vision_start_token_id=29,
        vision_end_token_id=28,
    )
    inputs = {"input_ids": ids(), "pixel_values": pixels(16, 3, 4, 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == 31).long()
    return transformers.PaddleOCRVLForConditionalGeneration(config), inputs


def in_turn() -> tuple[nn.Module, dict[str, Any]]:
    """Return a model that projects one image after the other, and its inputs."""
    config = transformers.Lfm2VlConfig(
        text_config=TEXT | dict(layer_types=["full_attention"] * 2),
        vision_config=SIGHT | dict(num_patches=16),
        image_token_id=31,
        downsample_factor=2,
        projector_hidden_size=16,
    )
    inputs = {"input_ids": ids(), "pixel_values": pixels(1, 16, 48), "spatial_shapes": torch.tensor([[4, 4]])}
    return transformers.Lfm2VlForConditionalGeneration(config), inputs | {
        "pixel_attention_mask": torch.ones(1, 16).long()
    }


def at_once() -> tuple[nn.Module, dict[str, Any]]:
    """Return a model that computes each image as a sequence, and its inputs."""
    vision = transformers.CLIPVisionConfig(**SIGHT, image_size=8)
    text = transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=31, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config), {"input_ids": ids(), "pixel_values": pixels(1, 3, 8, 8)}


def ids() -> torch.Tensor:
    return torch.tensor([[5, 6, *[31] * 4, 7, 8, 9]])


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


HOSTS: dict[str, tuple[Callable[[], Any], bool]] = {
    "at once": (at_once, True),
    "in one list": (listed, False),
    "in turn": (in_turn, False),
}


@pytest.fixture(scope="module", params=HOSTS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, dict[str, Any], Trace, bool]:
    build, is_repeated = HOSTS[request.param]
    torch.manual_seed(0)
    model, inputs = build()
    model = randomize(model.double().eval())
    with promoted():
        return model, inputs, ula.trace(model, inputs, progress=False), is_repeated


def test_copies_of_an_image_are_computed_at_once_where_the_host_does(case: Any) -> None:
    _, _, trace, is_repeated = case
    with promoted():
        assert repeats(trace) == is_repeated


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        *("knockout", "occlusion", "gradient"),
        pytest.param(ula.methods.KernelShap(n_samples=60), id="kernel_shap"),
        pytest.param(ula.methods.IntegratedGradients(n_steps=5), id="integrated_gradients"),
    ],
)
def test_scores_do_not_depend_on_the_number_of_runs_at_once(
    case: Any, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, trace, _ = case
    with promoted():
        scores = ula.explain(trace, method=method, target=-1, progress=False).scores
        monkeypatch.setattr(numbers, "repeats", lambda _: False)
        single = ula.explain(trace, method=method, target=-1, progress=False).scores
    assert relative_error(scores, single) < LIMIT and bool((scores != 0).any())


@pytest.mark.long
def test_knockout_is_the_fall_of_the_logit_without_the_edges_of_a_token(case: Any) -> None:
    model, inputs, trace, _ = case
    texts = [index for index, layer in enumerate(trace.layers) if layer.output.shape[1] == 9]
    with promoted(), torch.no_grad():
        scores = ula.explain(trace, method="knockout", target=-1, progress=False).scores[0, -9:]
        logits = model(**inputs).logits[0, -1]
        for token in (0, 3, 7):
            with ula.cut(model, [(query, token) for query in range(token + 1, 9)], layers=texts):
                fall = logits[logits.argmax()] - model(**inputs).logits[0, -1, logits.argmax()]
            assert abs(float(scores[token] - fall)) < LIMIT


@pytest.mark.long
def test_a_run_of_several_copies_that_the_host_computes_in_turn_is_refused() -> None:
    model, inputs = in_turn()
    trace = ula.trace(randomize(model.double().eval()), inputs, progress=False)
    with pytest.raises(ula.UnilinattnError, match=r"calls model.multi_modal_projector on 1 sequences where the trace"):
        rerun.rerun(trace, torch.zeros(2, dtype=torch.long))


def test_gradients_reach_layers_of_packed_patches(case: Any) -> None:
    _, _, trace, _ = case
    with promoted():
        gradients = next(trace.gradients([-1]))
    assert len(gradients) == len(trace.layers) and all(float(gradient.norm()) > 0 for gradient in gradients)


@pytest.mark.long
def test_as_many_sequences_as_tokens_are_told_apart_in_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLNet's tensors begin with tokens, so that five sequences of five tokens have one shape in either order."""
    config = transformers.XLNetConfig(vocab_size=30, d_model=16, n_layer=2, n_head=2, d_inner=16, pad_token_id=0)
    model = randomize(transformers.XLNetForSequenceClassification(config).double().eval())
    with promoted():
        trace = ula.trace(model, torch.tensor([[5, 6, 7, 8, 9]]), progress=False)
        scores = ula.explain(trace, method="knockout", target=-1, progress=False).scores
        monkeypatch.setattr(import_module("unilinattn.methods.knockout"), "runs_at_once", lambda *_: 2)
        pairs = ula.explain(trace, method="knockout", target=-1, progress=False).scores
    assert relative_error(scores, pairs) < LIMIT and bool((scores != 0).all())
