import csv
import math
from pathlib import Path
from typing import Any

import pytest

from unilinattn.errors import InputError, OptionError, ResultFileError
from unilinattn.evaluation import Table
from unilinattn.evaluation.table import COLUMNS, PARTS


def row(method: str, sample: str, metric: str, value: float, *parts: tuple[float, float]) -> dict[str, Any]:
    cells = dict(zip(COLUMNS, ("m", method, "all", sample, metric, value), strict=True))
    return {**cells, PARTS: [list(part) for part in parts or ((value, 1.0),)]}


TABLE = Table(
    [
        row("a", "0", "ap", 0.5, (1.0, 2.0)),
        row("a", "0", "iou", 0.5, (1.0, 4.0), (3.0, 4.0)),
        row("a", "1", "ap", 0.1 + 0.2, ((0.1 + 0.2) * 6, 6.0)),
        row("a", "1", "iou", 0.75, (1.0, 2.0), (1.0, 1.0)),
        row("b", "0", "ap", 1.0),
    ]
)


def test_the_summary_sums_parts_before_it_divides() -> None:
    weighted, iou, single = TABLE.summary()
    assert weighted["value"] == pytest.approx((0.5 * 2 + 0.3 * 6) / 8)
    assert weighted["spread"] == pytest.approx(math.sqrt(((0.5 - 0.4) ** 2 + (0.3 - 0.4) ** 2) / 2))
    assert iou["value"] == pytest.approx(((1 + 1) / (4 + 2) + (3 + 1) / (4 + 1)) / 2)
    assert (single["value"], single["spread"], single["samples"], weighted["samples"]) == (1.0, 0.0, 1, 2)
    with pytest.raises(InputError, match="is a summary"):
        TABLE.summary().summary()


def test_rows_are_selected_and_printed() -> None:
    assert [one["metric"] for one in TABLE.select(sample="1")] == ["ap", "iou"]
    assert len(TABLE.select(method="a", metric="ap")) == 2
    with pytest.raises(OptionError, match="did you mean 'method'"):
        TABLE.select(methd="a")
    lines = str(TABLE).splitlines()
    assert [line.split() for line in lines] == [
        ["model", "method", "layer", "ap", "iou"], ["m", "a", "all", "0.35", "0.5667"], ["m", "b", "all", "1"],
    ]  # fmt: skip
    assert str(TABLE.summary()) == str(TABLE) and repr(TABLE).startswith("Table: 5 rows of model, method")


def test_files_keep_every_bit(tmp_path: Path) -> None:
    again = Table.load(TABLE.save(tmp_path / "table.json"))
    assert list(again) == list(TABLE) and again.columns == TABLE.columns
    with TABLE.save(tmp_path / "deep" / "table.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [tuple(one) for one in read] == [COLUMNS] * 5
    assert [float(one["value"]) for one in read] == [one["value"] for one in TABLE]
    with pytest.raises(OptionError, match=r"accepted: \.csv, \.json, \.parquet"):
        TABLE.save(tmp_path / "table.txt")
    for text in ("{", "[1]", '{"format": "other", "format_version": "1"}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ResultFileError):
            Table.load(tmp_path / "other.json")


def test_the_data_frame_has_the_columns() -> None:
    frame = TABLE.to_pandas()
    assert tuple(frame.columns) == COLUMNS
    assert frame["value"].tolist() == [one["value"] for one in TABLE]
