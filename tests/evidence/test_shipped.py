"""The weights that ship, against their records."""

import pytest
import torch

from evidence import study
from evidence.__main__ import WEIGHTS, recorded
from evidence.study import SEEDS
from evidence.training import record

MODELS = [(name, model) for name in recorded() for model in study(name).models]
BY_TURNS = [(name, model, SEEDS[turn % len(SEEDS)]) for turn, (name, model) in enumerate(MODELS)]
"""Each model with one of its seeds, since the samples of all take minutes."""


@torch.no_grad()
@pytest.mark.parametrize(("name", "model", "seed"), BY_TURNS)
def test_shipped_weights_reach_their_recorded_accuracy(name: str, model: str, seed: int) -> None:
    one = study(name)
    accuracy = one.accuracy(one.hosts(WEIGHTS, seed)[model](), model)
    # The rounding of another processor may change a few answers in a thousand.
    assert accuracy == pytest.approx(record(one.path(WEIGHTS, model, seed))["accuracy"], abs=0.004)
