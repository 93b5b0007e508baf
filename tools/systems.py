"""`python -m tools.systems [--check]`: trace and explain small models of many packages, without an adapter.

The outcome of each model is recorded in `docs/systems.json`; the table is a section of `docs/systems.md`. Exit code 1
means that a model is wrong or crashes, or, with `--check`, that an outcome differs from the record.
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import unilinattn
from tools import markers, systems_diffusers, systems_images, systems_layers, systems_text, systems_torch
from tools.sweep_pages import OUTCOMES
from tools.sweep_run import GAP, difference, failed, run
from tools.systems_models import SYSTEMS, System, names
from unilinattn import MixerOperator, Trace, explain, trace
from unilinattn.errors import InputError, OptionError, UncoveredError, UnilinattnError, nearest
from unilinattn.evaluation.checkpoints import quiet_hosts
from unilinattn.testing.hosts import randomize
from unilinattn.testing.promote import promoted

BUILDERS = (systems_torch, systems_images, systems_diffusers, systems_text, systems_layers)
"""The modules that register models."""

PAGE, RECORD, SECTION = Path("docs/systems.md"), Path("docs/systems.json"), "systems"
"""The page with the table and the record, relative to the root of the repository, and the page's section."""

SINGLE, DOUBLE = 1e-5, 1e-10
"""Largest reconstruction error of a layer in float32 and in float64."""

FAILURES = ("wrong", "crash")
"""Outcomes with which the command fails."""

Row = dict[str, Any]
"""One line of the record: package, version, name, outcome; layers, maps, errors, gap and message where there are."""

_TEXT = """\
{total} small models of {packages} packages with random weights, none of which has an adapter: {built} are built and
run, {exact} of these are traced exactly, and {works} of these explained by `logit`; {maps} of their {layers} layers
have a map. The builders are the files `tools/systems_*.py`.

- *maps*: the layers with a matrix of numbers for each channel or head, which `raw`, `rollout` and `attribution` need;
  those of others mix channels together with tokens.

- *works*: `trace` finds all layers, the largest reconstruction error of a layer is at most 1e-5 in float32 and 1e-10 in
  float64, and `explain(..., target=-1)` returns finite scores whose completeness gap is at most 1e-3.
- *unexplained*: traced exactly, and the method refuses the model with an error of this package.
- *refused*: `trace` refuses the model with an error of this package.
- *unbuilt*: the package cannot be imported beside this version of torch, or its model does not run.
"""


