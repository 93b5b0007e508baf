"""Reversed mixers: the second direction of a bidirectional layer."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.mixers import laws
from unilinattn.kernels.scan import naive
from unilinattn.mixers.diagonal_decay import DiagonalDecay
from unilinattn.mixers.reversed import Reversed
from unilinattn.mixers.toeplitz import Toeplitz

BATCH, HEADS, STATE = 2, 3, 4


def draw(length: int) -> laws.Factors:
    query, key, decay = torch.randn(3, BATCH, length, HEADS, STATE, dtype=torch.float64)
    return {"query": query, "key": key, "log_decay": logsigmoid(decay)}


def build(factors: laws.Factors) -> Reversed:
    return Reversed(DiagonalDecay(**factors))


def define(factors: laws.Factors, value: torch.Tensor) -> torch.Tensor:
    return naive.decay_scan(**factors, value=value.flip(1)).flip(1)


CASE = laws.Case(draw, build, define)


@pytest.mark.parametrize("dtype", laws.PRECISION)
@pytest.mark.parametrize("length", laws.LENGTHS)
def test_apply_is_the_recurrence(length: int, dtype: torch.dtype) -> None:
    laws.check_definition(CASE, draw(length), dtype)


@pytest.mark.parametrize("length", laws.LENGTHS)
def test_every_operation_is_one_matrix(length: int) -> None:
    laws.check_forms(build(draw(length)))


@pytest.mark.parametrize("length", [1, 65])
def test_the_matrix_is_the_inner_one_flipped_on_both_axes(length: int) -> None:
    inner = DiagonalDecay(**draw(length))
    matrix = Reversed(inner).materialize()
    assert torch.equal(matrix, inner.materialize().flip(-2, -1))
    assert matrix.tril(-1).count_nonzero() == 0


def test_outputs_are_anticausal_bit_for_bit() -> None:
    mixer = build(draw(70))
    value = laws.values(mixer)
    past = torch.cat([torch.randn_like(value[:, :30]), value[:, 30:]], dim=1)
    assert torch.equal(mixer.apply(value)[:, 30:], mixer.apply(past)[:, 30:])


def test_twice_reversed_is_the_inner_mixer() -> None:
    inner = DiagonalDecay(**draw(65))
    assert torch.equal(Reversed(Reversed(inner)).materialize(), inner.materialize())


def test_gradients_are_those_of_the_recurrence() -> None:
    laws.check_gradients(CASE, draw(67))


def test_passes_are_linear_in_length(monkeypatch) -> None:
    laws.check_linear(build(draw(130)), monkeypatch)


@pytest.mark.parametrize("level", [-80.0, 0.0])
def test_extreme_factors(level: float) -> None:
    factors = draw(70)
    factors["log_decay"] = torch.full_like(factors["log_decay"], level)
    for dtype in laws.PRECISION:
        laws.check_definition(CASE, factors, dtype)
    laws.check_finite_gradients(CASE, factors)


def test_properties_are_those_of_the_inner_mixer() -> None:
    fixed = Reversed(Toeplitz(torch.randn(HEADS, 4, dtype=torch.float64), batch=BATCH, length=9))
    assert (fixed.data_controlled, fixed.causal, fixed.structure) == (False, False, "reversed Toeplitz")
    assert (build(draw(2)).data_controlled, build(draw(2)).structure) == (True, "reversed diagonal decay")
    laws.check_forms(fixed)


def test_the_forward_direction_is_rejected() -> None:
    forward = laws.Case(draw, lambda factors: DiagonalDecay(**factors), define)
    with pytest.raises(AssertionError, match="apply is not the recurrence"):
        laws.check_definition(forward, draw(9), torch.float64)
