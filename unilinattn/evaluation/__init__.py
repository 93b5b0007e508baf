"""Metrics of results, against known answers and by changing the input, and tables of them over data sets."""

from unilinattn.evaluation.case import Case
from unilinattn.evaluation.intervention import replacement_effects, target_effects
from unilinattn.evaluation.measures import METRICS
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
from unilinattn.evaluation.readers import read_samples
from unilinattn.evaluation.samples import Sample, task_samples
from unilinattn.evaluation.segmentation import SegmentationScores, segmentation_scores
from unilinattn.evaluation.table import Table
from unilinattn.evaluation.texts import read_texts
from unilinattn.results.intervals import MeanInterval, mean_interval

__all__ = [
    "METRICS",
    "Case",
    "CompletenessGap",
    "MeanInterval",
    "PerturbationCurve",
    "PerturbationTest",
    "RankCorrelation",
    "RowScores",
    "Sample",
    "SegmentationScores",
    "Table",
    "alignment_error_rate",
    "completeness_gap",
    "earlier_keys",
    "gold_links",
    "mean_interval",
    "rank_correlation",
    "read_samples",
    "read_texts",
    "replacement_effects",
    "row_scores",
    "segmentation_scores",
    "target_effects",
    "task_samples",
]
