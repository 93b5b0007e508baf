"""Hosts that pad their tokens by themselves: the trace has the padding that the host adds, and knows it as such."""

import pytest
import torch
import transformers
from torch import nn

import unilinattn as ula
from tests.methods.refused import prompted
from tests.texts import PARIS, VOCABULARY, tokenizer
from unilinattn.testing import promoted, relative_error
from unilinattn.testing.hosts import randomize

LIMIT = 1e-10
SIZES = dict(vocab_size=30, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)


def longformer(name: str) -> nn.Module:
    """Return a model with windows of four tokens; seven tokens are padded to eight."""
    config = transformers.LongformerConfig(**SIZES, attention_window=4, pad_token_id=1, max_position_embeddings=24)
    torch.manual_seed(0)
    return randomize(getattr(transformers, name)(config).double().eval())


def ids() -> torch.Tensor:
    return torch.tensor([[5, 6, 7, 8, 9, 10, 11], [21, 6, 17, 8, 19, 10, 12]])


def padded() -> dict[str, torch.Tensor]:
    mask = torch.tensor([[1] * 7 + [0]] * 2)
    return {"input_ids": torch.cat([ids(), torch.ones(2, 1, dtype=torch.long)], 1), "attention_mask": mask}


@pytest.mark.long
@pytest.mark.parametrize("name", ["LongformerForMaskedLM", "LongformerForSequenceClassification"])
@pytest.mark.parametrize("method", ["logit", "attn_lrp", "contribution", "knockout", "gradient"])
def test_scores_are_those_of_inputs_with_the_padding_that_the_host_adds(name: str, method: str) -> None:
    model = longformer(name)
    with promoted():
        scores, expected = (ula.explain(model, x, method=method, target=-1).scores for x in (ids(), padded()))
    assert scores.shape == (2, 8) and bool((scores[:, 7] == 0).all())
    assert relative_error(scores, expected) < LIMIT and bool((scores[:, 6] != 0).all())


def test_logits_of_the_tokens_are_those_of_the_model() -> None:
    model = longformer("LongformerForMaskedLM")
    with promoted(), torch.no_grad():
        trace = ula.trace(model, {"input_ids": ids(), "token_type_ids": torch.ones_like(ids())})
        expected = model(ids(), token_type_ids=torch.ones_like(ids())).logits
    assert trace.mask is not None and trace.mask.tolist() == [[True] * 7 + [False]] * 2
    assert relative_error(trace.output.logits[:, :7], expected) < LIMIT


def test_labels_of_the_tokens_need_none_for_the_padding() -> None:
    labels = [list("abcdefg"), list("hijklmn")]
    result = ula.explain(longformer("LongformerModel"), ids(), method="rollout", tokens=labels)
    assert result.tokens == tuple((*row, "") for row in labels)


INPUTS = {
    "ids": {"input_ids": ids()},
    "no mask": {"input_ids": ids(), "attention_mask": None},
    "vectors": {"inputs_embeds": torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)},
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_last_token_is_one_of_the_text(name: str) -> None:
    result = ula.explain(longformer("LongformerForMaskedLM"), INPUTS[name], method="rollout", target=-1)
    assert bool((result.scores[:, 6] > result.scores[:, :3].amax(1)).all()) and bool((result.scores[:, 7] == 0).all())


def test_a_text_has_its_labels_and_words() -> None:
    config = transformers.LongformerConfig(**(SIZES | {"vocab_size": VOCABULARY}), attention_window=10, pad_token_id=0)
    model = randomize(transformers.LongformerForMaskedLM(config).eval())
    result = ula.explain(model, PARIS, tokenizer=tokenizer(), method="rollout", target=-1)
    length = len(tokenizer()(PARIS).input_ids)
    assert length % 10 and result.tokens is not None and result.word_ids is not None
    assert len(result.tokens[0]) == len(result.word_ids[0]) == result.scores.shape[1] == -(-length // 10) * 10
    assert "".join(result.tokens[0][:length]).split() == PARIS.split()
    assert set(result.word_ids[0][length:]) == {None}
    words = result.words()
    assert words.tokens is not None and [word.strip() for word in words.tokens[0]][:6] == PARIS.split()


def test_tokens_that_a_prompt_adds_are_no_padding() -> None:
    model, inputs = prompted()
    result = ula.explain(model.eval(), inputs, method="logit", target=-1)
    assert result.mask is None and result.scores.shape[1] == inputs.shape[1] + 3
    assert (result.scores[0, :3] != 0).all()


def test_patches_beside_the_ids_are_no_padding() -> None:
    """A longer text of LayoutLMv3 has the same logits if the rest is masked, and more tokens beside it."""
    sizes = dict(SIZES, hidden_size=24, coordinate_size=4, shape_size=4, input_size=16, patch_size=8)
    config = transformers.LayoutLMv3Config(**sizes, visual_bbox=False)
    model = randomize(transformers.LayoutLMv3ForSequenceClassification(config).double().eval())
    image = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    inputs = {"input_ids": ids()[:1], "bbox": torch.ones(1, 7, 4, dtype=torch.long), "pixel_values": image}
    trace = ula.trace(model, inputs)
    assert trace.mask is None and trace.layers[0].output.shape[1] > 7
    assert torch.equal(trace.arguments["input_ids"], ids()[:1])


class Continuation(nn.Module):
    """Reads the ids of its decoder only, of which there may be more than of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mixer, self.head = nn.Embedding(30, 8), Averaged(), nn.Linear(8, 30)

    def forward(
        self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.tokens(decoder_input_ids)
        return self.head(x + self.mixer(x))


class Averaged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) / torch.arange(1, 1 + x.shape[1])[:, None]


def test_a_text_is_not_padded_to_the_tokens_of_a_decoder() -> None:
    inputs = {"input_ids": ids()[:, :3], "decoder_input_ids": ids()}
    trace = ula.trace(randomize(Continuation().eval()), inputs, progress=False)
    assert [tuple(layer.output.shape) for layer in trace.layers] == [(2, 7, 8)] and trace.mask is None
