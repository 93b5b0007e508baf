"""Pyramids whose levels join tokens of other levels: each level has keys, and nothing of the image is in the bias."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from unilinattn.testing import promoted, relative_error
from unilinattn.testing.hosts import randomize


class Attention(nn.Module):
    """One head of softmax attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def weights(self, x: Tensor) -> Tensor:
        return (self.query(x) @ self.key(x).mT).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x) @ self.value(x)


class Pyramid(nn.Module):
    """Attention to 4 patches, whose upsampled tokens meet a finer map of the image before two convolutions."""

    def __init__(self, join: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.join = join
        self.fine, self.coarse = nn.Conv2d(3, 4, 2, stride=2), nn.Conv2d(4, 4, 2, stride=2)
        self.blocks = nn.ModuleList([Attention(4)])
        self.mixers = nn.ModuleList(
            [nn.Conv2d(4 if join == "sum" else 8, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)]
        )
        self.head, self.second_head = nn.Linear(5, 7), nn.Linear(4, 7)

    def levels(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.fine(pixel_values)
        return fine.tanh(), self.coarse(fine).tanh()

    def joined(self, fine: Tensor, coarse: Tensor, weights: Tensor | None = None) -> Tensor:
        x = coarse.flatten(2).mT
        block: Any = self.blocks[0]
        x = x + (block(x) if weights is None else weights @ block.value(x))
        upsampled = nn.functional.interpolate(x.mT.unflatten(2, (2, 2)), scale_factor=2.0)
        whole = fine + upsampled if self.join == "sum" else torch.cat([upsampled, fine], 1)
        for mixer in self.mixers:
            whole = mixer(whole)
        return self.head(whole.mean((2, 3))) + self.second_head(x.mean(1))

    def forward(self, pixel_values: Tensor) -> Any:
        logits = self.joined(*self.levels(pixel_values))
        return transformers.modeling_outputs.ImageClassifierOutput(logits=logits)


@pytest.mark.parametrize("join", ["sum", "concatenation"])
def test_the_shares_of_each_level_are_those_of_its_own_vectors(join: str) -> None:
    """The oracle is the model with the attention weights of the traced run."""
    model, image = Pyramid(join).double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    result = ula.explain(model, image, method="logit", logit=3, progress=False)
    assert result.streams is not None and list(result.streams["key"].values()) == [4, 16]
    with torch.no_grad():
        fine, coarse = model.levels(image)
        weights = model.blocks[0].weights(coarse.flatten(2).mT)
    fine, coarse = fine.requires_grad_(), coarse.requires_grad_()
    logits = model.joined(fine, coarse, weights)[:, 3]
    gradients = torch.autograd.grad(logits.sum(), (coarse, fine))
    shares = [(x * g).sum(1).flatten(1) for x, g in zip((coarse, fine), gradients, strict=True)]
    assert relative_error(result.scores, torch.cat(shares, 1).detach()) < 1e-10
    bias = model.joined(torch.zeros_like(fine), torch.zeros_like(coarse), weights)[:, 3]
    assert relative_error(result.extras["bias"][None], bias.detach()[None]) < 1e-10


def detector(name: str) -> nn.Module:
    backbone = dict(embedding_size=8, hidden_sizes=[8, 12, 12, 16], depths=[1, 1, 1, 1], layer_type="basic")
    config: Any = getattr(transformers, f"{name}Config")(
        backbone_config=transformers.RTDetrResNetConfig(**backbone, out_features=["stage2", "stage3", "stage4"]),
        encoder_hidden_dim=8,
        encoder_in_channels=[12, 12, 16],
        encoder_ffn_dim=8,
        encoder_attention_heads=2,
        feat_strides=[8, 16, 32],
        encode_proj_layers=[2],
        d_model=8,
        num_queries=5,
        decoder_in_channels=[8, 8, 8],
        decoder_ffn_dim=8,
        decoder_layers=2,
        decoder_attention_heads=2,
        num_feature_levels=3,
        decoder_n_points=2,
        num_labels=3,
        anchor_image_size=None,
    )
    torch.manual_seed(0)
    return randomize(getattr(transformers, f"{name}ForObjectDetection")(config).double().eval())


@pytest.mark.long
@pytest.mark.parametrize("method", ["logit", "lrp", "attn_lrp"])
def test_a_detector_is_explained_by_the_tokens_of_all_levels(method: str) -> None:
    """RT-DETR joins three levels, decodes the best tokens of all, and stops their gradients."""
    model, image = detector("RTDetr"), torch.randn(2, 3, 64, 96, dtype=torch.float64)
    with promoted():
        traced = ula.trace(model, image, progress=False)
        result = ula.explain(traced, method=method, target=4, progress=False)
        first = ula.explain(model, image[:1], method=method, target=4, progress=False)
    assert result.streams is not None and list(result.streams["key"].values()) == [6, 24, 96]
    assert relative_error(result.scores[:1], first.scores) < 1e-8
    assert all(float(level.abs().max()) > 0 for level in result.scores[0].split([6, 24, 96]))
    assert result.completeness_gap is None or result.completeness_gap < 1e-10
