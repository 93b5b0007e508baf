"""Normalised exponential as a softmax, and with overflowing keys; `test_memories` has its other tests."""

import torch

from tests.mixers import laws
from tests.mixers.memories import BATCH, HEADS, MEMORIES

MEMORY = MEMORIES["normalised exponential"]


def test_the_matrix_is_a_softmax() -> None:
    factors = MEMORY.draw(130)
    lag = torch.arange(130)[:, None] - torch.arange(130) - 1
    scores = factors["key"].transpose(1, 2).unsqueeze(2) + lag * factors["log_decay"][:, None, None]
    current = factors["key"].transpose(1, 2) + factors["bonus"][:, None]
    scores = torch.where(lag == -1, current.unsqueeze(2), scores).masked_fill(lag < -1, -torch.inf)
    matrix = MEMORY.build(factors).materialize()
    assert laws.error(matrix, scores.softmax(-1)) <= 1e-13
    assert laws.error(matrix.sum(-1), torch.ones(BATCH, HEADS, 130)) <= 1e-13


def test_keys_whose_exponentials_overflow() -> None:
    factors = MEMORY.draw(70)
    factors["key"] = factors["key"] * 1e4
    laws.check_definition(MEMORY, factors, torch.float32)
    laws.check_finite_gradients(MEMORY, factors)
