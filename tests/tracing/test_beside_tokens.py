"""Tokens beside those of the ids: states of an encoder that ran before, and patches beside words."""

from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from unilinattn.errors import UncoveredError
from unilinattn.testing import randomize

IDS = torch.tensor([[1, 2, 3, 4, 5], [7, 6, 5, 4, 3]])


def decoder() -> nn.Module:
    """BERT as a decoder of states that its caller has."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20)
    config = transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True, layer_norm_eps=1e-30)
    return transformers.BertLMHeadModel(config).double().eval()


@pytest.mark.long
@pytest.mark.parametrize("length", [7, 5])
@pytest.mark.parametrize("method", ["logit", "attn_lrp", "occlusion", "input_x_gradient"])
def test_the_states_of_an_encoder_that_ran_before_are_tokens(method: str, length: int) -> None:
    """Also where they are as many as the decoder's tokens."""
    model, generator = decoder(), torch.Generator().manual_seed(1)
    states = torch.randn(2, length, 8, dtype=torch.float64, generator=generator)
    inputs = {"input_ids": IDS, "encoder_hidden_states": states}
    result = ula.explain(model, inputs, method=method, target=-1, logit=3, progress=False)
    assert list(result.streams["key"].values()) == [5, length]
    assert (result.scores.abs() > 1e-12).all()
    assert result.completeness_gap is None or result.completeness_gap < 1e-10
    # The states of one sequence are read by it alone.
    other = states.clone()
    other[1] = other[1].roll(1, 0)
    moved = ula.explain(
        model, {**inputs, "encoder_hidden_states": other}, method=method, target=-1, logit=3, progress=False
    )
    torch.testing.assert_close(moved.scores[0], result.scores[0], rtol=1e-6, atol=1e-12)
    # Without places of their own they may be in any order.
    torch.testing.assert_close(moved.scores[1, 5:], result.scores[1, 5:].roll(1, 0), rtol=1e-6, atol=1e-10)


@pytest.mark.long
def test_gradients_at_an_encoders_states_are_those_of_the_model() -> None:
    model, states = decoder(), torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    result = ula.explain(
        model,
        {"input_ids": IDS, "encoder_hidden_states": states.detach()},
        method="input_x_gradient",
        target=-1,
        logit=3,
        progress=False,
    )
    logits = model(input_ids=IDS, encoder_hidden_states=states).logits[:, -1, 3]
    (gradient,) = torch.autograd.grad(logits.sum(), states)
    torch.testing.assert_close(result.scores[:, 5:], (gradient * states).sum(-1).detach(), rtol=1e-6, atol=1e-12)


def document() -> tuple[nn.Module, dict[str, Tensor]]:
    """LayoutLMv3 puts the patches of a page behind its words, whose places bias its attention."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    sizes |= dict(coordinate_size=2, shape_size=4, input_size=16, patch_size=8, max_2d_position_embeddings=64)
    config = transformers.LayoutLMv3Config(**sizes, num_labels=5)
    places = torch.randint(0, 30, (2, 5, 4)).sort(-1).values
    inputs = {"input_ids": IDS, "bbox": places, "pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64)}
    return randomize(transformers.LayoutLMv3ForTokenClassification(config)).double().eval(), inputs


@pytest.mark.long
@pytest.mark.parametrize("method", ["logit", "occlusion"])
def test_patches_beside_words_have_shares(method: str) -> None:
    model, inputs = document()
    result = ula.explain(model, inputs, method=method, target=2, logit=1, progress=False)
    assert result.scores.shape == (2, 10) and (result.scores.abs() > 0).all()
    assert result.completeness_gap is None or result.completeness_gap < 1e-10
    other = {**inputs, "pixel_values": inputs["pixel_values"].clone()}
    other["pixel_values"][1, :, :8, :8] += 1
    moved = ula.explain(model, other, method=method, target=2, logit=1, progress=False)
    torch.testing.assert_close(moved.scores[0], result.scores[0], rtol=1e-8, atol=1e-12)
    assert (moved.scores[1, 6] - result.scores[1, 6]).abs() > 1e-8


@pytest.mark.long
def test_a_tokenizer_names_the_words_among_patches() -> None:
    model, inputs = document()
    tokenizer = words()
    result = ula.explain(model, inputs, method="logit", target=2, logit=1, tokenizer=tokenizer, progress=False)
    assert result.tokens is not None
    assert [label.strip() for label in result.tokens[0]] == [*"abcde", *(f"added {n}" for n in range(5))]


def words() -> Any:
    """A tokenizer whose words have the ids from 1 on."""
    names = ["[UNK]", *"abcdefghijklmnopqrs"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: n for n, name in enumerate(names)}, "[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


class Shifted(nn.Module):
    """A decoder whose logits a third input shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()

    def forward(self, input_ids: Tensor, encoder_hidden_states: Tensor, image: Tensor) -> Any:
        logits = self.inner(input_ids=input_ids, encoder_hidden_states=encoder_hidden_states).logits
        return {"logits": logits + image.mean((1, 2))[:, None, None]}


@pytest.mark.long
def test_an_input_beside_tokens_and_states_is_refused() -> None:
    inputs = {
        "input_ids": IDS,
        "encoder_hidden_states": torch.randn(2, 7, 8, dtype=torch.float64),
        "image": torch.randn(2, 3, 4, dtype=torch.float64),
    }
    with pytest.raises(UncoveredError, match=r"image.* the output of Shifted beside the vectors of its tokens"):
        ula.explain(Shifted().eval(), inputs, method="logit", target=-1, logit=3, progress=False)


class Pooled(nn.Module):
    """Reads its text by one query, so that its last layer has one token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.query = nn.Embedding(20, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, norm_first=True)
        self.pool, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)
        self.last = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, norm_first=True)

    def forward(self, input_ids: Tensor) -> Any:
        text = self.block(self.embedding(input_ids))
        pooled = self.pool(self.query.expand(len(text), -1, -1), text, text)[0]
        return {"logits": self.head(self.last(pooled)[:, 0])}


@pytest.mark.long
def test_a_tokenizer_names_the_words_that_a_pool_reads() -> None:
    torch.manual_seed(0)
    result = ula.explain(Pooled().eval(), IDS, method="logit", tokenizer=words(), progress=False)
    assert result.tokens is not None and [label.strip() for label in result.tokens[0]] == list("abcde")


class Stamped(nn.Module):
    """A model of words and patches whose logits a third input shifts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, bbox: Tensor, pixel_values: Tensor, stamp: Tensor) -> Any:
        logits = self.inner(input_ids=input_ids, bbox=bbox, pixel_values=pixel_values).logits
        return {"logits": logits + stamp.mean((1, 2))[:, None, None]}


@pytest.mark.long
def test_an_input_beside_words_and_patches_is_refused() -> None:
    model, inputs = document()
    inputs = {**inputs, "stamp": torch.randn(2, 3, 4, dtype=torch.float64)}
    with pytest.raises(UncoveredError, match="two inputs reach its output"):
        ula.explain(Stamped(model).eval(), inputs, method="logit", target=2, logit=1, progress=False)
