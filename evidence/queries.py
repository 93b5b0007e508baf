"""Rows that explain the queries of a sentence together: each as the target of a copy of the sentence, in one batch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

import unilinattn as ula
from unilinattn.evaluation import Sample
from unilinattn.evaluation.plan import entry_of
from unilinattn.evaluation.scorers import Scorer, scorer
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace


def in_one_batch(methods: Mapping[str, Any]) -> dict[str, Scorer]:
    """Return the rows (`Scorer`) of methods that take a backward pass for each query.

    A batch of copies takes as many passes as one query. Of samples without a target the queries with a valid key are
    explained, and the scores of the others are zero.
    """
    entries = {label: entry_of(method, "methods") for label, method in methods.items()}
    return {label: _in_one_batch(scorer(label, *entry)) for label, entry in entries.items()}


def _in_one_batch(row: Scorer) -> Scorer:
    def run(trace: Trace, samples: Sequence[Sample], **settings: Any) -> list[Attribution]:
        if samples[0].target is not None:
            return row.function(trace, samples, **settings)
        assert trace.ids is not None
        masks = [sample.valid for sample in samples if sample.valid is not None]
        copies, queries = torch.stack(masks).any(-1).nonzero().unbind(1)
        pairs = zip(copies.tolist(), queries.tolist(), strict=True)
        unlabelled = [replace(sample, valid=None, relevant=None, possible=None) for sample in samples]
        several = [replace(unlabelled[copy], target=query) for copy, query in pairs]
        (result,) = row.function(_copied(trace, tuple(copies.tolist())), several, **settings)
        scores = result.scores.new_zeros(*trace.ids.shape, trace.ids.shape[1])
        scores[copies, queries] = result.scores
        return [
            Attribution(
                scores=scores,
                dims=("batch", "query", "key"),
                method=row.label,
                layers=result.layers,
                kinds=result.kinds,
                mask=trace.layers[-1].mask,
                model=trace.model,
            )
        ]

    return replace(row, function=run)


# The rows of one batch read the same copies.
@lru_cache(maxsize=1)
def _copied(trace: Trace, copies: tuple[int, ...]) -> Trace:
    """Return the trace of copies of the sequences of a trace, by their indices."""
    assert trace.ids is not None
    return ula.trace(trace.host, trace.ids[list(copies)], progress=False)
