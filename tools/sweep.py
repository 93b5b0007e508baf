"""`python -m tools.sweep [--check]`: trace and explain a tiny model of every auto class of transformers.

The outcome of each model is recorded in `docs/sweep.json`; the table by task is a section of `docs/coverage.md`. Exit
code 1 means that a model is wrong or crashes, or, with `--check`, that an outcome differs from the record.
"""

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import unilinattn
from tools.markers import MissingSectionError, replace_section
from tools.sweep_pages import OUTCOMES, SECTION, read_record, section, table, write_record
from tools.sweep_run import Case, run
from unilinattn.errors import InputError, OptionError, UnilinattnError, nearest
from unilinattn.evaluation.checkpoints import quiet_hosts

PAGE = Path("docs/coverage.md")
"""Page with the table, relative to the root of the repository."""

FAILURES = ("wrong", "crash")
"""Outcomes with which the command fails."""

Row = dict[str, Any]
"""One line of the record: task, type, class, outcome, and the error, layers and gap where there are any."""


def cases() -> list[Case]:
    """Return the model classes of the auto mappings of transformers, each with the first task that lists it.

    Classes for pretraining come last, since most of them have a task as well.
    """
    from transformers.models.auto import modeling_auto

    suffix = "_MAPPING_NAMES"
    names = [name for name in vars(modeling_auto) if name.startswith("MODEL_") and name.endswith(suffix)]
    names.sort(key=lambda name: "PRETRAINING" in name)
    cases: dict[str, Case] = {}
    for name in names:
        task = name.removesuffix(suffix).removeprefix("MODEL").removeprefix("_FOR_").lower().replace("_", " ") or "base"
        for model_type, classes in getattr(modeling_auto, name).items():
            for model in [classes] if isinstance(classes, str) else classes:
                cases.setdefault(model, Case(task, model_type, model))
    return list(cases.values())


def differences(stored: Sequence[Row], fresh: Sequence[Row], *, whole: bool = True) -> list[str]:
    """Return messages on the outcomes that differ between a record and fresh rows; numbers and messages may differ.

    `whole`: the fresh rows are of all models, so that others in the record are reported.
    """
    before, after = ({row["class"]: row for row in rows} for rows in (stored, fresh))
    messages = [f"{name}: is recorded, but in no auto class" for name in before if whole and name not in after]
    for name, row in after.items():
        if name not in before:
            messages.append(f"{name}: was never recorded, is {_described(row)}")
        elif before[name]["outcome"] != row["outcome"]:
            messages.append(f"{name}: was {before[name]['outcome']}, is {_described(row)}")
    return messages


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a model is wrong or crashes, or if a check finds differences, else 0."""
    try:
        return _main(_parser().parse_args(arguments))
    except (UnilinattnError, MissingSectionError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 1


def _main(options: argparse.Namespace) -> int:
    import transformers

    if not (options.root / PAGE).is_file():
        raise InputError(f"{options.root} is no checkout of the repository: it has no {PAGE}. Name one with --root.")
    every = cases()
    tasks = list(dict.fromkeys(case.task for case in every))
    if options.task not in (None, *tasks):
        raise OptionError(f"no task is named {options.task!r}{nearest(options.task, tasks)}")
    selected = [case for case in every if options.task in (None, case.task)][: options.limit]
    whole, version = len(selected) == len(every), transformers.__version__
    record = read_record(options.root)
    if record and record["transformers"] != version and (options.check or not whole):
        raise InputError(
            f"the record is of transformers {record['transformers']}, and {version} is installed: install the recorded "
            "version, or run the whole sweep without --check."
        )
    if options.check and record is None:
        raise InputError("there is no record to check: run the sweep without --check first.")
    stored = record["rows"] if record else []
    fresh = _rows(selected, options.jobs)
    problems = [f"{row['class']}: {_described(row)}" for row in fresh if row["outcome"] in FAILURES]
    changes = differences(stored, fresh, whole=whole) if options.check else []
    if not options.check:
        _write(options.root, version, _merged(stored, fresh, every))
    print(table(fresh))
    for message in (*problems, *changes):
        print(message)
    print(f"{len(fresh)} models, {len(problems)} wrong or crashed{_count(changes, options.check)}.")
    return 1 if problems or changes else 0


def _count(changes: Sequence[str], check: bool) -> str:
    return f", {len(changes)} outcomes differ from the record" if check else ""


def _rows(selected: Sequence[Case], jobs: int) -> list[Row]:
    """Run models and return their rows in the same order."""
    results: dict[str, Mapping[str, Any]] = {}
    torch.set_num_threads(1)
    with warnings.catch_warnings(), quiet_hosts():
        warnings.simplefilter("ignore")
        for case, result in tqdm(run(selected, jobs), total=len(selected), disable=None, leave=False, unit="model"):
            results[case.name] = result
    return [_row(case, results[case.name]) for case in selected]


def _row(case: Case, result: Mapping[str, Any]) -> Row:
    assert result["outcome"] in OUTCOMES
    return {"task": case.task, "type": case.model_type, "class": case.name, **result}


def _merged(stored: Sequence[Row], fresh: Sequence[Row], every: Sequence[Case]) -> list[Row]:
    """Return the stored rows with the fresh ones in their places, in the order of the mappings."""
    rows = {row["class"]: row for row in (*stored, *fresh)}
    return [rows[case.name] for case in every if case.name in rows]


def _write(root: Path, version: str, rows: Sequence[Row]) -> None:
    record = {"transformers": version, "torch": torch.__version__.partition("+")[0], "rows": rows}
    page = replace_section((root / PAGE).read_text(), SECTION, section(record))
    write_record(root, record)
    (root / PAGE).write_text(page)


def _described(row: Row) -> str:
    details = [str(row[name]) for name in ("error", "message") if row.get(name)]
    return f"{row['outcome']} ({': '.join(details)})" if details else str(row["outcome"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sweep",
        description="Trace and explain a tiny model of every auto class of transformers.",
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if an outcome differs")
    parser.add_argument("--task", help="run the models of this task only, such as 'causal lm'")
    parser.add_argument("--jobs", type=int, default=2, help="models that run at a time (default: 2)")
    parser.add_argument("--limit", type=int, help="run this many models only")
    root = Path(unilinattn.__file__).parents[1]
    parser.add_argument("--root", type=Path, default=root, help="root of the repository (default: the package's)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
