"""Parts of a model with as many tokens as another: two sequences, or one that goes on."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from tests.texts import tokenizer
from unilinattn.errors import ExactnessError
from unilinattn.frozen.run import frozen
from unilinattn.testing import randomize

WIDTH, WORDS, PATCH = 16, 5, 30
IDS = torch.tensor([[11, 12, 13, 14, 15], [16, 17, 18, 3, 3]])
REAL = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def images(size: int = 4) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def clip() -> Any:
    """A CLIP whose images have four patches and a class token, as many as the words of a text."""
    width = dict(hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=2)
    text = dict(vocab_size=290, max_position_embeddings=20, bos_token_id=1, eos_token_id=2, pad_token_id=3, **width)
    vision = dict(image_size=4, patch_size=2, **width)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return randomize(transformers.CLIPModel(config).eval())


class Block(nn.Module):
    """Attention and its residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        result: Tensor = x + self.attention(normed, normed, normed, key_padding_mask=padding, need_weights=False)[0]
        return result


class Parts(nn.Module):
    """A language model of two lists of blocks; patches between them have blocks, and stand for some ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.patches = nn.Embedding(31, WIDTH), nn.Linear(3, WIDTH)
        self.first, self.second, self.third = (nn.ModuleList([Block(), Block()]) for _ in range(3))
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, input_ids: Tensor, pixels: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        x, y = self.embedding(input_ids), None if pixels is None else self.patches(pixels)
        padding = None if attention_mask is None else attention_mask == 0
        for block in self.first:
            x = block(x, padding)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        for block in self.second if y is not None else ():
            y = block(y)
        if y is not None:
            x = torch.where((input_ids == PATCH)[..., None], y, x)
        for block in self.third:
            x = block(x, padding)
        return self.head(x if y is None else x + y)


def parts() -> nn.Module:
    torch.manual_seed(0)
    return Parts().eval()


@pytest.mark.long
def test_a_part_that_reads_every_token_of_an_earlier_one_continues_its_sequence() -> None:
    # The model may make zeros of padding in between.
    for inputs in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": REAL}):
        traced = ula.trace(parts(), inputs, progress=False)
        assert not any(layer.tower for layer in traced.layers)
        assert [stream.name for stream in traced.streams] == ["tokens"]


@pytest.mark.long
def test_a_part_continues_the_sequence_before_another_one() -> None:
    inputs = {"input_ids": IDS, "pixels": torch.randn(2, WORDS, 3)}
    traced = ula.trace(parts(), inputs, progress=False)
    assert [layer.tower for layer in traced.layers] == ["first"] * 2 + ["second"] * 2 + ["first"] * 2
    assert [stream.layers for stream in traced.streams] == [(0, 1, 4, 5), (2, 3)]
    result = ula.explain(traced, method="logit", target=-1, progress=False)
    assert result.completeness_gap is not None and result.completeness_gap < 1e-5
    assert len(result.streams["key"]) == 2


def test_the_numbers_that_a_part_draws_are_no_tokens_of_an_earlier_one() -> None:
    class Noisy(Parts):
        def forward(
            self, input_ids: Tensor, pixels: Tensor | None = None, attention_mask: Tensor | None = None
        ) -> Tensor:
            assert pixels is not None
            return super().forward(input_ids, pixels + torch.randn_like(pixels), attention_mask)

    inputs = {"input_ids": IDS, "pixels": torch.randn(2, WORDS, 3)}
    traced = ula.trace(Noisy().eval(), inputs, progress=False)
    assert [layer.tower for layer in traced.layers] == ["first"] * 2 + ["second"] * 2 + ["first"] * 2


def test_a_part_that_reads_some_tokens_of_each_earlier_one_has_another_sequence() -> None:
    ids = torch.tensor([[1, PATCH, PATCH, 4, 5]])
    traced = ula.trace(parts(), {"input_ids": ids, "pixels": torch.randn(1, WORDS, 3)}, progress=False)
    assert [layer.tower for layer in traced.layers] == ["first"] * 2 + ["second"] * 2 + ["third"] * 2


@pytest.mark.long
@pytest.mark.parametrize("method", ["rollout", "alti", "latim", "logit"])
def test_patches_as_many_as_words_are_other_tokens(method: str) -> None:
    model, options = clip(), {} if method in ("rollout", "logit") else {"compose": "rollout"}
    # With as many patches as words, and with more.
    for words in (5, 4):
        inputs = {"input_ids": IDS[:1, -words:], "pixel_values": images()[:1]}
        result = ula.explain(model, inputs, method=method, target=-1, progress=False, **options)
        assert result.streams["key"] == {"vision_model": 5, "text_model": words}
        assert result.select(keys="text_model").scores.abs().amax() > 0


@pytest.mark.long
def test_similarities_of_several_pairs_are_refused_with_the_cause() -> None:
    # A row of the similarities of all images and all texts reads the texts of other pairs.
    traced = ula.trace(clip(), {"input_ids": IDS, "pixel_values": images()}, progress=False)
    with pytest.raises(ExactnessError, match=r"of a sequence may read the others.* explain one sequence at a time"):
        frozen(traced).complete_shares(-1, lambda out: out.logits_per_image[:, 0])


def test_a_mask_of_words_is_none_of_patches() -> None:
    inputs = {"input_ids": IDS, "attention_mask": REAL, "pixel_values": images()}
    traced = ula.trace(clip(), inputs, progress=False)
    for layer in traced.layers:
        expected = REAL.bool() if layer.name.startswith("text_model") else None
        assert (layer.mask is None) if expected is None else torch.equal(layer.mask, expected)
        assert layer.reconstruction_error() < 1e-5


def test_patches_have_no_words_and_words_no_patches() -> None:
    traced = ula.trace(clip(), {"input_ids": IDS[:1], "pixel_values": images()[:1]}, progress=False)
    patches, words = (
        ula.explain(traced, method="raw", layers=[layer], tokenizer=tokenizer(), progress=False) for layer in (0, 2)
    )
    assert patches.tokens == (tuple(f"vision_model {index}" for index in range(WORDS)),)
    assert words.tokens == (tuple(tokenizer().convert_ids_to_tokens(IDS[0].tolist())),)
    assert words.grid is None
