"""`python -m tools.coverage [--check]`: run every tiny host and write or check the coverage tables of the docs.

Each configuration of each table of hosts is run and measured. The record of all runs is `docs/coverage.json`, from
which the pages are written. A host whose package is not installed keeps its last record; a host that the installed
version cannot trace is recorded with the reason.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import unilinattn
from tools import coverage_pages
from tools.coverage_runs import Runs, firsts, run, tables
from unilinattn.analysis.report import machine
from unilinattn.errors import InputError, OptionError, UnilinattnError, nearest

RECORD = Path("docs/coverage.json")
"""Path of the record of runs, relative to the root of the repository."""

FACTOR = 10.0
"""Largest ratio of a configuration's errors in two runs; errors are rounding, which depends on the machine."""

TOGETHER = (("float32", "float64"), ("bfloat16",))
"""Dtypes whose worst error is compared, in units of rounding.

A sum that nearly cancels costs float32 and float64 as many digits, but one run of one dtype may be lucky.
"""


def differences(stored: Runs, fresh: Runs, *, run_tables: Iterable[str], configurations: Iterable[str]) -> list[str]:
    """Return messages on the differences between a record and fresh runs; errors may differ by `FACTOR`.

    `run_tables`: the tables that were run. `configurations`: the names of all configurations.
    """
    messages = []
    configurations, run_tables = set(configurations), set(run_tables)
    for name, entry in stored.items():
        if name not in configurations and entry["table"] in run_tables:
            messages.append(f"{name}: is recorded, but in no table of hosts")
    for name, entry in fresh.items():
        if name not in stored:
            messages.append(f"{name}: was never recorded")
        else:
            messages += [f"{name}: {line}" for line in _changed(stored[name], entry)]
    return messages


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a run failed or is inexact, or, with `--check`, if a page is stale, else 0."""
    options = _parser().parse_args(arguments)
    try:
        return _main(options)
    except UnilinattnError as error:
        print(f"coverage: {error}", file=sys.stderr)
        return 1


def _main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    if not (options.root / "README.md").is_file():
        raise InputError(f"{options.root} is no checkout of the repository: it has no README.md. Name one with --root.")
    every = tables()
    for name in options.tables or ():
        if name not in every:
            raise OptionError(f"no table of hosts is named {name!r}{nearest(name, every)}")
    selected = {name: hosts for name, hosts in every.items() if not options.tables or name in options.tables}
    record = _Record(options.root / RECORD)
    fresh, problems = run({name: firsts(hosts) for name, hosts in selected.items()} if options.first else selected)
    names = [f"{table}/{host.name}" for table, hosts in every.items() for host in hosts]
    if options.check:
        problems += record.differences(fresh, selected, names)
        problems += coverage_pages.stale(options.root, record.content, every)
    else:
        record.update(fresh, selected, names)
        record.save()
        problems += coverage_pages.write(options.root, record.content, every)
    for problem in problems:
        print(problem)
    if options.check and problems:
        print("\nBring the tables up to date: python -m tools.coverage")
    print(f"{len(fresh)} configurations ran, {len(problems)} problems.")
    return 1 if problems else 0


class _Record:
    """The record of runs: for each environment the machine, and the measurements of each configuration."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}

    def differences(self, fresh: Runs, run_tables: Iterable[str], configurations: Iterable[str]) -> list[str]:
        messages = []
        for environment, runs in _by_environment(fresh).items():
            if environment not in self.content:
                messages.append(f"{environment}: has no recorded run")
                continue
            stored = self.content[environment]["runs"]
            lines = differences(stored, runs, run_tables=run_tables, configurations=configurations)
            messages += [f"{environment}: {line}" for line in lines]
        return messages

    def update(self, fresh: Runs, run_tables: Iterable[str], configurations: Sequence[str]) -> None:
        run_tables, order = set(run_tables), {name: rank for rank, name in enumerate(configurations)}
        for environment, runs in _by_environment(fresh).items():
            entry = self.content.setdefault(environment, {"runs": {}})
            entry["machine"] = _machine()
            entry["runs"].update(runs)
        for entry in self.content.values():
            names = [name for name, run in entry["runs"].items() if name in order or run["table"] not in run_tables]
            names.sort(key=lambda name: order.get(name, len(order)))
            entry["runs"] = {name: entry["runs"][name] for name in names}
        self.content = {name: entry for name, entry in self.content.items() if entry["runs"]}

    def save(self) -> None:
        blocks = []
        for environment, entry in sorted(self.content.items()):
            runs = ",\n".join(f"    {json.dumps(n)}: {json.dumps(run)}" for n, run in entry["runs"].items())
            machine = json.dumps(entry["machine"])
            blocks.append(f'{json.dumps(environment)}: {{\n  "machine": {machine},\n  "runs": {{\n{runs}\n  }}\n}}')
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.coverage",
        description="Run every tiny host and write the coverage tables of the documentation.",
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table or page is stale")
    parser.add_argument("--tables", nargs="+", metavar="TABLE", help="run these tables of hosts only, such as fla")
    parser.add_argument("--first", action="store_true", help="run the first configuration of each adapter only")
    root = Path(unilinattn.__file__).parents[1]
    parser.add_argument("--root", type=Path, default=root, help="root of the repository (default: the package's)")
    return parser


def _by_environment(runs: Runs) -> dict[str, Runs]:
    groups: dict[str, Runs] = {}
    for name, entry in runs.items():
        run = {key: value for key, value in entry.items() if key != "environment"}
        groups.setdefault(entry["environment"], {})[name] = run
    return groups


def _changed(stored: Any, fresh: Any, path: str = "") -> list[str]:
    """Return messages on the differences of two entries, each with its path of keys."""
    if not (isinstance(stored, dict) and isinstance(fresh, dict)):
        return [] if stored == fresh else [f"{path} was {stored}, is {fresh}"]
    messages: list[str] = []
    compared: set[str] = set()
    for dtypes in TOGETHER:
        names = [name for name in dtypes if isinstance(stored.get(name), float) and isinstance(fresh.get(name), float)]
        compared |= set(names)
        before, after = (max((_units(entry[name], name) for name in names), default=1.0) for entry in (stored, fresh))
        if not 1 / FACTOR <= after / before <= FACTOR:
            where = f"{path} {' and '.join(names)}".strip()
            messages.append(f"{where} was {before:.1f} units of rounding, is {after:.1f}")
    for key in dict.fromkeys([*stored, *fresh]):
        if key not in compared:
            messages += _changed(stored.get(key), fresh.get(key), f"{path} {key}".strip())
    return messages


def _units(error: float, dtype: str) -> float:
    """Return an error in units of rounding of its dtype; smaller errors count as one unit."""
    return max(1.0, error / torch.finfo(getattr(torch, dtype)).eps)


def _machine() -> dict[str, str]:
    """Return the machine and the versions of torch and Python, without names or paths."""
    interpreted = ", Triton's interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    described = machine()
    return {
        "machine": f"{described['system']} {described['architecture']}, CPU{interpreted}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
