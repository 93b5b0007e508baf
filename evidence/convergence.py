"""Integrated gradients with as many steps as their completeness needs: one rule for all studies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import unilinattn as ula
from unilinattn.evaluation import Case, Sample
from unilinattn.evaluation.measures import Measurement, Metric
from unilinattn.evaluation.scorers import Scorer, target_of
from unilinattn.host.substitution import through_operators
from unilinattn.methods import IntegratedGradients
from unilinattn.options.bases import Baseline
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace

LARGEST_GAP = 0.01
"""Completeness gap, relative to the difference of the two logits, at which the steps suffice."""

STEPS = (32, 64, 128, 256, 512, 1024)
"""Numbers of steps, tried in turn until the gap is small enough."""

# The norm of a model maps every multiple of a vector to the same one: from a baseline of zero the logit jumps at the
# start of the path, and at 512 steps the sum of the scores misses the difference by up to twice its size.
BASELINE: Baseline = "mean-embedding"
"""Start of the path: the mean embedding at every token."""

RULE = (
    f"Integrated gradients start at the mean embedding and take {STEPS[0]}, {STEPS[1]}, ... steps, until the sum of "
    f"the scores misses the difference of the two logits by at most {100 * LARGEST_GAP:g} %."
)
"""The rule for readers of a page."""


def integrated_gradients(trace: Trace, samples: Sequence[Sample]) -> Attribution:
    """Explain the prediction at the target of each sample with the first number of `STEPS` whose gap is small enough.

    The last number is used if none is. Layers run through their operators, which is faster and the same function. The
    extra `gap` of the result is the completeness gap of each sample.
    """
    result, gap = _integrated(trace, samples, STEPS[0])
    scores = result.scores.clone()
    for n_steps in STEPS[1:]:
        rows = (gap > LARGEST_GAP).nonzero().flatten()
        if not len(rows):
            break
        others = [samples[row] for row in rows.tolist()]
        traced = ula.trace(trace.host, torch.cat([sample.inputs for sample in others]), progress=False)
        of_rows, gap[rows] = _integrated(traced, others, n_steps)
        scores[rows] = of_rows.scores
    return replace(result, scores=scores, completeness_gap=float(gap.max()), extras={"gap": gap})


def _integrated(trace: Trace, samples: Sequence[Sample], n_steps: int) -> tuple[Attribution, Tensor]:
    """Return integrated gradients of samples and the completeness gap of each."""
    method = IntegratedGradients(baseline=BASELINE, n_steps=n_steps)
    with through_operators(trace.host):
        result = ula.explain(trace, method=method, target=target_of(samples), progress=False)
    extras = result.extras
    return result, extras["delta"].abs() / (extras["logit"] - extras["baseline"]).abs()


def _of_batch(trace: Trace, samples: Sequence[Sample], **_: Any) -> list[Attribution]:
    return [integrated_gradients(trace, samples)]


CONVERGED = Scorer("integrated gradients", {"baseline": BASELINE, "steps": STEPS, "gap": LARGEST_GAP}, _of_batch)
"""The row of `integrated_gradients` in an evaluation."""


def reported_gap(case: Case) -> Measurement | None:
    """Return the completeness gap of a sample's integrated gradients; None for other methods."""
    gap = case.result.extras.get("gap")
    return None if gap is None else Measurement.mean(float(gap))


GAP = Metric("gap", reported_gap)
"""The metric of the completeness gap of integrated gradients."""
