"""Substeps of the gated delta product: several delta updates per token, each with a separate value."""

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from tests.mixers import laws
from unilinattn.errors import InputError
from unilinattn.kernels.scan import recurrences
from unilinattn.mixers.delta_rule import DeltaRule
from unilinattn.mixers.reversed import Reversed
from unilinattn.mixers.substep import Substep

BATCH, COUNT, HEADS, STATE = 2, 3, 2, 5


def draw(length: int) -> laws.Factors:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(BATCH, length, *shape, dtype=torch.float64)

    return {
        "query": normal(HEADS, STATE),
        "key": normalize(normal(COUNT, HEADS, STATE), dim=-1),
        "strength": 2 * normal(COUNT, HEADS).sigmoid(),
        "log_decay": logsigmoid(3 * normal(HEADS)),
    }


def expanded(factors: laws.Factors) -> DeltaRule:
    """The decay of a token applies at its first sub-step, the query at its last."""
    query, decay = (torch.zeros_like(factors[name]) for name in ("key", "strength"))
    query[:, :, -1], decay[:, :, 0] = factors["query"], factors["log_decay"]
    steps = (query, factors["key"], factors["strength"], decay)
    return DeltaRule(*(t.flatten(1, 2) for t in steps))


def case(index: int) -> laws.Case:
    def define(factors: laws.Factors, value: torch.Tensor) -> torch.Tensor:
        values = torch.stack([value if s == index else torch.zeros_like(value) for s in range(COUNT)], dim=2)
        return recurrences.delta_product(**factors, value=values)

    return laws.Case(draw, lambda factors: Substep(expanded(factors), COUNT, index), define)


@pytest.mark.parametrize("dtype", laws.PRECISION)
@pytest.mark.parametrize("length", laws.LENGTHS)
@pytest.mark.parametrize("index", range(COUNT))
def test_apply_is_the_recurrence(index: int, length: int, dtype: torch.dtype) -> None:
    laws.check_definition(case(index), draw(length), dtype)


@pytest.mark.parametrize("length", laws.LENGTHS)
def test_every_operation_is_one_matrix(length: int) -> None:
    laws.check_forms(Substep(expanded(draw(length)), COUNT, 1))


def test_the_layer_is_the_sum_of_its_substeps() -> None:
    factors = draw(70)
    mixer = expanded(factors)
    value = torch.randn(BATCH, 70, COUNT, HEADS, 2, dtype=torch.float64)
    summed = sum(Substep(mixer, COUNT, s).apply(value[:, :, s]) for s in range(COUNT))
    assert laws.error(summed, recurrences.delta_product(**factors, value=value)) <= 1e-13


def test_gradients_are_those_of_the_recurrence() -> None:
    laws.check_gradients(case(1), draw(25))


@pytest.mark.parametrize("length", [3, 64, 130])
def test_outputs_are_causal_bit_for_bit(length: int) -> None:
    laws.check_causal(case(1), length)


def test_passes_are_linear_in_length(monkeypatch) -> None:
    laws.check_linear(Substep(expanded(draw(70)), COUNT, 0), monkeypatch)


@pytest.mark.parametrize(("name", "level"), [("log_decay", -80.0), ("strength", 0.0), ("strength", 2.0), ("key", 0.0)])
def test_extreme_factors(name: str, level: float) -> None:
    factors = draw(30)
    inputs = {**factors, name: torch.full_like(factors[name], level)}
    for dtype in laws.PRECISION:
        laws.check_definition(case(0), inputs, dtype)
    laws.check_forms(Substep(expanded(inputs), COUNT, 0))
    laws.check_finite_gradients(case(0), inputs)


def test_the_wrong_substep_is_rejected() -> None:
    wrong = laws.Case(draw, case(0).build, case(1).define)
    with pytest.raises(AssertionError, match="apply is not the recurrence"):
        laws.check_definition(wrong, draw(9), torch.float64)


@pytest.mark.parametrize(("count", "index"), [(0, 0), (2, 0), (3, 3), (3, -1)])
def test_an_invalid_number_of_substeps_is_refused(count: int, index: int) -> None:
    with pytest.raises(InputError, match=f"sub-step {index} of {count}"):
        Substep(expanded(draw(5)), count, index)


def test_another_structure_is_refused() -> None:
    with pytest.raises(InputError, match="sub-steps of Reversed are not defined"):
        Substep(Reversed(expanded(draw(2))), COUNT, 0)
