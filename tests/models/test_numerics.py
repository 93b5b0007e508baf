"""The convolution and the dtypes of the reference models."""

import pytest
import torch

from unilinattn.models.numerics import causal_convolution, complex_from_pairs, powers, working_dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_convolution_is_its_definition(dtype: torch.dtype, length: int) -> None:
    signal, kernel = torch.randn(2, 3, length, dtype=dtype), torch.randn(3, length, dtype=dtype)
    expected = torch.zeros_like(signal)
    for i in range(length):
        for j in range(i + 1):
            expected[..., i] += kernel[..., i - j] * signal[..., j]
    torch.testing.assert_close(causal_convolution(signal, kernel), expected, rtol=1e-12, atol=1e-13)


def test_powers_start_at_one_even_for_zero() -> None:
    base = torch.tensor([0.0, 0.5j, -2.0], dtype=torch.complex128, requires_grad=True)
    actual = powers(base, 4)
    expected = torch.stack([base**n for n in range(4)], dim=-1)
    torch.testing.assert_close(actual, expected)
    actual.abs().sum().backward()
    assert base.grad is not None
    assert base.grad.isfinite().all()


@pytest.mark.parametrize(
    ("own", "working"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2]
)
def test_computation_runs_in_float32_at_least(own: torch.dtype, working: torch.dtype) -> None:
    assert working_dtype(torch.zeros(1, dtype=own)) == working
    assert complex_from_pairs(torch.ones(3, 2, dtype=own)).real.dtype == working
