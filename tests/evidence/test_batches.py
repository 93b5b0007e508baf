"""Samples of one length are explained in one batch, each for its target: the numbers are those of one at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import unilinattn as ula
from evidence import alignment, copying
from evidence.__main__ import WEIGHTS
from evidence.operators import by_operators
from evidence.study import Study
from unilinattn.evaluation import Sample

METHODS = {
    **copying.BY_LAYER,
    **copying.END_TO_END,
    **by_operators({"integrated gradients": ("integrated_gradients", {"n_steps": 3})}),
}
"""Those of the study; few steps batch as many do."""

CASES: Sequence[tuple[Study, str, Any]] = (
    (copying.STUDY, "mamba2", copying.samples),
    (copying.STUDY, "transformer", copying.samples),
    (alignment.STUDY, "gated_deltanet", lambda *drawn: alignment.single_words(alignment.samples(*drawn))),
)


def scores(case: Any) -> float:
    """Return a number that changes with each score."""
    values = case.scores.double()
    return float((values * torch.linspace(1, 2, len(values), dtype=torch.float64)).sum())


@pytest.mark.parametrize(("study", "model", "samples"), CASES)
def test_a_batch_of_targets_has_the_numbers_of_its_samples(study: Study, model: str, samples: Any) -> None:
    host = study.hosts(WEIGHTS, 0)[model]().double()
    data: list[Sample] = sorted(samples(12, 1), key=lambda sample: sample.inputs.shape[1])[:4]
    assert len({sample.target for sample in data}) > 2
    measured = ula.evaluation.measures.function_metric(scores)
    alone, batched = (
        ula.evaluate(
            {model: host},
            data,
            METHODS,
            {"scores": measured, "ap": "ap"},
            selection=samples(2, 2),
            select_by="ap",
            batch_size=size,
            progress=False,
        )
        for size in (1, 3)
    )
    assert len(alone) == len(batched) == len(data) * (len(METHODS) + 3) * 2
    for one, other in zip(alone, batched, strict=True):
        assert {**one, "value": 0, "parts": 0} == {**other, "value": 0, "parts": 0}
        assert one["value"] == pytest.approx(other["value"], rel=1e-9, abs=1e-10)
