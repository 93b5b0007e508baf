"""Rows that run the model through its operators: they compute what slow loops of the hosts do, and its gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unilinattn.evaluation import Sample
from unilinattn.evaluation.plan import entry_of
from unilinattn.evaluation.scorers import Scorer, scorer
from unilinattn.host.substitution import through_operators
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace


def by_operators(methods: Mapping[str, Any]) -> dict[str, Scorer]:
    """Return the rows (`Scorer`) of methods that run the model again."""
    entries = {label: entry_of(method, "methods") for label, method in methods.items()}
    return {label: _by_operators(scorer(label, *entry)) for label, entry in entries.items()}


def _by_operators(row: Scorer) -> Scorer:
    def run(trace: Trace, samples: Sequence[Sample], **settings: Any) -> list[Attribution]:
        with through_operators(trace.host):
            return row.function(trace, samples, **settings)

    return replace(row, function=run)
