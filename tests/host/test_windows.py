"""Rows of vectors are windows, or tokens before sequences, by what moves with them and not by their sizes."""

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from tests.tracing.models import VOCABULARY
from unilinattn.errors import UncoveredError
from unilinattn.testing.hosts import randomize


def space_time(frames: int) -> nn.Module:
    config = transformers.TimesformerConfig(
        image_size=6,
        patch_size=2,
        num_frames=frames,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=3,
    )
    return randomize(transformers.TimesformerForVideoClassification(config)).double().eval()


def videos(batch: int, frames: int) -> Tensor:
    return torch.randn(batch, frames, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.long
@pytest.mark.parametrize(("batch", "frames"), [(2, 2), (3, 2), (2, 3), (3, 3)])
def test_attention_to_frames_is_the_same_layer_in_every_batch(batch: int, frames: int) -> None:
    model, pixels = space_time(frames), videos(batch, frames)
    trace = ula.trace(model, {"pixel_values": pixels})
    over_time, over_space = (9 * batch, frames, 16), (batch * frames, 10, 16)
    assert [tuple(layer.output.shape) for layer in trace.layers] == [over_time, over_space] * 2
    assert max(layer.reconstruction_error() for layer in trace.layers) < 1e-12
    result = ula.explain(trace, method="logit", target=-1)
    assert result.scores.shape == (batch, 9 * frames + 1)
    assert result.completeness_gap < 1e-12
    alone = torch.cat(
        [ula.explain(model, {"pixel_values": video[None]}, method="logit", target=-1).scores for video in pixels]
    )
    torch.testing.assert_close(result.scores, alone, rtol=1e-9, atol=1e-11)


class TokensFirst(nn.Module):
    """A transformer whose blocks have (token, batch, channel)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[0])


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("batch", "length"), [(2, 8), (3, 9), (4, 8), (5, 9)])
def test_tokens_before_sequences_are_no_windows(batch: int, length: int) -> None:
    model = TokensFirst().double().eval()
    trace = ula.trace(model, ids(batch, length))
    assert [tuple(layer.output.shape) for layer in trace.layers] == [(batch, length, 8)] * 2
    result, alone = ula.explain(trace, method="logit"), ula.explain(model, ids(batch, length)[1:2], method="logit")
    torch.testing.assert_close(result.scores[1:2], alone.scores, rtol=1e-10, atol=1e-12)


def test_as_many_sequences_as_tokens_are_refused_with_advice() -> None:
    with pytest.raises(UncoveredError, match="5 sequences of 5 tokens: if tokens come before sequences in it, trace"):
        ula.trace(TokensFirst().double().eval(), ids(5, 5))
