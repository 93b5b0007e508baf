"""Bootstrap intervals of means."""

import pytest
import torch

from unilinattn.errors import InputError
from unilinattn.evaluation import mean_interval


def test_the_interval_is_that_of_the_standard_error() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    interval = mean_interval(values.tolist())
    half = 1.96 * float(values.std()) / 20
    assert interval.mean == pytest.approx(float(values.mean()))
    assert interval.low == pytest.approx(interval.mean - half, abs=0.1 * half)
    assert interval.high == pytest.approx(interval.mean + half, abs=0.1 * half)
    assert interval.count == 400


def test_a_constant_has_no_width() -> None:
    interval = mean_interval([0.25] * 8)
    assert (interval.low, interval.mean, interval.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("values", [[], [0.0, float("nan")]])
def test_no_values_or_nan_are_refused(values: list[float]) -> None:
    with pytest.raises(InputError, match="values"):
        mean_interval(values)
