"""Methods that run the model on many variants of its inputs: `max_memory` bounds the variants in one run."""

import pytest
import torch

import unilinattn as ula
from tests.memory.hosts import traced
from unilinattn.options import Options
from unilinattn.testing import relative_error
from unilinattn.testing.peak import Peak

METHODS = [
    ula.methods.IntegratedGradients(n_steps=32),
    ula.methods.Smoothgrad(n_samples=32),
    ula.methods.Occlusion(),
    ula.methods.Knockout(),
]


@pytest.mark.parametrize("name", ["mamba", "gpt2"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_max_memory_bounds_the_variants_in_one_run(method: Options, name: str) -> None:
    trace = traced(name, 64)

    def run(max_memory: int) -> tuple[int, torch.Tensor]:
        with Peak() as counted:
            result = ula.explain(trace, method=method, target=-1, max_memory=max_memory, progress=False)
        return counted.peak, result.scores

    alone, one_by_one = run(1 << 17)
    whole, scores = run(1 << 30)
    allowed = 4 * alone
    few, by_four = run(allowed)
    assert few <= 2.5 * allowed and 3 * alone < whole
    assert few < 0.75 * whole
    for other in (one_by_one, by_four):
        assert relative_error(other, scores) <= 1e-4
