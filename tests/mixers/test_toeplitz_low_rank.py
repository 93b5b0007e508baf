"""Toeplitz times low rank, as in multi-head H3 and Hyena."""

import pytest
import torch

from tests.mixers import laws
from unilinattn.errors import FactorError
from unilinattn.mixers.toeplitz import DIRECT_TAPS
from unilinattn.mixers.toeplitz_low_rank import ToeplitzLowRank

BATCH, GROUPS, HEADS, RANK = 2, 2, 4, 3


def case(taps: int) -> laws.Case:
    def draw(length: int) -> laws.Factors:
        query, key = torch.randn(2, BATCH, length, GROUPS, RANK, dtype=torch.float64)
        return {"kernel": torch.randn(HEADS, taps, dtype=torch.float64), "query": query, "key": key}

    return laws.Case(draw, lambda factors: ToeplitzLowRank(**factors), define)


def define(factors: laws.Factors, value: torch.Tensor) -> torch.Tensor:
    """Weight each past outer product by its distance, token by token."""
    kernel, query, key, value = (t.double() for t in (*factors.values(), value))
    query, key = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (query, key))
    outputs = []
    for i in range(value.shape[1]):
        state = value.new_zeros(BATCH, HEADS, RANK, value.shape[-1])
        for j in range(max(0, i + 1 - kernel.shape[1]), i + 1):
            state = state + kernel[:, i - j, None, None] * key[:, j].unsqueeze(-1) * value[:, j].unsqueeze(-2)
        outputs.append((query[:, i].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs, dim=1)


@pytest.fixture(params=[4, 200], ids=["short", "long"])
def product(request) -> laws.Case:
    return case(request.param)


@pytest.mark.parametrize("dtype", laws.PRECISION)
@pytest.mark.parametrize("length", laws.LENGTHS)
def test_apply_is_the_definition(product: laws.Case, length: int, dtype: torch.dtype) -> None:
    laws.check_definition(product, product.draw(length), dtype)


@pytest.mark.parametrize("length", laws.LENGTHS)
def test_every_operation_is_one_matrix(product: laws.Case, length: int) -> None:
    laws.check_forms(product.build(product.draw(length)))


def test_gradients_are_those_of_the_definition(product: laws.Case) -> None:
    laws.check_gradients(product, product.draw(40))


def test_outputs_are_causal_bit_for_bit() -> None:
    laws.check_causal(case(DIRECT_TAPS), 70)


def test_the_fft_is_causal_up_to_rounding() -> None:
    mixer = case(200).build(case(200).draw(70))
    value = laws.values(mixer)
    future = torch.cat([value[:, :30], torch.randn_like(value[:, 30:])], dim=1)
    assert laws.error(mixer.apply(future)[:, :30], mixer.apply(value)[:, :30]) <= 1e-13


def test_passes_are_linear_in_length(product: laws.Case, monkeypatch) -> None:
    laws.check_linear(product.build(product.draw(130)), monkeypatch)


@pytest.mark.parametrize(("name", "level"), [("kernel", 0.0), ("key", 0.0), ("query", 1e12), ("kernel", 1e12)])
def test_extreme_factors(product: laws.Case, name: str, level: float) -> None:
    factors = product.draw(40)
    factors[name] = torch.full_like(factors[name], level)
    for dtype in laws.PRECISION:
        laws.check_definition(product, factors, dtype)
    laws.check_finite_gradients(product, factors)


def test_swapped_queries_and_keys_are_rejected(product: laws.Case) -> None:
    def swapped(factors: laws.Factors) -> ToeplitzLowRank:
        return ToeplitzLowRank(factors["kernel"], factors["key"], factors["query"])

    with pytest.raises(AssertionError, match="apply is not the recurrence"):
        laws.check_definition(laws.Case(product.draw, swapped, define), product.draw(9), torch.float64)


def test_a_factor_that_is_not_finite_is_refused() -> None:
    factors = case(4).draw(3)
    factors["key"][0, 0, 0] = float("nan")
    with pytest.raises(FactorError, match="'key'"):
        ToeplitzLowRank(**factors)
