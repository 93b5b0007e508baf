"""Flushing of subnormal numbers to zero: all other numbers bit for bit, and the gradient of the identity."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels import subnormal
from unilinattn.kernels.reduced_map import tiled
from unilinattn.kernels.reduced_map.naive import reduced_map
from unilinattn.kernels.subnormal import decays, flushed, flushed_, flushed_given
from unilinattn.memory import parts

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_subnormal_numbers_become_zero(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    unchanged = torch.tensor([2 * info.tiny, -2 * info.tiny, 1, -1, info.max, torch.inf, -torch.inf, 0], dtype=dtype)
    lost = torch.tensor([info.tiny, -info.tiny, info.tiny / 2, -info.tiny / 4], dtype=dtype)
    assert torch.equal(flushed(unchanged), unchanged)
    assert torch.equal(flushed(lost), torch.zeros_like(lost))
    assert flushed(torch.tensor(torch.nan, dtype=dtype)).isnan()
    place = torch.cat([lost, unchanged])
    assert flushed_(place) is place
    assert torch.equal(place, torch.cat([torch.zeros_like(lost), unchanged]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decays_are_normal_numbers_or_zero(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    exponent = torch.cat([-torch.linspace(0, 800, 80001, dtype=torch.float64), torch.tensor([-torch.inf])]).to(dtype)
    exact = exponent.exp()
    for actual in (decays(exponent), decays(exponent.clone(), out=torch.empty_like(exponent))):
        normal = actual > 0
        assert torch.equal(actual[normal], exact[normal])
        assert (actual[normal] >= tiny).all()
        # No range of a factor e of the normal numbers is lost.
        assert (exact[~normal].double() < 3 * tiny).all()


def test_a_complex_number_loses_its_subnormal_part() -> None:
    number = torch.tensor([1 + 1e-40j, 1e-40 + 2j, 3 + 4j], dtype=torch.complex64)
    expected = torch.tensor([1, 2j, 3 + 4j], dtype=torch.complex64)
    assert torch.equal(flushed(number), expected)
    assert torch.equal(flushed(number.conj()), expected.conj())
    assert torch.equal(flushed_(number), expected)


def test_the_gradient_passes_zeros() -> None:
    number = torch.tensor([0.0, 1e-40, 2.0], requires_grad=True)
    weight = torch.tensor([3.0, 4.0, 5.0])
    for flush in (flushed, flushed_):
        (gradient,) = torch.autograd.grad((flush(number * 1) * weight).sum(), number)
        assert torch.equal(gradient, weight)
    assert torch.autograd.gradcheck(flushed, torch.randn(5, dtype=torch.float64, requires_grad=True))


def test_weights_are_copied_only_if_they_contain_subnormal_numbers() -> None:
    weights = torch.rand(2, 3, 4, 4)
    assert flushed_given(weights) is weights
    weights[1, 2, 0, 0] = 1e-40
    assert flushed_given(weights)[1, 2, 0, 0] == 0
    assert weights[1, 2, 0, 0] > 0


@pytest.mark.parametrize(("compared", "count"), [(subnormal.COMPARED["cpu"], 1), (48, 2), (1, 24)])
def test_rows_are_compared_in_parts_of_a_size(compared: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, calls = torch.rand(2, 3, 4, 4), list[Tensor]()
    hardshrink = functional.hardshrink
    monkeypatch.setitem(subnormal.COMPARED, "cpu", compared)
    monkeypatch.setattr(functional, "hardshrink", lambda x, tiny: calls.append(x) or hardshrink(x, tiny))
    assert flushed_given(weights) is weights and len(calls) == count
    weights[1, 2, 3, 1] = 1e-40
    assert flushed_given(weights)[1, 2, 3, 1] == 0 == flushed_given(weights.mT)[1, 2, 1, 3]


@pytest.mark.parametrize("size", [1e-30, 1e-36])
def test_a_map_of_small_numbers_is_accurate(size: float) -> None:
    """Flushing is absolute, not relative to the largest number, so a map of small numbers stays accurate."""
    query, key = torch.rand(1, 40, 3, 2) + 0.5, size * (torch.rand(1, 40, 3, 2) + 0.5)
    decay = -torch.rand(1, 40, 3, 2)
    one = torch.ones(1, 40, 3)
    expected = reduced_map(query, key, decay, one, {0: one})

    def of(tokens: slice, heads: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return query[:, tokens, heads], key[:, tokens, heads], decay[:, tokens, heads]

    actual = torch.cat(
        [block for _, block in tiled.reduced_rows(tiled.HeadMap(of, (1, 40, 3, 2)), parts(40, 24))], dim=1
    )
    tiny, error = torch.finfo(torch.float32).tiny, (actual.double() - expected).abs()
    # In each of the six products one factor may be flushed, whose query is at most 1.5.
    assert (error <= 1e-6 * expected + 6 * 1.5 * tiny).all()
    assert (actual.diagonal(dim1=1, dim2=2) > 0).all()
