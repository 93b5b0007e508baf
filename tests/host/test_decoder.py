"""Ids that a model makes for its decoder of those of its encoder are a stream of tokens."""

import pytest
import torch
import transformers
from torch import nn

import unilinattn as ula
from unilinattn.testing import left_as_found
from unilinattn.testing.hosts import randomize

IDS = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=40,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        num_labels=3,
        **IDS,
    )
    return transformers.BartForSequenceClassification(config)


def mt5() -> nn.Module:
    config = transformers.MT5Config(
        vocab_size=40, d_model=16, num_layers=2, num_heads=2, d_kv=8, d_ff=24, num_labels=3, **IDS
    )
    return transformers.MT5ForSequenceClassification(config)


@pytest.mark.long
@pytest.mark.parametrize("build", [bart, mt5])
def test_a_classifier_of_encoder_and_decoder_takes_the_ids_of_one(build: object) -> None:
    model = randomize(build()).double().eval()  # type: ignore[operator]
    ids = torch.randint(5, 40, (2, 7), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = IDS["eos_token_id"]
    with left_as_found(model):
        result = ula.explain(model, ids, method="logit", target=-1)
    assert result.streams["key"] == {"encoder": 7, "decoder": 7}
    assert result.completeness_gap < 1e-12
    shifted = torch.cat([torch.full((2, 1), IDS["decoder_start_token_id"]), ids[:, :-1]], 1)
    named = ula.explain(model, {"input_ids": ids, "decoder_input_ids": shifted}, method="logit", target=-1)
    torch.testing.assert_close(result.scores, named.scores, rtol=0, atol=0)
