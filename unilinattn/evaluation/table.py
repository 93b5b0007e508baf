"""`Table`: the numbers of an evaluation, one row for each model, method, sample and metric."""

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import pstdev
from typing import TYPE_CHECKING, Any, Self

from unilinattn.aligned import aligned
from unilinattn.errors import InputError, OptionError, ResultFileError, nearest
from unilinattn.evaluation.store import replace_text
from unilinattn.optional import import_extra

if TYPE_CHECKING:
    import pandas

FORMAT = "unilinattn.table"
FORMAT_VERSION = "1"

COLUMNS = ("model", "method", "layer", "sample", "metric", "value")
SUMMARY = ("model", "method", "layer", "metric", "value", "spread", "samples")

PARTS = "parts"
"""Field of a row, in addition to the columns, with the sums from which the value over all samples is computed."""


class Table(Sequence[Mapping[str, Any]]):
    """The numbers of an evaluation: a row for each model, method, sample and metric.

    A row is a mapping with the columns `model`, `method`, `layer` (the scored layer; "all" for a method that composes
    or averages them, "" for one that reads none), `sample`, `metric` and `value`. Printed, a table shows its summary:
    a line for each model and method, and a column for each metric.

    Attributes:
        rows: the rows.
        columns: names of the columns.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = COLUMNS) -> None:
        """Make a table of rows that have the columns."""
        self.rows, self.columns = tuple(rows), tuple(columns)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    def select(self, **values: Any) -> Self:
        """Return the rows with these values: `table.select(method="logit", metric="ap")`.

        Raises `OptionError` for an unknown column.
        """
        for name in values:
            if name not in self.columns:
                raise OptionError(f"no column {name!r}{nearest(name, self.columns)}")
        rows = [row for row in self.rows if all(row[name] == value for name, value in values.items())]
        return type(self)(rows, self.columns)

    def summary(self) -> Self:
        """Return a row for each model, method and metric, over all samples.

        `value`: ranking metrics are averaged over all query rows, pixel accuracy, mean IoU and the alignment error rate
        count pixels and links over all samples, and other metrics are averaged over samples. `spread`: the standard
        deviation of the samples' values. `samples`: their number.

        Raises `InputError` for a table that is a summary.
        """
        if self.columns != COLUMNS:
            raise InputError("This table is a summary; take the summary of the table that it was made from.")
        groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
        for row in self.rows:
            groups.setdefault((row["model"], row["method"], row["layer"], row["metric"]), []).append(row)
        rows = []
        for key, members in groups.items():
            values = [row["value"] for row in members]
            pooled = pool([row[PARTS] for row in members])
            rows.append(dict(zip(SUMMARY, (*key, pooled, pstdev(values), len(values)), strict=True)))
        return type(self)(rows, SUMMARY)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the rows as a data frame.

        Raises `MissingExtraError` if pandas is missing.
        """
        rows = [{name: row[name] for name in self.columns} for row in self.rows]
        return import_extra("pandas", "xarray").DataFrame(rows, columns=list(self.columns))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table as .csv or .parquet (its columns) or .json (which `load` reads) and return the path.

        The file is replaced in one step. Raises `OptionError` for another ending, `MissingExtraError` for .parquet if
        pyarrow is missing, and `ResultFileError` if the file cannot be written.
        """
        target = Path(path)
        text: str | bytes
        if target.suffix == ".json":
            described = {"format": FORMAT, "format_version": FORMAT_VERSION, "columns": self.columns}
            text = json.dumps({**described, "rows": [dict(row) for row in self.rows]}, indent=1) + "\n"
        elif target.suffix == ".csv":
            stream = io.StringIO()
            writer = csv.DictWriter(stream, self.columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
            text = stream.getvalue()
        elif target.suffix == ".parquet":
            parquet, buffer = import_extra("pyarrow.parquet", "parquet"), io.BytesIO()
            columns = {name: [row[name] for row in self.rows] for name in self.columns}
            parquet.write_table(import_extra("pyarrow", "parquet").table(columns), buffer)
            text = buffer.getvalue()
        else:
            raise OptionError(f"{target} has the ending {target.suffix!r}; accepted: .csv, .json, .parquet.")
        replace_text(target, text)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a table that `save` wrote as .json.

        Raises `ResultFileError` for another file.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            is_ours = (stored["format"], stored["format_version"]) == (FORMAT, FORMAT_VERSION)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ResultFileError(f"{path} is no saved table: {error}") from error
        if not is_ours:
            raise ResultFileError(
                f"{path} has format {stored['format']!r} version {stored['format_version']!r}; this release reads "
                f"{FORMAT!r} version {FORMAT_VERSION!r}."
            )
        return cls(stored["rows"], stored["columns"])

    def cells(self) -> list[tuple[Any, ...]]:
        """Return the names of the columns and a row for each model and method of the summary, "" where it has no value.

        The columns are model, method, layer and the metrics.
        """
        rows = self.summary().rows if self.columns == COLUMNS else self.rows
        metrics = list(dict.fromkeys(row["metric"] for row in rows))
        values: dict[tuple[str, ...], dict[str, float]] = {}
        for row in rows:
            values.setdefault((row["model"], row["method"], row["layer"]), {})[row["metric"]] = row["value"]
        head = ("model", "method", "layer", *metrics)
        return [
            head,
            *((*key, *(by_metric.get(metric, "") for metric in metrics)) for key, by_metric in values.items()),
        ]

    def __str__(self) -> str:
        """Return the summary as text: a line for each model and method, and a column for each metric."""
        head, *rows = self.cells()
        lines = [head, *([cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row] for row in rows)]
        return aligned(lines, right=range(3, len(head)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {len(self)} rows of {', '.join(self.columns)}"


def pool(samples: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return a metric over all samples from the (numerator, denominator) parts of each.

    The ratio of each part's sums, averaged over parts: a metric of one part is a weighted mean over samples.
    """
    ratios = [sum(term[0] for term in terms) / sum(term[1] for term in terms) for terms in zip(*samples, strict=True)]
    return sum(ratios) / len(ratios)
