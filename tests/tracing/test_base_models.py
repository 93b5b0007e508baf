"""Base models return features of images next to their vectors: explained are the vectors, and features are refused."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import unilinattn as ula
from unilinattn.errors import UncoveredError

GAP = 1e-10
"""Largest completeness gap in float64."""

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
TEXT = {
    "model_type": "opt",
    "vocab_size": 64,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "word_embed_proj_dim": 32,
    "initializer_range": 0.02,
}
"""A text model that computes in float64 throughout; the norms of LLaMA compute in float32.

LLaVA of transformers 5.6.2 reads the range, which its OPT calls otherwise.
"""

IMAGE = 63
"""The id of the places of an image among those of a text."""


def ids_around(places: int) -> Tensor:
    return torch.tensor([[5, 7, *[IMAGE] * places, 9, 4]])


def llava_next() -> tuple[Any, dict[str, Any]]:
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=TEXT,
        image_token_index=IMAGE,
        image_grid_pinpoints=[[56, 112], [112, 56]],
    )
    # The whole image has 16 patches; two tiles have 32 and an end to each of their 4 rows.
    inputs = {
        "input_ids": ids_around(52),
        "pixel_values": torch.randn(1, 3, 3, 56, 56),
        "image_sizes": torch.tensor([[56, 112]]),
    }
    return transformers.LlavaNextModel(config), inputs


def instruct_blip() -> tuple[Any, dict[str, Any]]:
    former = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = transformers.InstructBlipConfig(
        vision_config=VISION,
        qformer_config={**former, "num_hidden_layers": 2, "encoder_hidden_size": 32},
        text_config=TEXT,
        num_query_tokens=3,
        image_token_index=IMAGE,
    )
    inputs = {
        "input_ids": ids_around(3),
        "attention_mask": torch.ones(1, 7, dtype=torch.long),
        "qformer_input_ids": torch.tensor([[3, 8, 6]]),
        "pixel_values": torch.randn(1, 3, 56, 56),
    }
    return transformers.InstructBlipModel(config), inputs


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "LLaVA-NeXT": llava_next,
    "InstructBLIP": instruct_blip,
}


def in_double(build: Callable[[], tuple[Any, dict[str, Any]]]) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = build()
    doubled = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    return model.double().eval(), doubled


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_base_model_with_an_image_is_explained_as_the_vectors_of_its_text(name: str) -> None:
    model, inputs = in_double(MODELS[name])
    # Layers of the Q-Former read several tensors, which no composition does.
    is_composed = name == "LLaVA-NeXT"
    with nullcontext() if is_composed else pytest.warns(UserWarning, match="does not work here"):
        result = ula.explain(model, inputs, target=-1, progress=False)
    with torch.no_grad():
        output = model(**inputs)
    vectors = output.last_hidden_state if name == "LLaVA-NeXT" else output.language_model_outputs[0]
    assert result.method == ("alti" if is_composed else "attn_lrp")
    ids = inputs["input_ids"]
    for method in ("lrp", "logit"):
        shares = ula.explain(model, inputs, method=method, target=-1, progress=False)
        assert float(shares.extras["logit"]) == pytest.approx(float(vectors[0, -1].norm()), rel=GAP)
        assert shares.completeness_gap is not None
        assert shares.completeness_gap <= GAP
        # The tokens of other towers come before those of the text.
        assert shares.scores[0, -ids.shape[1] :][ids[0] == IMAGE].abs().max() > 1e-6


@pytest.mark.long
def test_a_function_of_the_features_of_an_image_is_refused() -> None:
    model, inputs = in_double(llava_next)
    with pytest.raises(UncoveredError, match="pixel_values reaches the output of LlavaNextModel beside the vectors"):
        ula.explain(
            model,
            inputs,
            method="lrp",
            target=-1,
            logit=lambda out: out.image_hidden_states.sum()[None],
            progress=False,
        )
