"""Exclusive read with bonus, as in RWKV-6."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.mixers import laws
from unilinattn.errors import FactorError
from unilinattn.kernels.scan import recurrences
from unilinattn.mixers.diagonal_decay import DiagonalDecay
from unilinattn.mixers.exclusive_bonus import ExclusiveBonus

BATCH, HEADS, STATE = 2, 3, 6


def draw(length: int) -> laws.Factors:
    normal = torch.randn(3, BATCH, length, HEADS, STATE, dtype=torch.float64)
    bonus = torch.randn(HEADS, STATE, dtype=torch.float64)
    return {"query": normal[0], "key": normal[1], "log_decay": logsigmoid(3 * normal[2]), "bonus": bonus}


def build(factors: laws.Factors) -> ExclusiveBonus:
    return ExclusiveBonus(**factors)


def define(factors: laws.Factors, value: torch.Tensor) -> torch.Tensor:
    return recurrences.exclusive_bonus(**factors, value=value)


CASE = laws.Case(draw, build, define)


@pytest.mark.parametrize("dtype", laws.PRECISION)
@pytest.mark.parametrize("length", laws.LENGTHS)
def test_apply_is_the_recurrence(length: int, dtype: torch.dtype) -> None:
    laws.check_definition(CASE, draw(length), dtype)


@pytest.mark.parametrize("length", laws.LENGTHS)
def test_every_operation_is_one_matrix(length: int) -> None:
    laws.check_forms(build(draw(length)))


def test_gradients_are_those_of_the_recurrence() -> None:
    laws.check_gradients(CASE, draw(67))


@pytest.mark.parametrize("length", [3, 64, 130])
def test_outputs_are_causal_bit_for_bit(length: int) -> None:
    laws.check_causal(CASE, length)


def test_passes_are_linear_in_length(monkeypatch) -> None:
    laws.check_linear(build(draw(130)), monkeypatch)


@pytest.mark.parametrize(
    ("name", "level"),
    [("log_decay", -80.0), ("log_decay", -1000.0), ("log_decay", 0.0), ("key", 0.0), ("bonus", 0.0), ("query", 1e18)],
)
def test_extreme_factors(name: str, level: float) -> None:
    factors = draw(70)
    partly = {**factors, name: factors[name].clone()}
    partly[name][:, ::3] = level
    for inputs in (partly, {**factors, name: torch.full_like(factors[name], level)}):
        for dtype in laws.PRECISION:
            laws.check_definition(CASE, inputs, dtype)
        laws.check_forms(build(inputs))
        laws.check_finite_gradients(CASE, inputs)


def test_an_inclusive_read_is_rejected() -> None:
    def inclusive(factors: laws.Factors) -> DiagonalDecay:
        return DiagonalDecay(factors["query"], factors["key"], factors["log_decay"])

    with pytest.raises(AssertionError, match="apply is not the recurrence"):
        laws.check_definition(laws.Case(draw, inclusive, define), draw(9), torch.float64)


def test_a_factor_that_is_not_finite_is_refused() -> None:
    factors = draw(3)
    factors["bonus"][0, 0] = float("nan")
    with pytest.raises(FactorError, match="'bonus'"):
        build(factors)
