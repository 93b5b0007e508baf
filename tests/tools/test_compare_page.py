"""`tools.compare_page`: the table and the picture of the comparison page."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import compare_page
from tools.markers import read_section
from unilinattn.cli.arguments import METHODS
from unilinattn.examples import TASKS, names

ROOT = Path(__file__).parents[2]

PRINTED = """
task     model
-------  -----
copying  mamba

copying  s4d

accuracy: share of right answers; more words.

Report: report/index.html, report/compare.png, report/compare.json
"""


def test_the_table_is_cut_out_of_the_output() -> None:
    assert compare_page.table_of(PRINTED) == f"```text\n{PRINTED.strip().split(chr(10) * 2 + 'accuracy: ')[0]}\n```"


def test_page_and_picture_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: Sequence[str]) -> int:
        report = Path(arguments[-1])
        report.mkdir()
        (report / "compare.png").write_bytes(b"picture")
        print(PRINTED)
        return 0

    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / compare_page.PAGE, tmp_path / compare_page.PAGE)
    monkeypatch.setattr(compare_page, "main", run)
    compare_page.write(tmp_path)
    assert read_section((tmp_path / compare_page.PAGE).read_text(), "compare") == compare_page.table_of(PRINTED)
    assert (tmp_path / compare_page.PICTURE).read_bytes() == b"picture"


def test_a_comparison_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_page, "main", lambda arguments: 2)
    with pytest.raises(RuntimeError, match="status 2"):
        compare_page.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_page_holds_every_model_and_method() -> None:
    table = read_section((ROOT / compare_page.PAGE).read_text(), "compare")
    rows = [line.split() for line in table.splitlines()]
    for task in TASKS:
        start = rows.index([task])
        assert [row[0] for row in rows[start + 3 : start + 7]] == [model for name, model in names() if name == task]
    words = {word for row in rows for word in row}
    assert words >= {*METHODS, "intervention", "random", "recency", "primacy"}
