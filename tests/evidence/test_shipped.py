"""The weights that ship, against their records."""

import pytest
import torch

from evidence import study
from evidence.__main__ import WEIGHTS, recorded
from evidence.study import SEEDS
from evidence.training import record

MODELS = [(name, model) for name in recorded() for model in study(name).models]


@torch.no_grad()
@pytest.mark.parametrize(("name", "model"), MODELS)
def test_shipped_weights_reach_their_recorded_accuracy(name: str, model: str) -> None:
    one = study(name)
    for seed in SEEDS:
        accuracy = one.accuracy(one.hosts(WEIGHTS, seed)[model](), model)
        # The rounding of another processor may change a few answers in a thousand.
        assert accuracy == pytest.approx(record(one.path(WEIGHTS, model, seed))["accuracy"], abs=0.004)
