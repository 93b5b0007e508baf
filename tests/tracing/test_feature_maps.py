"""Modules that read or return a list of feature maps, and streams whose tokens come before the sequences."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from tests.host.test_host_calls import model_of
from unilinattn.errors import UncoveredError


class Pyramid(nn.Module):
    """Returns two maps, of one resolution and of half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 6, 2, stride=2)

    def forward(self, x: Tensor) -> list[Tensor]:
        fine = self.fine(x)
        # In the module's own forward each map has tokens of all others.
        return [fine + fine.mean((2, 3), keepdim=True), self.coarse(x) + x.mean((2, 3)).mean(1)[:, None, None, None]]


class Fusion(nn.Module):
    """Reads a list of maps."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(4, 5, 1), nn.Conv2d(6, 5, 1)
        self.weight = nn.Parameter(torch.randn(5, 5, 3, 3) / 7)

    def forward(self, maps: list[Tensor]) -> Tensor:
        whole = self.fine(maps[0]) + nn.functional.interpolate(self.coarse(maps[1]), scale_factor=2.0)
        return nn.functional.conv2d(whole, self.weight, padding=1)


class Segmenter(nn.Module):
    """Is linear but for its biases, so that the shares of the pixels are known."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.pyramid, self.fusion = Pyramid(), Fusion()
        self.lateral = nn.Conv2d(6, 6, 3, padding=1)
        self.last, self.head = nn.Conv2d(5, 5, 3, padding=1), nn.Linear(5, 7)

    def forward(self, pixel_values: Tensor) -> Any:
        fine, coarse = self.pyramid(self.stem(pixel_values))
        maps = [fine, self.lateral(coarse)]
        return transformers.modeling_outputs.ImageClassifierOutput(
            logits=self.head(self.last(self.fusion(maps)).mean((2, 3)))
        )


def segmenter() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Segmenter().double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)


def test_a_list_of_feature_maps_has_a_port_for_each() -> None:
    model, image = segmenter()
    trace = ula.trace(model, image, progress=False)
    (fusion,) = (layer for layer in trace.layers if layer.name == "fusion")
    assert set(fusion.ports.values()) == {(2, 64), (2, 16)}
    assert fusion.reconstruction_error() < 1e-12
    assert {layer.name for layer in trace.layers} >= {"pyramid", "fusion"}


@pytest.mark.parametrize("method", ["logit", "lrp"])
def test_maps_beside_the_first_one_are_not_in_the_bias(method: str) -> None:
    model, image = segmenter()
    result = ula.explain(model, image, method=method, logit=3, progress=False)
    pixels = image.clone().requires_grad_()
    logits = model(pixels).logits[:, 3]
    (gradient,) = torch.autograd.grad(logits.sum(), pixels)
    torch.testing.assert_close(result.scores, (gradient * image).sum(1).flatten(1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.extras["bias"], model(torch.zeros_like(image)).logits[:, 3].detach())
    torch.testing.assert_close(result.extras["logit"], logits.detach())


@pytest.mark.parametrize("method", ["rollout", "alti", "raw"])
def test_a_map_of_the_first_result_is_not_taken_for_that_of_all(method: str) -> None:
    model, image = segmenter()
    with pytest.raises(UncoveredError, match="pyramid returns several feature maps, and its operator gives the first"):
        ula.explain(model, image, method=method, progress=False)


def test_a_frozen_run_notices_a_layer_that_reads_another_input_than_in_the_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a layer that returns its output only; its part would count as a bias, and the gap would be zero."""
    model, image = segmenter()
    trace = ula.trace(model, image, progress=False)
    monkeypatch.setattr("unilinattn.frozen.layers.returns_maps", lambda layer: False)
    with pytest.raises(UncoveredError, match=r"lateral reads its input, whose value is not that of the trace"):
        ula.explain(trace, method="logit", logit=3, progress=False)


def fsmt() -> tuple[nn.Module, dict[str, Any]]:
    """FSMT's blocks read (token, batch, channel)."""
    sizes = dict(
        src_vocab_size=20, tgt_vocab_size=20, langs=["de", "en"], d_model=8, encoder_layers=2, decoder_layers=2
    )
    sizes |= dict(encoder_ffn_dim=8, decoder_ffn_dim=8, encoder_attention_heads=2, decoder_attention_heads=2)
    model = model_of("FSMTForConditionalGeneration", "FSMTConfig", **sizes)
    generator = torch.Generator().manual_seed(2)
    ids = {"input_ids": torch.randint(3, 20, (2, 7), generator=generator)}
    return model, {**ids, "decoder_input_ids": torch.randint(3, 20, (2, 5), generator=generator), "use_cache": False}


@pytest.mark.parametrize("method", ["logit", "lrp", "attn_lrp", "occlusion", "gradient"])
def test_both_streams_have_shares_where_tokens_come_before_sequences(method: str) -> None:
    model, inputs = fsmt()
    result = ula.explain(model, inputs, method=method, target=-1, progress=False)
    assert result.streams["key"] == {"encoder": 7, "decoder": 5}
    for sequence in range(2):
        values = {k: v[sequence : sequence + 1] if isinstance(v, Tensor) else v for k, v in inputs.items()}
        alone = ula.explain(model, values, method=method, target=-1, progress=False)
        torch.testing.assert_close(result.scores[sequence], alone.scores[0], rtol=1e-3, atol=1e-5)
    assert result.completeness_gap is None or result.completeness_gap < 1e-5
    assert (result.scores.abs().amax(0) > 0).all()
