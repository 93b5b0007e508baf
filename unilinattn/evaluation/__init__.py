"""Metrics of results: against known answers, foreground masks, gold links and logits, and by changing the input."""

from unilinattn.evaluation.decomposition import DecompositionErrors, decomposition_errors
from unilinattn.evaluation.intervention import replacement_effects
from unilinattn.evaluation.metrics import (
    CompletenessGap,
    RankCorrelation,
    RowScores,
    alignment_error_rate,
    completeness_gap,
    earlier_keys,
    gold_links,
    rank_correlation,
    row_scores,
)
from unilinattn.evaluation.perturbation import PerturbationCurve, PerturbationTest
from unilinattn.evaluation.segmentation import SegmentationScores, segmentation_scores

__all__ = [
    "CompletenessGap",
    "DecompositionErrors",
    "PerturbationCurve",
    "PerturbationTest",
    "RankCorrelation",
    "RowScores",
    "SegmentationScores",
    "alignment_error_rate",
    "completeness_gap",
    "decomposition_errors",
    "earlier_keys",
    "gold_links",
    "rank_correlation",
    "replacement_effects",
    "row_scores",
    "segmentation_scores",
]
