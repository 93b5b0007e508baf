"""Padded texts with images: classifiers that pool the last token by its id, or whatever it is."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import unilinattn as ula
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import randomize

IMAGE, PADDING = 4, 0
TINY = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def classifier(name: str, config: str, **settings: Any) -> nn.Module:
    text = dict(TINY, model_type="gemma3_text", vocab_size=40, num_key_value_heads=1, head_dim=8)
    vision = dict(TINY, model_type="siglip_vision_model", image_size=8, patch_size=4, vision_use_head=False)
    tokens = dict(image_token_index=IMAGE, pad_token_id=PADDING, mm_tokens_per_image=1)
    built = getattr(transformers, config)(text_config=text, vision_config=vision, **tokens, **settings)
    return randomize(getattr(transformers, name)(built)).eval()


def inputs(padding: int) -> dict[str, Any]:
    """Return a batch whose second text is followed by padding."""
    ids = torch.tensor([[IMAGE, 7, 5, 9, 11, 6], [IMAGE, 8, 12, 10, 13, 5]])
    mask = torch.ones_like(ids)
    if padding:
        ids[1, -padding:], mask[1, -padding:] = PADDING, 0
    image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": (ids == IMAGE).long(),
        "pixel_values": image,
    }


def alone(padded: dict[str, Any], padding: int) -> dict[str, Any]:
    """Return the second text without its padding."""
    single = {name: value[1:] for name, value in padded.items()}
    return {name: value if name == "pixel_values" else value[:, :-padding] for name, value in single.items()}


@pytest.mark.long
def test_a_classifier_that_finds_its_last_token_by_its_id_has_the_shares_of_the_text_alone() -> None:
    model, padded = classifier("Gemma3ForSequenceClassification", "Gemma3Config"), inputs(2)
    result = ula.explain(model, padded, progress=False)
    single = ula.explain(model, alone(padded, 2), progress=False)
    assert result.streams == single.streams == {} and not result.warnings
    assert relative_error(result.scores[1:, ..., :4], single.scores) < 1e-5
    assert not result.scores[1, ..., 4:].any()


@pytest.mark.long
@pytest.mark.parametrize("padding", [0, 2])
def test_a_classifier_that_reads_padding_says_so(padding: int) -> None:
    """ShieldGemma 2 reads the logits of the last token without a look at attention_mask."""
    model = classifier("ShieldGemma2ForImageClassification", "ShieldGemma2Config", yes_token_index=7, no_token_index=9)
    result = ula.explain(model, inputs(padding), target=-1, progress=False)
    named = [warning for warning in result.warnings if "the explained logit reads padding: in sequence 1" in warning]
    assert len(named) == bool(padding)
    assert result.scores[1, -2:].any()
