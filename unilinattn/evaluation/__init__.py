"""Metrics of results: ranking against known answers, and against the effect of replacing each token."""

from unilinattn.evaluation.intervention import replacement_effects
from unilinattn.evaluation.metrics import (
    RankCorrelation,
    RowScores,
    alignment_error_rate,
    rank_correlation,
    row_scores,
)

__all__ = [
    "RankCorrelation",
    "RowScores",
    "alignment_error_rate",
    "rank_correlation",
    "replacement_effects",
    "row_scores",
]
