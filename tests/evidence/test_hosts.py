"""The untrained hosts of the studies on sequences."""

import pytest
import torch
from torch.nn import functional

from evidence.hosts import CLASSES, STEP_SIZES, builder
from unilinattn.errors import OptionError


@pytest.mark.parametrize("name", CLASSES)
def test_hosts_depend_on_the_seed_and_have_two_layers_of_one_kind(name: str) -> None:
    build = builder(name, 11)
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        host = build()
        weights.append(torch.cat([weight.flatten() for weight in host.parameters()]))
    assert type(host).__name__ == CLASSES[name][0]
    assert host.config.num_hidden_layers == 2
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_gated_delta_rules_start_with_small_step_sizes() -> None:
    biases = [weight for name, weight in builder("gated_deltanet", 11)().named_parameters() if name.endswith("dt_bias")]
    assert len(biases) == 2
    for bias in biases:
        step = functional.softplus(bias)
        assert bool(((step > 0.999 * STEP_SIZES[0]) & (step < 1.001 * STEP_SIZES[1])).all())
        assert bias.requires_grad


def test_unknown_hosts_are_refused() -> None:
    with pytest.raises(OptionError, match="mamba2"):
        builder("mamba3", 11)
