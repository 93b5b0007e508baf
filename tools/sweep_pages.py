"""The record of the sweep as a section of the coverage page: a table by task and the meaning of the outcomes."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import markers

RECORD = Path("docs/sweep.json")
"""Path of the record, relative to the root of the repository."""

SECTION = "sweep"
"""Name of the section of the coverage page."""

OUTCOMES = ("works", "wrong", "unexplained", "refused", "crash", "unbuilt")
"""Outcomes of a model, in the order of the table."""

_TEXT = """\
{total} model classes of the auto classes of transformers {version}, each once, in tiny configurations with random
weights: {built} are built and run, and {works} of these work. The configurations are derived from the defaults of each
configuration class by rules on the names of attributes (`tools/sweep_configs.py`), the inputs from the signature of
`forward` (`tools/sweep_inputs.py`); no rule knows a model. Each model runs in a process with limits on time and memory.

- *works*: `trace` keeps the output of the model, and `explain(..., target=-1)` returns finite scores, with a
  completeness gap of at most 1e-3 if the method has one.
- *wrong*: the traced output differs from the plain run beyond rounding, scores are not finite or do not add up, or the
  trace has fewer layers than the plain run has calls of modules that attend (a lower bound).
- *unexplained*: `trace` works, and the default method refuses the model with an error of this package.
- *refused*: `trace` refuses the model with an error of this package.
- *crash*: `trace` or `explain` ends in another error, or the process is stopped by a limit.
- *unbuilt*: transformers refuses the derived configuration or inputs, a package is missing, or the model is too large.

`python -m tools.sweep` repeats the sweep and writes this section from [sweep.json](sweep.json), which has the outcome
and the error of each model; `--check` names the outcomes that differ from it. Both fail on a *wrong* or a *crash*."""


def section(record: Mapping[str, Any]) -> str:
    """Return the body of the section from the record of a sweep."""
    rows = record["rows"]
    counts = Counter(row["outcome"] for row in rows)
    built = len(rows) - counts["unbuilt"]
    text = _TEXT.format(version=record["transformers"], total=len(rows), built=built, works=counts["works"])
    return f"{text}\n\n{table(rows)}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of models with each outcome, by task, as a Markdown table."""
    tasks = {row["task"]: Counter[str]() for row in rows}
    for row in rows:
        tasks[row["task"]][row["outcome"]] += 1
    total = sum(tasks.values(), Counter[str]())
    rows_by_task = (
        (task, *(counts[outcome] for outcome in OUTCOMES), counts.total())
        for task, counts in [*tasks.items(), ("all", total)]
    )
    return markers.table(("task", *OUTCOMES, "all"), rows_by_task, right=1)


def read_record(root: Path) -> dict[str, Any] | None:
    """Return the record of the repository at `root`, None if there is none."""
    path = root / RECORD
    return json.loads(path.read_text()) if path.is_file() else None


def write_record(root: Path, record: Mapping[str, Any]) -> None:
    """Write a record with one line for each model."""
    head = json.dumps({name: value for name, value in record.items() if name != "rows"})[1:-1]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
    (root / RECORD).write_text(f'{{\n{head},\n"rows": [\n{rows}\n]\n}}\n')
