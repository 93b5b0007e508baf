"""Normalised exponential, as in RWKV-4."""

import pytest
import torch

from tests.mixers import laws
from unilinattn.errors import FactorError
from unilinattn.kernels.scan import recurrences
from unilinattn.mixers.normalized_exponential import NormalizedExponential

BATCH, HEADS = 2, 5


def draw(length: int) -> laws.Factors:
    return {
        "key": torch.randn(BATCH, length, HEADS, dtype=torch.float64),
        "log_decay": -torch.randn(HEADS, dtype=torch.float64).exp(),
        "bonus": torch.randn(HEADS, dtype=torch.float64),
    }


def build(factors: laws.Factors) -> NormalizedExponential:
    return NormalizedExponential(**factors)


def define(factors: laws.Factors, value: torch.Tensor) -> torch.Tensor:
    return recurrences.normalized_exponential(**factors, value=value)


CASE = laws.Case(draw, build, define)


@pytest.mark.parametrize("dtype", laws.PRECISION)
@pytest.mark.parametrize("length", laws.LENGTHS)
def test_apply_is_the_recurrence(length: int, dtype: torch.dtype) -> None:
    laws.check_definition(CASE, draw(length), dtype)


@pytest.mark.parametrize("length", laws.LENGTHS)
def test_every_operation_is_one_matrix(length: int) -> None:
    laws.check_forms(build(draw(length)))


def test_the_matrix_is_a_softmax() -> None:
    factors = draw(130)
    lag = torch.arange(130)[:, None] - torch.arange(130) - 1
    scores = factors["key"].transpose(1, 2).unsqueeze(2) + lag * factors["log_decay"][:, None, None]
    current = factors["key"].transpose(1, 2) + factors["bonus"][:, None]
    scores = torch.where(lag == -1, current.unsqueeze(2), scores).masked_fill(lag < -1, -torch.inf)
    matrix = build(factors).materialize()
    assert laws.error(matrix, scores.softmax(-1)) <= 1e-13
    assert laws.error(matrix.sum(-1), torch.ones(BATCH, HEADS, 130)) <= 1e-13


def test_gradients_are_those_of_the_recurrence() -> None:
    laws.check_gradients(CASE, draw(67))


@pytest.mark.parametrize("length", [3, 64, 130])
def test_outputs_are_causal_bit_for_bit(length: int) -> None:
    laws.check_causal(CASE, length)


def test_passes_are_linear_in_length(monkeypatch) -> None:
    laws.check_linear(build(draw(130)), monkeypatch)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("key", 80.0),
        ("key", -80.0),
        ("log_decay", -80.0),
        ("log_decay", -1e4),
        ("log_decay", 0.0),
        ("log_decay", -1e-6),
        ("bonus", 80.0),
        ("bonus", -80.0),
    ],
)
def test_extreme_factors(name: str, level: float) -> None:
    factors = draw(70)
    partly = {**factors, name: factors[name].clone()}
    partly[name][..., ::3] = level
    rising = {**factors, "key": factors["key"] + level * torch.linspace(-1, 1, 70)[:, None]}
    for inputs in (partly, {**factors, name: torch.full_like(factors[name], level)}, rising):
        for dtype in laws.PRECISION:
            laws.check_definition(CASE, inputs, dtype)
        laws.check_forms(build(inputs))
        laws.check_finite_gradients(CASE, inputs)


def test_keys_whose_exponentials_overflow() -> None:
    factors = draw(70)
    factors["key"] = factors["key"] * 1e4
    laws.check_definition(CASE, factors, torch.float32)
    laws.check_finite_gradients(CASE, factors)


def test_a_decay_before_the_read_is_rejected() -> None:
    def early(factors: laws.Factors) -> NormalizedExponential:
        return build({**factors, "bonus": factors["bonus"] - factors["log_decay"]})

    with pytest.raises(AssertionError, match="apply is not the recurrence"):
        laws.check_definition(laws.Case(draw, early, define), draw(9), torch.float64)


def test_a_factor_that_is_not_finite_is_refused() -> None:
    factors = draw(3)
    factors["key"][0, 0, 0] = float("inf")
    with pytest.raises(FactorError, match="'key'"):
        build(factors)
