"""mLSTM, the matrix memory of xLSTM."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.mixers import laws
from unilinattn.errors import FactorError
from unilinattn.kernels.scan import recurrences
from unilinattn.mixers.mlstm import MLSTM

BATCH, HEADS, STATE, EPS = 2, 3, 6, 1e-6


def draw(length: int) -> laws.Factors:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(BATCH, length, HEADS, *shape, dtype=torch.float64)

    return {
        "query": normal(STATE) * STATE**-0.5,
        "key": normal(STATE),
        "log_forget": logsigmoid(3 + 2 * normal()),
        "log_input": 2 * normal() - 2,
    }


def build(factors: laws.Factors) -> MLSTM:
    return MLSTM(**factors, eps=EPS)


def define(factors: laws.Factors, value: torch.Tensor) -> torch.Tensor:
    return recurrences.mlstm(**factors, eps=EPS, value=value)


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
    [
        ("log_input", 80.0),
        ("log_input", -80.0),
        ("log_forget", 0.0),
        ("log_forget", -80.0),
        ("key", 0.0),
        ("query", 0.0),
    ],
)
def test_extreme_factors(name: str, level: float) -> None:
    factors = draw(70)
    # Without the floor, a normaliser that changes sign is near zero, and its row has few correct digits.
    factors = {**factors, "query": factors["query"].abs(), "key": factors["key"].abs()}
    partly = {**factors, name: factors[name].clone()}
    partly[name][:, ::3] = level
    for inputs in (partly, {**factors, name: torch.full_like(factors[name], level)}):
        for dtype in laws.PRECISION:
            laws.check_definition(CASE, inputs, dtype)
        laws.check_forms(build(inputs))
        laws.check_finite_gradients(CASE, inputs)


def test_zero_forget_and_input_gates() -> None:
    # The floor exp(-m) of the normaliser then overflows every float.
    factors = draw(70)
    factors["log_forget"] = torch.full_like(factors["log_forget"], -80.0)
    factors["log_input"] = torch.full_like(factors["log_input"], -2000.0)
    mixer = build(factors)
    assert mixer.materialize().count_nonzero() == 0
    laws.check_finite_gradients(CASE, factors)


@pytest.mark.parametrize("change", [{"log_input": -1.0}, {"log_forget": -0.1}, {"query": 0.1}])
def test_a_perturbed_factor_is_rejected(change: dict[str, float]) -> None:
    def off(factors: laws.Factors) -> MLSTM:
        return build({name: factor + change.get(name, 0.0) for name, factor in factors.items()})

    with pytest.raises(AssertionError, match="apply is not the recurrence"):
        laws.check_definition(laws.Case(draw, off, define), draw(9), torch.float64)


def test_the_first_maximum_starts_at_zero() -> None:
    # For small input gates the floor exp(-m) = exp(0) = 1 is the normaliser, so each weight is as small as its gate.
    factors = draw(1)
    factors["log_forget"], factors["log_input"] = (
        torch.full((BATCH, 1, HEADS), x, dtype=torch.float64) for x in (0.0, -9.0)
    )
    weight = (factors["query"] * factors["key"]).sum(-1) * torch.tensor(-9.0).double().exp()
    expected = weight.transpose(1, 2).unsqueeze(-1) / (1 + EPS)
    assert laws.error(build(factors).materialize(), expected) <= 1e-12


def test_a_factor_that_is_not_finite_is_refused() -> None:
    factors = draw(3)
    factors["log_input"][0, 0, 0] = float("nan")
    with pytest.raises(FactorError, match="'log_input'"):
        build(factors)
