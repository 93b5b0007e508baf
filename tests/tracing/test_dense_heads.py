"""Heads that return an image: pyramids of pools, interpolations between layers and behind them."""

from typing import Any

import pytest
import torch

import unilinattn as ula
from tools.sweep_run import Case, prepared
from unilinattn.testing import promoted

HEADS = {
    # Each with its task, its type, and the path of its last layer.
    "DPTForDepthEstimation": ("depth estimation", "dpt", "head.head"),
    "UperNetForSemanticSegmentation": ("semantic segmentation", "upernet", "auxiliary_head.convs.0"),
    "SegformerForSemanticSegmentation": ("semantic segmentation", "segformer", "decode_head"),
    "Swin2SRForImageSuperResolution": ("image to image", "swin2sr", "upsample"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_a_pixel_of_a_dense_head_has_exact_shares(name: str) -> None:
    task, model_type, last = HEADS[name]
    model, inputs, _, _ = prepared(Case(task, model_type, name))
    model, inputs = model.double(), {key: value.double() for key, value in inputs.items()}

    def pixel(output: Any) -> torch.Tensor:
        values = next(iter(output.values())).flatten(1)
        return values[:, int(values.abs().argmax())]

    with promoted():
        traced = ula.trace(model, inputs, progress=False)
        assert traced.layers[-1].name == last
        assert max(layer.reconstruction_error() for layer in traced.layers) < 1e-10
        result = ula.explain(traced, method="logit", logit=pixel, progress=False)
    assert result.completeness_gap is not None and result.completeness_gap < 1e-10
    assert float(result.scores.abs().max()) > 0
