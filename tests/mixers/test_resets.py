"""Resets: a decay of exactly zero at the beginning of a segment."""

import pytest
import torch

from tests.mixers import laws
from tests.mixers.memories import BATCH, HEADS, by_coordinate
from unilinattn.kernels.scan import naive
from unilinattn.mixers import DiagonalDecay


def resets(length: int) -> torch.Tensor:
    """Random resets, two in a row, one on the first token and one at the beginning of a chunk."""
    reset = torch.rand(BATCH, length) < 0.1
    reset[:, 0] = True
    reset[0, length // 2 : length // 2 + 2] = True
    reset[1, 64:65] = True
    return reset


def case(reset: torch.Tensor) -> laws.Case:
    def define(factors: laws.Factors, value: torch.Tensor) -> torch.Tensor:
        log_decay = factors["log_decay"].double().masked_fill(reset[..., None, None], -torch.inf)
        return naive.decay_scan(factors["query"], factors["key"], log_decay, value)

    return laws.Case(by_coordinate, lambda factors: DiagonalDecay(**factors, reset=reset), define)


@pytest.mark.parametrize("length", laws.LENGTHS)
def test_a_reset_is_a_decay_of_zero(length: int) -> None:
    reset = resets(length)
    ruled, factors = case(reset), by_coordinate(length)
    for dtype in laws.PRECISION:
        laws.check_definition(ruled, factors, dtype)
    laws.check_forms(ruled.build(factors))
    laws.check_finite_gradients(ruled, factors)
    laws.check_gradients(ruled, factors)


def test_nothing_crosses_a_reset() -> None:
    reset = resets(130)
    mixer = case(reset).build(by_coordinate(130))
    segment = reset.cumsum(1)
    apart = (segment.unsqueeze(2) != segment.unsqueeze(1)).unsqueeze(1).expand(-1, HEADS, -1, -1)
    every = torch.arange(130).expand(BATCH, -1)
    for matrix in (mixer.materialize(), mixer.rows(every)):
        assert matrix[apart].count_nonzero() == 0
        assert matrix[~apart & torch.ones(130, 130).tril().bool()].count_nonzero() > 0


def test_packed_sequences_equal_the_single_ones() -> None:
    factors = by_coordinate(130)
    reset = torch.zeros(BATCH, 130, dtype=torch.bool)
    reset[:, [0, 50, 51]] = True
    packed = DiagonalDecay(**factors, reset=reset).materialize()
    for start, stop in ((0, 50), (50, 51), (51, 130)):
        single = DiagonalDecay(**{name: factor[:, start:stop] for name, factor in factors.items()})
        assert laws.error(packed[..., start:stop, start:stop], single.materialize()) <= 1e-13


def test_a_reset_is_exact_unlike_a_finite_decay() -> None:
    factors = {"query": torch.ones(1, 2, 1, 1), "key": torch.tensor([1e30, 1.0]).reshape(1, 2, 1, 1)}
    strong = DiagonalDecay(**factors, log_decay=torch.full((1, 2, 1, 1), -60.0))
    exact = DiagonalDecay(**factors, log_decay=torch.zeros(1, 2, 1, 1), reset=torch.tensor([[False, True]]))
    assert strong.materialize()[0, 0, 1, 0] > 0
    assert exact.materialize()[0, 0, 1].tolist() == [0.0, 1.0]


def test_a_missing_reset_is_rejected() -> None:
    ruled = case(resets(65))
    loose = laws.Case(ruled.draw, lambda factors: DiagonalDecay(**factors), ruled.define)
    with pytest.raises(AssertionError, match="apply is not the recurrence"):
        laws.check_definition(loose, ruled.draw(65), torch.float64)
