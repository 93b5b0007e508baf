"""Seed faults in a copy of the package, one at a time, and tell which of them the tests notice.

`python -m tools.mutants` applies each fault of mutants.toml to a temporary copy of the repository and runs the tests
that the fault lists: those of `make test`, if they pass those of `make slow`, and then the first with checked
signatures. mutants.json records which of these noticed it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[1]
FAULTS, RECORD = (Path(__file__).with_suffix(suffix) for suffix in (".toml", ".json"))
PACKAGE = "unilinattn"

COPIED = (PACKAGE, "tests", "tools", "evidence", "benchmarks", "docs")
"""Folders that tests read; the files beside them are copied too."""

SUITES = {
    "test": ["-m", "not slow and not long"],
    "slow": ["-m", "slow or long"],
    "thorough": ["-m", "not slow", "--thorough"],
}
"""Options of pytest by suite, in the order in which they run; `.ci/run` has all of them."""

LIVED = "lived"

PASSED, FAILED, NOT_COLLECTED, NONE_SELECTED = 0, 1, 2, 5
"""Exit codes of pytest; a fault may keep a module from being imported."""


@dataclass(frozen=True)
class Mutant:
    """A seeded fault: a text of the package that occurs once, another in its place, and the tests to run."""

    name: str
    text: str
    new: str
    tests: tuple[str, ...]


def mutants() -> list[Mutant]:
    """Read the seeded faults."""
    entries = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def sources(root: Path = ROOT) -> dict[Path, str]:
    """Read the modules of the package."""
    return {path: path.read_text(encoding="utf-8") for path in sorted((root / PACKAGE).rglob("*.py"))}


def module_of(mutant: Mutant, texts: Mapping[Path, str]) -> Path:
    """Return the module with the text of a mutant; raise `LookupError` unless the text occurs once."""
    count = sum(text.count(mutant.text) for text in texts.values())
    if count != 1:
        raise LookupError(f"{mutant.name!r}: its text occurs {count} times in {PACKAGE}, and once is needed.")
    return next(path for path, text in texts.items() if mutant.text in text)


def verdict(mutant: Mutant, copy: Path, tests: Sequence[str] = (), suites: Sequence[str] = tuple(SUITES)) -> str:
    """Apply a mutant to a copy of the repository, and return the suite whose tests fail, or `LIVED`."""
    texts = sources(copy)
    path = module_of(mutant, texts)
    path.write_text(texts[path].replace(mutant.text, mutant.new), encoding="utf-8")
    try:
        return next((suite for suite in suites if _fails(copy, tests or mutant.tests, suite)), LIVED)
    finally:
        path.write_text(texts[path], encoding="utf-8")


def _fails(copy: Path, tests: Sequence[str], suite: str) -> bool:
    """Run tests until one fails; raise `RuntimeError` if they cannot run."""
    options = ["-q", "-x", "-p", "no:cacheprovider", *SUITES[suite]]
    # Python takes compiled code whose source has the same second and size, as two faults may have.
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (PASSED, FAILED, NOT_COLLECTED, NONE_SELECTED):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
    return done.returncode in (FAILED, NOT_COLLECTED)


def copied(folder: Path) -> Path:
    """Copy the repository into a folder, and return the copy."""
    copy = folder / "copy"
    copy.mkdir()
    for name in COPIED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    return copy


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the verdict on each mutant; 1 if one lived that the record says was noticed."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description="Tell which seeded faults tests find.")
    parser.add_argument("--only", metavar="WORD", default="", help="mutants whose name contains this word")
    parser.add_argument("--tests", nargs="+", default=(), metavar="PATH", help="tests to run instead of those listed")
    parser.add_argument(
        "--suites", nargs="+", choices=SUITES, default=tuple(SUITES), help="suites to run, in this order"
    )
    parser.add_argument("--write", action="store_true", help="write the verdicts into mutants.json")
    parser.add_argument("--check", action="store_true", help="run no tests: only look for the text of each mutant")
    options = parser.parse_args(arguments)
    selected = [mutant for mutant in mutants() if options.only in mutant.name]
    texts = sources()
    for mutant in selected:
        module_of(mutant, texts)
    if options.check:
        return 0
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for mutant in selected:
            start, before = monotonic(), record.get(mutant.name)
            record[mutant.name] = verdict(mutant, copy, options.tests, options.suites)
            is_lost = record[mutant.name] == LIVED != (before or LIVED)
            lost += is_lost
            note = f", and was noticed by make {before}" if is_lost else ""
            print(f"{record[mutant.name]:5}  {mutant.name} ({monotonic() - start:.0f} s){note}", flush=True)
            if options.write:
                record = {mutant.name: record[mutant.name] for mutant in mutants() if mutant.name in record}
                RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
