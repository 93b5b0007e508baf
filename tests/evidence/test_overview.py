"""The table of all tasks at the head of the page."""

from typing import Any

import pytest

from evidence import overview, record


def row(method: str, values: list[float], model: str = "mamba2", table: str = "answer") -> dict[str, Any]:
    return {"table": table, "model": model, "method": method, "metric": "ap", "values": values}


def test_cells_are_means_and_the_best_is_bold() -> None:
    rows = [
        row("random", [0.1, 0.2]),
        row("latim l2", [0.9, 0.8]),
        row("logit", [0.5, 0.6]),
        row("raw", [1, 1], "other"),
    ]
    rows += [row("logit", [0.2], "transformer"), {**row("lrp", [1.0]), "metric": "auc"}]
    lines = overview.overview({"copying": {"numbers": rows}}).splitlines()
    assert "| method | copying, Mamba-2 | copying, Transformer |" in lines
    assert "| random | 0.15 |  |" in lines
    assert "| latim | **0.85** |  |" in lines
    assert "| logit | 0.55 | **0.20** |" in lines
    assert "| raw |  |  |" in lines and "| lrp |  |  |" in lines


@pytest.mark.parametrize("column", overview.COLUMNS, ids=lambda column: column.heading)
def test_every_column_has_the_numbers_of_all_its_models(column: overview.Column) -> None:
    rows = [one for one in record.read(column.study)["numbers"] if one["metric"] == column.metric]
    for method in ("random", "raw", "latim l2", "alti", "rollout", "logit", "lrp"):
        names = {method, method.replace("latim l2", "latim, best layer"), f"{method}, best layer"}
        found = {one["model"] for one in rows if one["table"] in column.tables and one["method"] in names}
        assert found >= set(column.models), method