def measure(system: System, built: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return the outcome of a model in this process; call `built` when it has run."""
    try:
        model, inputs, reference = prepared(system)
    except Exception as error:
        return failed("unbuilt", error)
    built()
    try:
        traced = trace(model, inputs, progress=False)
        result: Row = {"layers": len(traced.layers), "maps": maps(traced), "error32": worst_error(traced)}
        changed = difference(traced.output, reference)
        with promoted():
            # `double` leaves complex weights as they are.
            model = model.double()._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t)
            inputs = in_double(inputs)
            traced = trace(model, inputs, progress=False)
            result["error64"] = worst_error(traced)
    except UnilinattnError as error:
        return failed("refused", error)
    except Exception as error:
        return failed("crash", error)
    if not (result["error32"] <= SINGLE and result["error64"] <= DOUBLE and changed <= SINGLE):
        return {"outcome": "wrong", "message": f"the traced output differs by {changed:.0e}"} | result
    try:
        with promoted():
            scores = explain(traced, target=-1, method="logit", logit=logit_of(traced.output))
    except UnilinattnError as error:
        return failed("unexplained", error) | result
    except Exception as error:
        return failed("crash", error) | result
    gap = scores.completeness_gap
    result["gap"] = None if gap is None else float(f"{gap:.0e}")
    if not bool(scores.scores.isfinite().all()) or not (gap is not None and gap <= GAP):
        return {"outcome": "wrong", "message": "scores are not finite, or do not add up to the target"} | result
    return {"outcome": "works"} | result


def prepared(system: System) -> tuple[nn.Module, Any, Any]:
    """Return a model in evaluation mode with random weights, its inputs and its output."""
    torch.manual_seed(0)
    model, inputs = system.build()
    model = model.eval()
    if system.random:
        model = randomize(model)
    with torch.no_grad():
        output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return model, inputs, output


def maps(traced: Trace) -> int:
    """Return the number of layers with a matrix of numbers, which `raw` and `rollout` need."""

    def has_map(operator: MixerOperator) -> bool:
        try:
            operator.scoped_map()
        except UncoveredError:
            return False
        return True

    return sum(has_map(layer.operator) for layer in traced.layers)


def in_double(inputs: Any) -> Any:
    """Return the inputs with their floating-point tensors in float64."""
    if isinstance(inputs, Mapping):
        return {name: in_double(value) for name, value in inputs.items()}
    return inputs.double() if inputs.is_floating_point() else inputs


def worst_error(traced: Trace) -> float:
    """Return the largest reconstruction error of a layer."""
    return float(f"{max(layer.operator.reconstruction_error() for layer in traced.layers):.1e}")


def logit_of(output: Any) -> Callable[[Any], Tensor] | None:
    """Return the function of a logit for a model that returns bare logits of every token, None for others.

    A tensor of three axes may have hidden states, so that the function must say what is explained.
    """
    if isinstance(output, (tuple, list)):
        inner = logit_of(output[0])
        return inner and (lambda out: inner(out[0]))
    is_bare = isinstance(output, Tensor) and output.ndim == 3
    return (lambda out: out[:, -1, 0]) if is_bare else None


def section(record: Mapping[str, Any]) -> str:
    """Return the body of the section from the record."""
    rows = record["rows"]
    counts = Counter(row["outcome"] for row in rows)
    text = _TEXT.format(
        total=len(rows),
        packages=len({row["package"] for row in rows}),
        built=len(rows) - counts["unbuilt"],
        exact=counts["works"] + counts["unexplained"],
        works=counts["works"],
        maps=sum(row.get("maps", 0) for row in rows),
        layers=sum(row.get("layers", 0) for row in rows),
    )
    return f"{text}\nMeasured with torch {record['torch']}.\n\n{table(rows)}\n\n{reasons(rows)}"


def table(rows: Sequence[Row]) -> str:
    """Return a line for each model as a Markdown table."""
    heads = ("package", "model", "layers", "maps", "outcome", "error, float32", "error, float64", "gap")
    numbers = ("error32", "error64", "gap")

    def line(row: Row) -> tuple[Any, ...]:
        counts = row.get("layers", ""), row.get("maps", "")
        return _package(row), row["name"], *counts, row["outcome"], *(_number(row, name) for name in numbers)

    lines = map(line, rows)
    return markers.table(heads, lines)


def reasons(rows: Sequence[Row]) -> str:
    """Return the errors of the models that are not traced or not explained, as a list."""
    named = (row for row in rows if row["outcome"] != "works")
    return "\n".join(f"- {row['name']} ({row['package']}), {row['outcome']}: {row.get('message', '')}" for row in named)


def differences(stored: Sequence[Row], fresh: Sequence[Row]) -> list[str]:
    """Return messages on the outcomes that differ between a record and fresh rows; numbers and messages may differ."""
    before = {row["name"]: row["outcome"] for row in stored}
    return [
        f"{row['name']}: was {before.get(row['name'], 'never recorded')}, is {row['outcome']}"
        for row in fresh
        if before.get(row["name"]) != row["outcome"]
    ]


def read_record(root: Path) -> dict[str, Any] | None:
    """Return the record of the repository at `root`, None if there is none."""
    path = root / RECORD
    return json.loads(path.read_text()) if path.is_file() else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a model is wrong or crashes, or if a check finds differences, else 0."""
    options = _parser().parse_args(arguments)
    try:
        return _main(options)
    except (UnilinattnError, markers.MissingSectionError) as error:
        print(f"systems: {error}", file=sys.stderr)
        return 1


def _main(options: argparse.Namespace) -> int:
    packages = list(dict.fromkeys(entry.package for entry in SYSTEMS.values()))
    for package in options.package:
        if package not in packages:
            raise OptionError(f"no package is named {package!r}{nearest(package, packages)}")
    record = read_record(options.root)
    if options.check and record is None:
        raise InputError("there is no record to check: run without --check first.")
    fresh = _rows([SYSTEMS[name] for name in names(options.package)], options.jobs)
    stored = record["rows"] if record else []
    changes = differences(stored, fresh) if options.check else []
    problems = [
        f"{row['name']}: {row['outcome']} ({row.get('message')})" for row in fresh if row["outcome"] in FAILURES
    ]
    if not options.check:
        rows = {row["name"]: row for row in (*stored, *fresh)}
        _write(options.root, [rows[name] for name in SYSTEMS if name in rows])
    print(table(fresh))
    for message in (*problems, *changes):
        print(message)
    counts = Counter(row["outcome"] for row in fresh)
    print(f"{len(fresh)} models: {', '.join(f'{counts[o]} {o}' for o in OUTCOMES if counts[o])}.")
    return 1 if problems or changes else 0


def _rows(systems: Sequence[System], jobs: int) -> list[Row]:
    """Run models and return their rows in the same order."""
    results: dict[str, Mapping[str, Any]] = {}
    torch.set_num_threads(1)
    with warnings.catch_warnings(), quiet_hosts():
        warnings.simplefilter("ignore")
        runs = run(systems, jobs, measure)
        for system, result in tqdm(runs, total=len(systems), disable=None, leave=False, unit="model"):
            results[system.name] = result
    return [
        {"package": system.package, "version": _version(system.package), "name": system.name, **results[system.name]}
        for system in systems
    ]


def _version(package: str) -> str | None:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def _package(row: Row) -> str:
    return f"{row['package']} {row['version'] or ''}".strip()


def _number(row: Row, name: str) -> str:
    value = row.get(name)
    return "" if value is None else f"{value:.0e}"


def _write(root: Path, rows: Sequence[Row]) -> None:
    record = {"torch": torch.__version__.partition("+")[0], "rows": rows}
    page = markers.replace_section((root / PAGE).read_text(), SECTION, section(record))
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    (root / RECORD).write_text(f'{{\n"torch": {json.dumps(record["torch"])},\n"rows": [\n{lines}\n]\n}}\n')
    (root / PAGE).write_text(page)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.systems",
        description="Trace and explain small models of many packages, without an adapter.",
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if an outcome differs")
    parser.add_argument("--package", action="append", default=[], help="run the models of this package only")
    parser.add_argument("--jobs", type=int, default=1, help="models that run at a time (default: 1)")
    root = Path(unilinattn.__file__).parents[1]
    parser.add_argument("--root", type=Path, default=root, help="root of the repository (default: the package's)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
