"""mLSTM where its normaliser is at its floor; `test_memories` has its other tests."""

import torch

from tests.mixers import laws
from tests.mixers.memories import BATCH, EPS, HEADS, MEMORIES

MEMORY = MEMORIES["mLSTM"]


def test_zero_forget_and_input_gates() -> None:
    # The floor exp(-m) of the normaliser then overflows every float.
    factors = MEMORY.draw(70)
    factors["log_forget"] = torch.full_like(factors["log_forget"], -80.0)
    factors["log_input"] = torch.full_like(factors["log_input"], -2000.0)
    mixer = MEMORY.build(factors)
    assert mixer.materialize().count_nonzero() == 0
    laws.check_finite_gradients(MEMORY, factors)


def test_the_first_maximum_starts_at_zero() -> None:
    # For small input gates the floor exp(-m) = exp(0) = 1 is the normaliser, so each weight is as small as its gate.
    factors = MEMORY.draw(1)
    factors["log_forget"], factors["log_input"] = (
        torch.full((BATCH, 1, HEADS), x, dtype=torch.float64) for x in (0.0, -9.0)
    )
    weight = (factors["query"] * factors["key"]).sum(-1) * torch.tensor(-9.0).double().exp()
    expected = weight.transpose(1, 2).unsqueeze(-1) / (1 + EPS)
    assert laws.error(MEMORY.build(factors).materialize(), expected) <= 1e-12
