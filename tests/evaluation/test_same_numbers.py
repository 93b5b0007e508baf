"""The commands `compare` and `evaluate` have one set of numbers for the same row."""

from pathlib import Path

import pytest
import torch

from unilinattn import cli
from unilinattn.evaluation.side_by_side import Counts, measure
from unilinattn.evaluation.table import Table
from unilinattn.registry import method
from unilinattn.testing import tolerance

EXACT = tolerance("law", torch.float64)


FEW = Counts(accuracy=1, scored=2)


def test_a_row_is_the_same_in_both_commands(tmp_path: Path) -> None:
    compared = measure("induction", "s4d", [method("raw")], FEW).scores
    arguments = ["--task", "induction", "--models", "s4d", "--methods", "raw", "--samples", str(FEW.scored)]
    # Layers are chosen by one metric, whichever are shown, and on as many sequences, however many are scored.
    for metrics in (["hit_at_1", "ap", "auc"], ["hit_at_1"]):
        out = tmp_path / metrics[-1]
        assert cli.main(["evaluate", *arguments, "--metrics", *metrics, "--out", str(out)]) == 0
        assert len(list((out / "selection").glob("*.json"))) == FEW.selection
        rows = Table.load(out / "table.json").summary()
        assert {row["method"] for row in rows} == set(compared) - {"intervention"}
        for row in rows:
            score = compared[row["method"]]
            assert row["value"] == pytest.approx(getattr(score.found, row["metric"]), abs=EXACT)
            assert row["layer"] == (score.layers[0] if score.layers else "")
