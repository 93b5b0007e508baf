"""Every memory is its recurrence and one matrix, also for extreme factors."""

import pytest
import torch

from tests.mixers import laws
from tests.mixers.memories import MEMORIES, Memory, well_conditioned, wrong
from unilinattn.errors import FactorError

every = pytest.mark.parametrize("name", MEMORIES)
lengths = pytest.mark.parametrize("lengths", [(1, 65, 130), pytest.param((3, 63, 64), marks=pytest.mark.slow)], ids=str)

EXTREMES = [
    pytest.param(name, factor, level, id=f"{name}-{factor}-{level:g}", marks=pytest.mark.slow if at else ())
    for name, memory in MEMORIES.items()
    for factor, levels in memory.extremes.items()
    for at, level in enumerate(levels)
]
"""The first level of each factor, and slow ones."""
MISTAKES = [(name, mistake) for name, memory in MEMORIES.items() for mistake in memory.mistakes]


@every
@lengths
@pytest.mark.parametrize("dtype", laws.PRECISION, ids=str)
def test_apply_is_the_recurrence(name: str, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    for length in lengths:
        laws.check_definition(MEMORIES[name], MEMORIES[name].draw(length), dtype)


@pytest.mark.long
@every
@lengths
def test_every_operation_is_one_matrix(name: str, lengths: tuple[int, ...]) -> None:
    for length in lengths:
        laws.check_forms(MEMORIES[name].build(MEMORIES[name].draw(length)))


@every
def test_gradients_are_those_of_the_recurrence(name: str) -> None:
    laws.check_gradients(MEMORIES[name], MEMORIES[name].draw(67))


@pytest.mark.parametrize("name", [name for name in MEMORIES if not name.startswith("reversed") and "FFT" not in name])
def test_outputs_are_causal_bit_for_bit(name: str) -> None:
    for length in (3, 64, 130):
        laws.check_causal(MEMORIES[name], length)


def check_extreme(memory: Memory, factors: laws.Factors) -> None:
    for dtype in laws.PRECISION:
        laws.check_definition(memory, factors, dtype)
    laws.check_forms(memory.build(factors))
    laws.check_finite_gradients(memory, factors)


@pytest.mark.long
@pytest.mark.parametrize(("name", "factor", "level"), EXTREMES)
def test_extreme_factors(name: str, factor: str, level: float) -> None:
    factors = well_conditioned(name, MEMORIES[name].draw(70))
    # Every third token, or head, so that an ordinary factor follows an extreme one.
    partly = factors[factor].clone()
    partly[(slice(None), slice(None, None, 3)) if partly.ndim > 2 else (..., slice(None, None, 3))] = level
    for changed in (partly, torch.full_like(partly, level)):
        check_extreme(MEMORIES[name], {**factors, factor: changed})


@pytest.mark.parametrize("level", [80.0, -80.0, -1e4])
def test_rising_and_falling_keys(level: float) -> None:
    memory = MEMORIES["normalised exponential"]
    factors = memory.draw(70)
    check_extreme(memory, {**factors, "key": factors["key"] + level * torch.linspace(-1, 1, 70)[:, None]})


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_a_typical_mistake_is_rejected(name: str, mistake: str) -> None:
    memory = wrong(MEMORIES[name], mistake)
    with pytest.raises(AssertionError, match="apply is not the recurrence"):
        laws.check_definition(memory, memory.draw(9), torch.float64)


@every
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_factor_that_is_not_finite_is_refused(name: str, number: float) -> None:
    memory = MEMORIES[name]
    for factor in memory.draw(3):
        factors = memory.draw(3)
        factors[factor].view(-1)[0] = number
        with pytest.raises(FactorError, match=f"'{factor}'|'query'"):
            memory.build(factors)
