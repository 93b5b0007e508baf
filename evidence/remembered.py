"""Rows of several evaluations that explain equal samples of a model once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unilinattn.evaluation import Sample
from unilinattn.evaluation.plan import entry_of
from unilinattn.evaluation.scorers import Scorer, scorer
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace

Results = dict[tuple[Any, ...], list[Attribution]]


def remembered(methods: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """Return the rows (`Scorer`) of methods without random numbers.

    Evaluations that share `results` do not explain a batch of one model with equal tokens and targets again; metrics
    and relevant keys may differ.
    """
    entries = {label: entry_of(method, "methods") for label, method in methods.items()}
    return {label: _remembering(scorer(label, *entry), results) for label, entry in entries.items()}


def _remembering(row: Scorer, results: Results) -> Scorer:
    def run(trace: Trace, samples: Sequence[Sample], **settings: Any) -> list[Attribution]:
        tokens = ((tuple(sample.inputs[0].tolist()), sample.target) for sample in samples)
        key = (trace.host, row.label, *tokens)
        if key not in results:
            results[key] = row.function(trace, samples, **settings)
        return results[key]

    return replace(row, function=run)
