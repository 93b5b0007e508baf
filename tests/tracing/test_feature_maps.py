"""Modules that read or return a list of feature maps, and streams whose tokens come before the sequences."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from tests.host.test_host_calls import SMALL, model_of
from tools.sweep_run import Case, prepared
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


@pytest.mark.long
def test_a_list_of_feature_maps_has_a_port_for_each() -> None:
    model, image = segmenter()
    trace = ula.trace(model, image, progress=False)
    (fusion,) = (layer for layer in trace.layers if layer.name == "fusion")
    assert set(fusion.ports.values()) == {(2, 64), (2, 16)}
    assert fusion.reconstruction_error() < 1e-12
    assert {layer.name for layer in trace.layers} >= {"pyramid", "fusion"}


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("method", ["rollout", "alti", "raw"])
def test_a_map_of_the_first_result_is_not_taken_for_that_of_all(method: str) -> None:
    model, image = segmenter()
    with pytest.raises(UncoveredError, match="pyramid returns several feature maps, and its operator gives the first"):
        ula.explain(model, image, method=method, progress=False)


@pytest.mark.long
def test_a_frozen_run_notices_a_layer_that_reads_another_input_than_in_the_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a layer that returns its output only; its part would count as a bias, and the gap would be zero."""
    model, image = segmenter()
    trace = ula.trace(model, image, progress=False)
    monkeypatch.setattr("unilinattn.frozen.layers.returns_maps", lambda layer: False)
    with pytest.raises(UncoveredError, match=r"lateral reads its input, whose value is not that of the trace"):
        ula.explain(trace, method="logit", logit=3, progress=False)


class Deformable(nn.Module):
    """Attention to values of an image at places that its queries decide, as in Deformable DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.places = nn.Conv2d(4, 6, 1), nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor, *, detached: str = "") -> Tensor:
        values, places = self.values(x), self.places(x.flatten(2).mT) / 4
        values = values.detach() if detached == "values" else values
        places = places.detach() if detached == "places" else places
        # Each pixel reads three places.
        sampled = nn.functional.grid_sample(values, places.unflatten(2, (3, 2)), mode="bilinear", align_corners=False)
        return sampled.mean(3).unflatten(2, x.shape[2:])


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attention = nn.Conv2d(3, 4, 1), Deformable()
        self.last, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 7)

    def forward(self, pixel_values: Tensor, detached: str = "") -> Any:
        mixed = self.last(self.attention(self.stem(pixel_values), detached=detached))
        return transformers.modeling_outputs.ImageClassifierOutput(logits=self.head(mixed.mean((2, 3))))


def detector() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return Detector().double().eval(), torch.randn(2, 3, 6, 6, dtype=torch.float64)


def relevance(model: nn.Module, image: Tensor, detached: str) -> Tensor:
    """Return gradient x input of the pixels, with one factor of the attention a constant."""
    pixels = image.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(pixels, detached).logits[:, 3].sum(), pixels)
    return (gradient * image).sum(1).flatten(1)


def test_values_at_frozen_places_have_shares_and_biases() -> None:
    model, image = detector()
    trace = ula.trace(model, image, progress=False)
    assert "attention" in {layer.name for layer in trace.layers}
    result = ula.explain(trace, method="logit", logit=3, progress=False)
    torch.testing.assert_close(result.scores, relevance(model, image, "places"), rtol=1e-9, atol=1e-12)
    assert result.completeness_gap < 1e-12 and result.extras["bias"].abs().min() > 1e-3


@pytest.mark.long
def test_places_that_a_query_decides_have_half_of_the_relevance() -> None:
    model, image = detector()
    result = ula.explain(model, image, method="attn_lrp", measure="logit", logit=3, progress=False)
    sent, decided = (relevance(model, image, each) for each in ("places", "values"))
    torch.testing.assert_close(result.extras["content"], sent, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(result.scores, (sent + decided) / 2, rtol=1e-9, atol=1e-12)
    assert decided.abs().max() > 1e-3


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


@pytest.mark.long
@pytest.mark.parametrize("method", ["logit", "lrp", "attn_lrp", "occlusion", "gradient"])
def test_both_streams_have_shares_where_tokens_come_before_sequences(method: str) -> None:
    model, inputs = fsmt()
    result = ula.explain(model, inputs, method=method, target=-1, progress=False)
    assert result.streams["key"] == {"encoder": 7, "decoder": 5}
    second = {name: value[1:] if isinstance(value, Tensor) else value for name, value in inputs.items()}
    alone = ula.explain(model, second, method=method, target=-1, progress=False)
    torch.testing.assert_close(result.scores[1:], alone.scores, rtol=1e-3, atol=1e-5)
    assert result.completeness_gap is None or result.completeness_gap < 1e-5
    assert (result.scores.abs().amax(0) > 0).all()


STREAMS = {
    "BridgeTowerModel": ("base", "bridgetower", 2),
    "Florence2ForConditionalGeneration": ("image text to text", "florence2", 3),
    "LasrForCTC": ("ctc", "lasr_ctc", 1),
    "UdopForConditionalGeneration": ("image text to text", "udop", 2),
    "VitMatteForImageMatting": ("image matting", "vitmatte", 1),
}
"""Models by their task and type in the sweep, with the number of streams that have shares."""


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_sources_of_models(name: str) -> None:
    task, model_type, count = STREAMS[name]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model, inputs, _, _ = prepared(Case(task, model_type, name))
    result = ula.explain(model, inputs, method="lrp", target=-1, progress=False)
    assert result.completeness_gap < 1e-5
    assert len(result.streams["key"] if result.streams else [1]) == count
    assert (result.scores[0] != 0).float().mean() > 0.5


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x.mT, self.weight, padding=1).mT


class Placed(nn.Module):
    """Adds two constants, by which its vectors are scaled, and then one of them to these."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.kind = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))
        self.blocks = nn.ModuleList(Convolved() for _ in range(2))
        self.first, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, 7)

    def forward(self, vectors: Tensor) -> Any:
        scale = (self.places.expand(len(vectors), -1, -1) + self.kind).exp()
        stream = self.first(vectors) * scale + self.places
        for block in self.blocks:
            stream = stream + block(stream)
        return transformers.modeling_outputs.ImageClassifierOutput(logits=self.head(stream.mean(1)))


