"""`Section`: a measurement on pretrained checkpoints beside the rankings, with its claims and its part of the page."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.machine import machine
from evidence import record
from evidence.claims import DECIMALS, Claim, Results
from evidence.record import Numbers
from evidence.study import View
from evidence.study_page import by_source, claims_table
from unilinattn.evaluation import Table, mean_interval

SEED = 0
"""The only seed of the tables: each checkpoint was trained once."""

KEYS = ("table", "model", "method", "metric")
"""The keys of a recorded mean."""


class Section(ABC):
    """A question to pretrained checkpoints."""

    name: ClassVar[str]
    """Its name on the command line, after `real`."""
    title: ClassVar[str]
    text: ClassVar[str]
    """The question, its source and the measurement: paragraphs of the page, in Markdown."""
    views: ClassVar[Sequence[View]]
    unit: ClassVar[str]
    """A sample, in the plural."""

    @abstractmethod
    def measure(self) -> tuple[dict[str, Table], dict[str, Any]]:
        """Return tables of numbers by name, and entries of the record that its sentences need.

        Raises `MissingExtraError` if a wheel is missing.
        """

    @abstractmethod
    def claims(self) -> list[Claim]:
        """Return the claims, which are decided before their numbers are known."""

    def remark(self, numbers: Numbers) -> str:
        """Return sentences that follow from the recorded numbers, for the page."""
        return ""

    def size_text(self, numbers: Numbers) -> str:
        """Return the numbers of samples of the comparisons in words."""
        counts = [count for row in numbers["outcomes"] for count in row["samples"]]
        low, high = min(counts), max(counts)
        return f"{high} {self.unit}" if low == high else f"{low} to {high} {self.unit}"

    @property
    def path(self) -> Path:
        """The file of the record."""
        return record.RESULTS / f"real-{self.name}.json"


def described(section: Section, tables: Mapping[str, Table], seconds: float, entries: Mapping[str, Any]) -> Numbers:
    """Return the record of a section: means with 95 % intervals over samples, claims, and numbers of the samples."""
    results = Results({name: {SEED: table} for name, table in tables.items()})
    judgement = record.judged(results, section.claims())
    return {
        "section": section.name,
        "seconds": round(seconds),
        "machine": machine("cpu"),
        **entries,
        "claims": judgement["claims"],
        "outcomes": judgement["outcomes"],
        "numbers": means(tables),
        "samples": judgement["samples"],
    }


def means(tables: Mapping[str, Table]) -> list[dict[str, Any]]:
    """Return the mean over samples of each number with its 95 % bootstrap interval, by the names of `KEYS`."""
    values: dict[tuple[str, ...], list[float]] = {}
    for name, table in tables.items():
        for row in table:
            values.setdefault((name, row["model"], row["method"], row["metric"]), []).append(row["value"])
    return [
        {
            **dict(zip(KEYS, key, strict=True)),
            **{name: round(value, DECIMALS) for name, value in asdict(mean_interval(of_key)).items()},
        }
        for key, of_key in values.items()
    ]


def read(section: Section) -> Numbers | None:
    """Return the record of a section, None if it is not measured."""
    return json.loads(section.path.read_text()) if section.path.is_file() else None


def text_of(section: Section, numbers: Numbers) -> str:
    """Return the part of the page of a measured section."""
    paragraphs = [f"## {section.title}", section.text.strip()]
    paragraphs += [*(table(view, numbers) for view in section.views), section.remark(numbers)]
    paragraphs += [claims_table(label, claims, numbers) for label, claims in by_source(numbers).items()]
    return "\n\n".join(text for text in paragraphs if text)


def table(view: View, numbers: Numbers) -> str:
    """Return a table with a row for each method, and a column of means with intervals for each number."""
    cells: dict[str, dict[str, str]] = {}
    headings = {}
    for row in numbers["numbers"]:
        for model, metric, heading in view.columns:
            if (row["table"], row["model"], row["metric"]) == (view.table, model, metric):
                cells.setdefault(row["method"], {})[heading] = cell(row)
                headings[heading] = f"{heading}, n = {row['count']}"
    names = [heading for _, _, heading in view.columns if heading in headings]
    lines = [f"| method | {' | '.join(headings[name] for name in names)} |", f"|{' --- |' * (1 + len(names))}"]
    lines += [f"| {method} | {' | '.join(of.get(name, '') for name in names)} |" for method, of in cells.items()]
    return "\n".join([f"**{view.title}**", "", *lines, *(["", view.note] if view.note else [])])


def cell(row: Mapping[str, Any]) -> str:
    """Return a mean with its interval."""
    # Adding zero makes a negative zero positive.
    mean, low, high = (row[key] + 0.0 for key in ("mean", "low", "high"))
    return f"{mean:.3g} [{low:.3g}, {high:.3g}]"
