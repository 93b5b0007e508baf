"""Time series have numbers in place of ids, and may have no features of their times."""

from typing import Any

import pytest
import torch
import transformers

import unilinattn as ula
from unilinattn.errors import InputError

GAP = 1e-10
"""Largest completeness gap in float64."""


def time_series(features: int) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2, 3],
        num_time_features=features,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
    )
    inputs = {
        "past_values": torch.randn(1, 11),
        "past_time_features": torch.randn(1, 11, features),
        "past_observed_mask": torch.ones(1, 11),
        "future_values": torch.randn(1, 4),
        "future_time_features": torch.randn(1, 4, features),
    }
    model = transformers.TimeSeriesTransformerModel(config).double().eval()
    return model, {name: value.double() for name, value in inputs.items()}


@pytest.mark.long
@pytest.mark.parametrize("features", [0, 2])
def test_a_time_series_without_features_of_its_times_is_explained(features: int) -> None:
    model, inputs = time_series(features)
    result = ula.explain(model, inputs, method="lrp", target=-1, progress=False)
    with torch.no_grad():
        vectors = model(**inputs).last_hidden_state
    assert float(result.extras["logit"]) == pytest.approx(float(vectors[0, -1].norm()), rel=GAP)
    assert result.completeness_gap is not None
    assert result.completeness_gap <= GAP


def test_an_image_without_pixels_is_refused() -> None:
    model, pixels = torch.nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 0, 8)
    with pytest.raises(InputError, match=r"has shape \(1, 3, 0, 8\); at least one sequence of one token is needed"):
        ula.trace(model, pixels, progress=False)


@pytest.mark.parametrize("shape", [(1, 0, 2), (0, 11, 2)])
def test_features_of_no_token_are_refused(shape: tuple[int, ...]) -> None:
    model, inputs = time_series(2)
    with pytest.raises(InputError, match=r"past_time_features has shape .* Leave the argument out"):
        ula.trace(model, {**inputs, "past_time_features": torch.zeros(shape, dtype=torch.float64)}, progress=False)
