"""Models of sound whose tokens have an id of each of several codebooks, the vectors of which are added."""

import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from tests.tracing.models import Block, Model, Output, added
from unilinattn.errors import InputError, UncoveredError
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import randomize

BOOKS, CODES = 3, 9
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


class OfCodes(Model):
    """Reads ids (batch, length, codebook); `mixes` adds to each vector those of the tokens before it."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__(Block(added), Block(added))
        self.mixes = mixes

    def forward(self, input_ids: Tensor) -> Output:
        x = self.embed(input_ids).sum(2)
        if self.mixes:
            x = x + x.cumsum(1)
        for block in self.blocks:
            x = block(x)
        return Output(self.head(x))


def csm() -> nn.Module:
    """Predicts the first codebook of ids (batch, length, codebook) of sound, or of a text."""
    rows = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "num_codebooks": BOOKS}
    depth = {**SHAPE, **rows, "vocab_size": CODES, "backbone_hidden_size": 16, "num_hidden_layers": 1}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "audio_eos_token_id"))
    sizes = {"vocab_size": CODES, "codebook_size": CODES, "text_vocab_size": 12, "audio_token_id": 11}
    config = transformers.CsmConfig(**SHAPE, **rows, **sizes, **special, depth_decoder_config=depth)
    torch.manual_seed(0)
    return randomize(transformers.CsmForConditionalGeneration(config)).eval()


def musicgen() -> nn.Module:
    """Reads ids (batch * codebook, length), and returns logits in such rows."""
    sizes = {"vocab_size": CODES, "num_codebooks": BOOKS, "ffn_dim": 24, "max_position_embeddings": 16}
    config = transformers.MusicgenDecoderConfig(**SHAPE, **sizes, layerdrop=0.0, pad_token_id=CODES)
    torch.manual_seed(0)
    return randomize(transformers.MusicgenForCausalLM(config)).double().eval()


def codes(*shape: int) -> Tensor:
    return torch.randint(CODES, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("build", [OfCodes, csm])
@pytest.mark.parametrize("method", ["logit", "lrp"])
def test_shares_of_tokens_with_an_id_of_each_codebook_add_up(build: Any, method: str) -> None:
    torch.manual_seed(0)
    model, ids = build().double(), codes(2, 6, BOOKS)
    result = ula.explain(model, {"input_ids": ids}, method=method, target=-1, progress=False)
    expected = model(input_ids=ids).logits[:, -1].amax(-1)
    assert result.scores.shape == (2, 6)
    torch.testing.assert_close(result.scores.sum(1) + result.extras["bias"], expected.double(), rtol=0, atol=1e-6)
    assert (result.scores.abs().amin(1) > 0).all()


def test_gradients_are_those_of_the_sum_of_the_vectors() -> None:
    torch.manual_seed(0)
    model, ids = OfCodes().double(), codes(2, 6, BOOKS)
    result = ula.explain(model, {"input_ids": ids}, method="input_x_gradient", target=-1, logit=4, progress=False)
    vectors = model.embed(ids).sum(2).detach().requires_grad_()
    x: Tensor = vectors
    for block in model.blocks:
        x = block(x)
    (gradient,) = torch.autograd.grad(model.head(x)[:, -1, 4].sum(), vectors)
    assert relative_error(result.scores, (vectors * gradient).sum(-1).detach()) < 1e-12


def test_codebooks_whose_tokens_mix_before_the_first_block_have_a_layer_there() -> None:
    torch.manual_seed(0)
    plain, mixing = (ula.trace(OfCodes(mixes).double(), {"input_ids": codes(2, 6, BOOKS)}) for mixes in (False, True))
    assert [layer.name for layer in plain.layers] == ["blocks.0.mixer", "blocks.1.mixer"]
    assert len(mixing.layers) == 3
    assert mixing.layers[0].name.startswith("region")


def test_the_advice_for_logits_in_rows_of_codebooks_works() -> None:
    model, ids = musicgen(), codes(2 * BOOKS, 6)
    with pytest.raises(InputError, match=r"a target does not name a row of logits; give `logit`") as raised:
        ula.explain(model, ids, target=-1, progress=False)
    advice = re.search(r"lambda out: [^\s]*\[.*\]", str(raised.value))
    assert advice is not None
    logit = eval(advice.group())
    result = ula.explain(model, ids, method="logit", logit=logit, progress=False)
    expected = model(input_ids=ids).logits[::BOOKS, -1, 0]
    assert result.scores.shape == (2, 6)
    torch.testing.assert_close(result.scores.sum(1) + result.extras["bias"], expected, rtol=0, atol=1e-10)
    for sequence in (0, 1):
        alone = ula.explain(model, ids[sequence * BOOKS : (sequence + 1) * BOOKS], method="logit", logit=logit)
        torch.testing.assert_close(alone.scores[0], result.scores[sequence], rtol=0, atol=1e-10)
        torch.testing.assert_close(alone.extras["bias"][0], result.extras["bias"][sequence], rtol=0, atol=1e-10)
    # The logits of the other codebooks are those of the same tokens.
    other = ula.explain(model, ids, method="logit", logit=lambda out: out.logits[1::BOOKS, -1, 0], progress=False)
    assert relative_error(other.scores, result.scores) > 1e-3
    with pytest.raises(UncoveredError, match="not those of this sequence in turn"):
        ula.explain(model, ids, method="logit", logit=lambda out: out.logits[:2, -1, 0], progress=False)


def test_ids_with_a_third_axis_that_the_model_does_not_read_are_refused() -> None:
    model = transformers.BertModel(transformers.BertConfig(**SHAPE, vocab_size=CODES, intermediate_size=24)).eval()
    with pytest.raises(InputError, match=r"\(batch, length, codebook\) for one that adds the vectors of several"):
        ula.trace(model, {"input_ids": codes(2, 6, BOOKS)}, progress=False)
