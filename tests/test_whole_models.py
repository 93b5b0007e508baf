"""The benchmark of whole models: checks, measured and predicted rows, and the recorded figures on the page."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unilinattn as ula
from benchmarks import whole_checks, whole_models, whole_page
from benchmarks.memory import usage
from benchmarks.published import SHAPES, tokens
from tools.markers import read_section

ROOT = Path(__file__).parents[1]
MACHINE = {"cpu": "a cpu", "cores": 1, "threads": 1, "memory": "1 GiB"}
MACHINE |= {"torch": "2", "transformers": "5", "unilinattn": "0"}


@pytest.fixture(scope="module")
def trace() -> ula.Trace:
    model = SHAPES["granite-4.0-h-350m"].build(narrow=True)
    return ula.trace(model, tokens(model, 24), progress=False)


def test_a_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_checks, "LENGTH", 40)
    threads, written = torch.get_num_threads(), tmp_path / "figures.json"
    options = ["--quick", "--models", "mamba2-130m", "--lengths", "12", "--rounds", "2", "--out", str(written)]
    options += ["--threads", str(threads)]
    whole_models.main([*options, "--methods", "rollout", "latim-all"])
    runs = json.loads(written.read_text())["runs"]
    assert whole_page.stored(runs) == written.read_text()
    (run,) = runs
    assert [row["call"] for row in run["rows"]] == ["host", "trace", "operators", "rollout", "latim-all"]
    assert all(len(row["seconds"]) == 2 and row["peak"] > 0 and row["calls"] > 100 for row in run["rows"])
    assert {row["call"] for row in run["rows"] if len(row.get("again", ())) == 2} == {"rollout", "latim-all"}
    assert [check["method"] for check in run["checks"]] == ["latim", "rollout"]
    assert {row["call"] for row in run["rows"] if "floor" in row} == {"latim-all"}

    # After a shorter length nothing is in reach of 0 seconds; the recorded row of the other method stays.
    whole_models.main([*options, "--methods", "latim-all", "--limit", "0", "--lengths", "6", "12"])
    rows = {row["call"]: row for row in json.loads(written.read_text())["runs"][0]["rows"] if row["length"] == 12}
    assert "seconds" in rows["rollout"] and "seconds" not in rows["latim-all"]
    assert rows["latim-all"]["predicted"]["seconds"] > 0
    assert rows["latim-all"]["predicted"]["bytes"] > rows["operators"]["kept"]


def test_a_method_off_its_definition_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_checks, "LENGTH", 40)
    assert whole_checks.checked("gpt2", "alti")["error"] < 1e-6
    right = whole_checks.DEFINITIONS["alti"]
    monkeypatch.setitem(whole_checks.DEFINITIONS, "alti", lambda trace: right(trace) * (1 + 2 * whole_checks.TOLERANCE))
    with pytest.raises(ArithmeticError, match="alti of gpt2 is off"):
        whole_checks.checked("gpt2", "alti")
    monkeypatch.setitem(whole_checks.DEFINITIONS, "rollout", lambda _: torch.eye(40, dtype=torch.float64)[-1:])
    with pytest.raises(ArithmeticError, match="nothing is compared"):
        whole_checks.checked("gpt2", "rollout")


def test_the_sum_of_a_row_is_checked(trace: ula.Trace) -> None:
    trace = whole_models.fresh(trace)
    row = ula.explain(trace, method="rollout", target=-1, progress=False).scores
    assert whole_checks.row_sum_error(trace, row) < 1e-6
    with pytest.raises(ArithmeticError, match="row sum"):
        whole_checks.row_sum_error(trace, row * (1 + 2 * whole_checks.TOLERANCE))


def test_a_fresh_trace_shares_no_operators(trace: ula.Trace) -> None:
    duplicate = whole_models.fresh(trace)
    layer = duplicate.layers[1]
    assert duplicate.steps[1].layers[0] is layer
    assert layer.operator is layer.operator is not whole_models.fresh(trace).layers[1].operator


def test_the_memory_of_all_operators_is_known_beforehand(trace: ula.Trace) -> None:
    trace = whole_models.fresh(trace)
    kept = whole_models.kept_bytes(trace)
    built = whole_models.fresh(trace)
    used = usage(lambda: [layer.reconstruction_error() for layer in built.layers], "cpu")
    assert kept == used.kept > 0
    model = SHAPES["granite-4.0-h-350m"].build(narrow=True)
    limits = whole_models.Limits(600.0, kept - 1, 1, 1.0)
    rows = list(whole_models.measured("granite-4.0-h-350m", model, 24, ["rollout"], limits, {}))
    assert ["seconds" in row for row in rows] == [True, True, False, False]
    assert rows[3]["predicted"] == {"bytes": kept, "seconds": 0.0}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_name_every_layer(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = shape.build()
    assert sum(shape.layers.values()) == model.config.num_hidden_layers
    assert shape.sizes.width == model.config.hidden_size


def test_the_floor_counts_every_layer() -> None:
    (floor,) = whole_models._floors("gpt2", 64).values()
    # Half of 64 x 64 pairs, in 12 layers, for a call that computes 64 x 64 pairs of one layer.
    assert floor.times == pytest.approx(12 * 0.5)


def row(call: str, seconds: float, **more: Any) -> dict[str, Any]:
    amounts = {"peak": 1 << 20, "kept": 0, "calls": 1234}
    return {"model": "mamba-130m", "length": 256, "call": call, "seconds": [seconds], **amounts, **more}


def figures(*rows: dict[str, Any], **versions: str) -> dict[str, Any]:
    checks = [{"model": "mamba-130m", "method": "rollout", "error": 1e-7}]
    built = row("operators", 0.1, error=2e-7)
    return {"machine": {**MACHINE, **versions}, "checks": checks, "rows": [row("host", 1.0), built, *rows]}


def test_goals_that_are_missed_are_bold() -> None:
    latim = row("latim-all", 3.9, floor=[2.0])
    out_of_reach = {"model": "mamba-130m", "length": 256, "call": "alti-all"}
    out_of_reach["predicted"] = {"seconds": 8000.0, "bytes": 1 << 31}
    large = row("attribution", 2.0) | {"peak": 1 << 31}
    text = whole_page.section(
        [figures(row("rollout", 0.31, again=[0.05]), row("latim", 0.9), large, latim, out_of_reach)]
    )
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert "| the host's forward |  | 1 s, 1.0 MiB, 1k |" in lines
    assert "| `rollout` | <= 0.3 | **0.31** / 0.05, 1.0 MiB, 1k |" in lines
    assert "| `latim` | <= 1 | 0.90, 1.0 MiB, 1k |" in lines
    assert "| `attribution` | <= 3, 1.00 GiB | **2.00**, 2.00 GiB, 1k |" in lines
    assert "| relative to its floor | <= 1.3 | **1.95** |" in lines
    assert "| `alti`, all queries |  | not run: 2.2 h, 2.00 GiB |" in lines


def test_operators_out_of_reach_have_no_error() -> None:
    large = figures()
    large["rows"][1] = {"model": "mamba-130m", "length": 256, "call": "operators"}
    large["rows"][1]["predicted"] = {"seconds": 0.0, "bytes": 3 << 30}
    text = whole_page.section([large])
    assert "narrow model 1e-07.\n" in text and "| operators |  | not run: 3.00 GiB |" in text


def test_figures_of_a_machine_replace_its_earlier_ones() -> None:
    earlier = figures(row("rollout", 0.2), row("latim", 0.5))
    (run,) = whole_models.merged([earlier], figures(row("rollout", 0.3)))
    assert {r["call"]: r["seconds"] for r in run["rows"]} == {
        "host": [1.0], "operators": [0.1], "rollout": [0.3], "latim": [0.5],
    }  # fmt: skip
    assert len(run["checks"]) == 1
    (run,) = whole_models.merged([earlier], figures(row("rollout", 0.3), torch="3"))
    assert "latim" not in {r["call"] for r in run["rows"]}
    assert len(whole_models.merged([earlier], figures(cpu="another cpu"))) == 2


def test_the_page_shows_the_recorded_figures() -> None:
    text = whole_models.RECORD.read_text()
    runs = json.loads(text)["runs"]
    assert whole_page.stored(runs) == text
    assert read_section((ROOT / "docs" / "performance.md").read_text(), "whole-models") == whole_page.section(runs)
