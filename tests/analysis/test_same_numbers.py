"""The commands `compare` and `evaluate` have one set of numbers for the same row, equal to the bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import checkpoints as checkpoints  # a fixture
from unilinattn import cli
from unilinattn.analysis.compare import compare_models, compare_trained
from unilinattn.evaluation.checkpoints import load_checkpoint
from unilinattn.evaluation.table import Table
from unilinattn.evaluation.trained import Counts

FEW = Counts(accuracy=1, scored=2)
METRICS = ("hit_at_1", "ap", "auc", "rank_correlation")


def summary(table: Table) -> dict[tuple[Any, ...], float]:
    rows = table.summary()
    return {(row["model"], row["method"], row["layer"], row["metric"]): row["value"] for row in rows}


@pytest.mark.slow
def test_a_row_is_the_same_in_both_commands(tmp_path: Path) -> None:
    compared = summary(compare_trained("induction", ["s4d"], ["raw", "logit"], FEW).table)
    arguments = ["--task", "induction", "--models", "s4d", "--samples", str(FEW.scored)]
    # Layers are chosen by one metric, whichever are shown, and on as many sequences, however many are scored.
    for metrics in (METRICS, METRICS[:1]):
        out = tmp_path / metrics[-1]
        asked = [*arguments, "--methods", "raw", "logit", "intervention", "--metrics", *metrics, "--out", str(out)]
        assert cli.main(["evaluate", *asked]) == 0
        assert len(list((out / "selection").glob("*.json"))) == 1
        evaluated = summary(Table.load(out / "table.json"))
        assert evaluated == {key: value for key, value in compared.items() if key[-1] in metrics}


@pytest.mark.slow
def test_a_deletion_area_is_the_same_in_both_commands(checkpoints: Path, tmp_path: Path) -> None:
    texts, folder = tmp_path / "texts.txt", checkpoints / "mamba"
    texts.write_text("the cat sat on the mat\nthe cat sat\n")
    compared = compare_models(
        {"mamba": load_checkpoint(folder)}, texts.read_text().splitlines(), methods=["raw", "logit"]
    )
    asked = ["--methods", "raw:layers=mean", "logit", "--baselines", "random", "--metrics", "deletion"]
    assert (
        cli.main(["evaluate", "--data", str(texts), "--models", str(folder), *asked, "--out", str(tmp_path / "out")])
        == 0
    )
    evaluated = summary(Table.load(tmp_path / "out" / "table.json"))
    values = {method.removesuffix(" (layers='mean')"): value for (_, method, _, _), value in evaluated.items()}
    assert values == {method: value for (_, method, _, _), value in summary(compared.table).items()}
    for method, curve in compared.models["mamba"].deletion.items():
        assert curve.area == pytest.approx(values[method], abs=1e-12)  # type: ignore[union-attr]