def test_the_tokens_have_the_vectors_that_enter_the_first_block() -> None:
    torch.manual_seed(0)
    model, vectors = Placed().double().eval(), torch.randn(2, 6, 3, dtype=torch.float64)
    result = ula.explain(model, vectors, method="logit", logit=3, progress=False)
    # The model is linear: without vectors and constants only the bias of the head is left.
    with torch.no_grad():
        model.places.zero_()
        model.kind.zero_()
        bias = model(torch.zeros_like(vectors)).logits[:, 3]
    torch.testing.assert_close(result.extras["bias"], bias, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_vectors_before_sequences_are_replaced_in_runs_of_several_variants() -> None:
    """The image's tower of BridgeTower reads (token, batch, channel); a run replaces the vectors of each variant."""
    task, model_type, _ = STREAMS["BridgeTowerModel"]
    model, inputs, _, _ = prepared(Case(task, model_type, "BridgeTowerModel"))
    result = ula.explain(model, inputs, method="occlusion", target=-1, progress=False)
    patches = list(result.streams["key"].values())[1]
    assert (result.scores[0, -patches:].abs() > 1e-4).all()


@pytest.mark.slow
def test_two_streams_of_one_shape_are_told_by_their_vectors() -> None:
    """Calls of one function return the vectors of both, and those inside of layers are not made in a frozen run."""
    model, inputs, _, _ = prepared(Case("image text to text", "florence2", "Florence2ForConditionalGeneration"))
    length = inputs["input_ids"].shape[1]
    inputs = {**inputs, "decoder_input_ids": torch.arange(1, length + 1)[None]}
    result = ula.explain(model, inputs, method="lrp", target=-1, progress=False)
    assert result.completeness_gap < 1e-5
    assert list(result.streams["key"].values())[-2:] == [length, length]
    # What the last token of the decoder decides, all tokens of it may have sent.
    assert (result.scores[0, -length:] != 0).all()


def luke() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = dict(vocab_size=20, entity_vocab_size=9, entity_emb_size=8, max_position_embeddings=32)
    model = model_of("LukeForMaskedLM", "LukeConfig", **SMALL, **sizes).double()
    ids, places = torch.randint(3, 20, (2, 5)), torch.tensor([[[0, 1, -1], [2, -1, -1]]]).expand(2, 2, 3)
    return model, {"input_ids": ids, "entity_ids": torch.tensor([[1, 4], [7, 2]]), "entity_position_ids": places}


@pytest.mark.parametrize("method", ["logit", "occlusion"])
def test_entities_beside_a_text_have_shares(method: str) -> None:
    model, inputs = luke()
    result = ula.explain(model, inputs, method=method, target=2, progress=False)
    assert result.scores.shape == (2, 7) and (result.scores[:, 5:].abs() > 0).all()
    assert result.completeness_gap is None or result.completeness_gap < 1e-10
    other = {**inputs, "entity_ids": torch.tensor([[1, 4], [7, 5]])}
    moved = ula.explain(model, other, method=method, target=2, logit=3, progress=False)
    same = ula.explain(model, inputs, method=method, target=2, logit=3, progress=False)
    torch.testing.assert_close(moved.scores[0], same.scores[0], rtol=1e-8, atol=1e-12)
    assert not torch.allclose(moved.scores[1], same.scores[1])
