"""The recorded numbers, the page that is written from them, and the command."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from evidence import NAMES, __main__, real_page, record, study
from evidence.claims import Results
from evidence.copying import CopyingStudy
from evidence.rows import number
from evidence.study import Size
from unilinattn.errors import OptionError, ResultFileError
from unilinattn.evaluation import Table

ROOT = Path(__file__).parents[2]
RECORDED = [name for name in NAMES if (record.RESULTS / f"{name}.json").is_file()]


def tables(value: float) -> dict[str, dict[int, Table]]:
    table = Table([number("raw", "ap", value, model="m", sample=str(at)) for at in range(2)])
    return {"t": {0: table, 1: table}}


def summaries(value: float) -> list[dict]:
    return record.summaries(tables(value))


def test_a_summary_has_a_value_for_each_seed() -> None:
    (row,) = summaries(0.5)
    assert row == {
        "table": "t",
        "model": "m",
        "method": "raw",
        "metric": "ap",
        "layers": ["", ""],
        "values": [0.5, 0.5],
        "samples": 2,
    }


def test_a_record_is_read_as_it_was_stored() -> None:
    numbers = {"study": "x", "seconds": 3, "numbers": summaries(0.5), "claims": []}
    assert json.loads(record.stored(numbers)) == numbers


def test_repeated_numbers_that_differ_or_are_missing_are_listed() -> None:
    assert record.differences(summaries(0.5), summaries(0.5 + record.DIFFERENT / 2)) == (1, [])
    count, lines = record.differences(summaries(0.5), summaries(0.5 + 2 * record.DIFFERENT))
    assert count == 1
    assert lines == ["t m raw ap: [0.5, 0.5], recorded [0.52, 0.52]"]
    assert record.differences(summaries(0.5), [])[1] == ["t m raw ap: not recorded"]
    assert record.differences([], summaries(0.5))[1] == ["t m raw ap: not measured"]


def test_a_whole_run_says_how_many_numbers_are_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "read", lambda name: {"numbers": summaries(0.5), "quick": []})
    one = study("copying")
    assert __main__.compared(one, Results(tables(0.5))) == "copying: 1 of 1 numbers as recorded"
    different = __main__.compared(one, Results(tables(0.6)))
    assert different == "copying: 0 of 1 numbers as recorded\n  t m raw ap: [0.6, 0.6], recorded [0.5, 0.5]"


def test_the_pages_are_written_from_the_record() -> None:
    for path, text in __main__.pages([study(name) for name in RECORDED]).items():
        assert path.read_text() == text
    assert real_page.kinds() in (ROOT / "docs" / "methods" / "index.md").read_text()


def test_the_page_is_short() -> None:
    assert len((ROOT / "docs" / "evidence.md").read_text().split()) <= 6000


@pytest.mark.parametrize("name", RECORDED)
def test_every_number_of_a_view_is_recorded(name: str) -> None:
    one, rows = study(name), record.read(name)["numbers"]
    cells = {(row["table"], row["model"], row["metric"]) for row in rows}
    missing = [
        (view.table, *column) for view in one.views for column in view.columns if (view.table, *column[:2]) not in cells
    ]
    assert not missing


@pytest.mark.parametrize("name", RECORDED)
def test_shipped_weights_are_small_and_as_recorded(name: str) -> None:
    one, training = study(name), record.read(name)["training"]
    assert {row["model"] for row in training} == set(one.models)
    for row in training:
        path = one.path(__main__.WEIGHTS, row["model"], row["seed"])
        assert path.stat().st_size < 1 << 20
        assert one.is_trained(row["model"], path), "trained by the present recipe"
        assert __main__.training_record(path)["accuracy"] == row["accuracy"]


def test_the_shipped_weights_and_results_are_small() -> None:
    folders = (__main__.WEIGHTS, record.RESULTS)
    weights, results = (sum(path.stat().st_size for path in folder.glob("*")) for folder in folders)
    # Of these the two language models of text have 6 MB.
    assert weights < 18e6
    assert results < 5e6
    assert max(path.stat().st_size for path in record.RESULTS.glob("*")) < 1.05e6


def test_numbers_are_stored_by_the_weights(tmp_path: Path) -> None:
    model, folders = nn.Linear(2, 2), []

    class One(CopyingStudy):
        def hosts(self, weights: Path, seed: int) -> dict[str, Callable[[], nn.Module]]:
            return {"model": lambda: model}

        def measure(self, hosts: object, seed: int, size: Size, out: Path) -> dict[str, Table]:
            folders.append(out)
            return {}

    for added in (0, 0, 1):
        with torch.no_grad():
            model.weight += added
        __main__.measured(One(), tmp_path, tmp_path, quick=True)
    assert folders[0] == folders[1] != folders[2]
    assert folders[0].parent == folders[2].parent == tmp_path / "quick" / "copying"


def test_an_unknown_study_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError, match="unknown study 'copyng'"):
        study("copyng")
    assert __main__.main(["copyng"]) == 2
    assert "error: unknown study 'copyng'; did you mean 'copying'?" in capsys.readouterr().err


def test_a_study_without_a_record_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    with pytest.raises(ResultFileError, match=r"theorems.json is absent; record the study with `make evidence"):
        record.read("theorems")


def test_weights_of_another_recipe_are_trained_again() -> None:
    one = study("induction")
    path = one.path(__main__.WEIGHTS, "conv", 0)
    assert one.is_trained("conv", path)
    assert not one.is_trained("mamba_x1", path)
    assert not one.is_trained("conv", path.with_name("absent.safetensors"))
