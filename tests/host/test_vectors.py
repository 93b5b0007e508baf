"""The function of an output that errors name gives a number for each sequence."""

import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.utils import ModelOutput

import unilinattn as ula
from unilinattn.errors import InputError
from unilinattn.host.vectors import example
from unilinattn.testing import randomize

OUTPUTS: dict[str, tuple[Any, str]] = {
    "vectors of tokens": (
        ModelOutput(last_hidden_state=torch.randn(2, 5, 3)),
        "lambda out: out.last_hidden_state[:, -1, 0]",
    ),
    "similarities": (ModelOutput(loss=None, similarities=torch.randn(2, 2)), "lambda out: out.similarities[:, 0]"),
    "numbers": ({"values": torch.randn(2)}, "lambda out: out['values'][:]"),
    "maps": ([torch.randn(2, 3, 8, 8), torch.randn(2, 3, 4, 4)], "lambda out: out[0][:, 0, 0, 0]"),
    "a tensor": (torch.randn(2, 5, 3), "lambda out: out[:, -1, 0]"),
    "nothing": ({"loss": None}, "lambda out: out.last_hidden_state[:, -1, 0]"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_function_fits_the_output(name: str) -> None:
    output, expected = OUTPUTS[name]
    assert example(output) == expected
    if name != "nothing":
        numbers: Tensor = eval(expected)(output)
        assert numbers.shape == (2,)


@pytest.mark.long
def test_the_error_of_a_dual_encoder_names_a_function_that_works() -> None:
    width = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = dict(vocab_size=30, max_position_embeddings=8, bos_token_id=1, eos_token_id=2, pad_token_id=0, **width)
    vision = dict(image_size=8, patch_size=4, **width)
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    model = randomize(transformers.CLIPModel(config).eval())
    inputs = {"input_ids": torch.tensor([[1, 5, 7, 2]]), "pixel_values": torch.randn(1, 3, 8, 8)}
    function = "lambda out: out.logits_per_image.diagonal()"
    with pytest.raises(InputError, match=re.escape(function)):
        ula.explain(model, inputs, method="gradient", logit=0, target=-1, progress=False)
    result = ula.explain(model, inputs, method="gradient", logit=eval(function), target=-1, progress=False)
    assert result.scores.shape == (1, 9)


def test_the_expression_reads_a_dictionary_by_its_keys() -> None:
    vectors = torch.ones(2, 3, 4)
    for output, expected in (
        ({"states": vectors}, "lambda out: out['states'][:, -1, 0]"),
        ({"inner": (vectors,)}, "lambda out: out['inner'][-1][:, -1, 0]"),
        (transformers.modeling_outputs.BaseModelOutput(vectors), "lambda out: out.last_hidden_state[:, -1, 0]"),
        ({"logits_per_image": torch.ones(2, 2)}, "lambda out: out['logits_per_image'].diagonal()"),
    ):
        assert example(output) == expected
        assert eval(expected)(output).shape == (2,)
