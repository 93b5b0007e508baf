"""Rows that run the model through its operators have the scores of the host's code."""

from typing import Any

import pytest
import torch

import unilinattn as ula
from evidence.operators import by_operators
from unilinattn.evaluation import Sample
from unilinattn.examples import TASKS, load
from unilinattn.testing import TOLERANCES, relative_error

METHODS: dict[str, Any] = {
    "input x gradient": "input_x_gradient",
    "integrated gradients": ("integrated_gradients", {"n_steps": 4}),
    "knockout": "knockout",
}


@pytest.mark.parametrize("label", METHODS)
def test_the_scores_are_those_of_the_host(label: str) -> None:
    host = load("induction", "mamba")
    ids = TASKS["induction"].sample(2, 0).input_ids[:, :9]
    samples = [Sample(inputs=row[None], target=target) for row, target in zip(ids, (-1, 5), strict=True)]
    trace = ula.trace(host, ids, progress=False)
    (result,) = by_operators(METHODS)[label].function(trace, samples, trust="require", max_memory=None)
    name, options = METHODS[label] if isinstance(METHODS[label], tuple) else (METHODS[label], {})
    expected = ula.explain(trace, method=name, target=[-1, 5], progress=False, **options)
    assert relative_error(result.scores, expected.scores) < TOLERANCES["layer", torch.float32]
    assert "forward" not in vars(trace.layers[0].module)
