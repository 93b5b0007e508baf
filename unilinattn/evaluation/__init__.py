"""What measures a result: ranking metrics against known answers."""

from unilinattn.evaluation.metrics import RowScores, alignment_error_rate, row_scores

__all__ = ["RowScores", "alignment_error_rate", "row_scores"]
