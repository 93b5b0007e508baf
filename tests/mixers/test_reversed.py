"""Reversed mixers: the second direction of a bidirectional layer; `test_memories` has their other tests."""

import pytest
import torch

from tests.mixers import laws
from tests.mixers.memories import BATCH, HEADS, MEMORIES
from unilinattn.mixers.diagonal_decay import DiagonalDecay
from unilinattn.mixers.reversed import Reversed
from unilinattn.mixers.toeplitz import Toeplitz

MEMORY = MEMORIES["reversed diagonal decay"]


@pytest.mark.parametrize("length", [1, 65])
def test_the_matrix_is_the_inner_one_flipped_on_both_axes(length: int) -> None:
    inner = DiagonalDecay(**MEMORY.draw(length))
    matrix = Reversed(inner).materialize()
    assert torch.equal(matrix, inner.materialize().flip(-2, -1))
    assert matrix.tril(-1).count_nonzero() == 0


def test_outputs_are_anticausal_bit_for_bit() -> None:
    mixer = MEMORY.build(MEMORY.draw(70))
    value = laws.values(mixer)
    past = torch.cat([torch.randn_like(value[:, :30]), value[:, 30:]], dim=1)
    assert torch.equal(mixer.apply(value)[:, 30:], mixer.apply(past)[:, 30:])


def test_twice_reversed_is_the_inner_mixer() -> None:
    inner = DiagonalDecay(**MEMORY.draw(65))
    assert torch.equal(Reversed(Reversed(inner)).materialize(), inner.materialize())


def test_properties_are_those_of_the_inner_mixer() -> None:
    fixed = Reversed(Toeplitz(torch.randn(HEADS, 4, dtype=torch.float64), batch=BATCH, length=9))
    assert (fixed.data_controlled, fixed.causal, fixed.structure) == (False, False, "reversed Toeplitz")
    selective = MEMORY.build(MEMORY.draw(9))
    assert (selective.data_controlled, selective.structure) == (True, "reversed diagonal decay")
    for mixer in (fixed, selective):
        laws.check_forms(mixer)
