"""The language model around the reference mixers."""

from functools import partial

import pytest
import torch
from torch import nn

from unilinattn.models.h3 import H3
from unilinattn.models.language_model import MixerForCausalLM
from unilinattn.models.s5 import S5


@pytest.fixture
def model() -> MixerForCausalLM:
    return MixerForCausalLM(11, 8, 2, partial(S5, 8, 4)).double().eval()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
def test_padding_does_not_change_real_tokens(
    model: MixerForCausalLM, side: str, batch: int, dtype: torch.dtype
) -> None:
    ids = torch.randint(11, (batch, 9))
    padding = torch.zeros(batch, 4, dtype=torch.long)
    parts, real = [padding, ids], [torch.zeros_like(padding), torch.ones_like(ids)]
    if side == "right":
        parts, real = parts[::-1], real[::-1]
    padded = model(torch.cat(parts, dim=1), attention_mask=torch.cat(real, dim=1).to(dtype)).logits
    logits = padded[:, 4:] if side == "left" else padded[:, :9]
    torch.testing.assert_close(logits, model(ids).logits, rtol=1e-10, atol=1e-12)


def test_left_padding_without_a_mask_changes_real_tokens(model: MixerForCausalLM) -> None:
    ids = torch.randint(11, (1, 9))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    assert (model(padded).logits[:, 4:] - model(ids).logits).abs().max() > 1e-3


def test_left_padding_reaches_real_tokens_through_biases() -> None:
    model = MixerForCausalLM(11, 8, 2, partial(H3, 8, 4)).double().eval()
    ids = torch.randint(11, (1, 9))
    padding = torch.zeros(1, 4, dtype=torch.long)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(ids)], dim=1)
    left = model(torch.cat([padding, ids], dim=1), attention_mask=mask).logits[:, 4:]
    right = model(torch.cat([ids, padding], dim=1), attention_mask=mask.flip(1)).logits[:, :9]
    alone = model(ids).logits
    torch.testing.assert_close(right, alone, rtol=1e-10, atol=1e-12)
    assert (left - alone).abs().max() > 1e-4


def test_every_layer_adds_the_output_of_its_mixer(model: MixerForCausalLM) -> None:
    first, second = model.layers
    assert first.mixer is not second.mixer
    stream = torch.randn(2, 7, 8, dtype=torch.float64)
    assert torch.equal(first(stream), stream + first.mixer(first.norm(stream)))


def test_the_loss_is_that_of_the_next_token(model: MixerForCausalLM) -> None:
    ids = torch.randint(11, (2, 9))
    labels = ids.clone()
    labels[:, :4] = -100
    output = model(ids, labels=labels)
    assert output.loss is not None
    expected = nn.CrossEntropyLoss()(output.logits[:, 3:-1].flatten(0, 1), ids[:, 4:].flatten())
    torch.testing.assert_close(output.loss, expected)
    assert model(ids).loss is None
