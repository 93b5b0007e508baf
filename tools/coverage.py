"""`python -m tools.coverage [--check]`: run every tiny host and write, or check, the coverage tables of the docs.

Each configuration of each table of hosts is run and measured. The record of all runs is `docs/coverage.json`, from
which the pages are written. A host whose package is not installed keeps its last record; a host that the installed
version cannot trace is recorded with the reason.
"""

import argparse
import copy
import importlib
import inspect
import json
import os
import pkgutil
import platform
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import unilinattn
from tools import coverage_pages
from tools.hybrids import listed
from tools.versions import Unavailable, model_of, trace_of
from unilinattn.call import package_version
from unilinattn.call.exactness import relative_error, tolerance
from unilinattn.errors import InputError, OptionError, UncoveredError, UnilinattnError, nearest
from unilinattn.evaluation.report import machine
from unilinattn.evaluation.side_by_side import quiet_hosts
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.scopes import SCOPES
from unilinattn.operator.stages import Mix, walk
from unilinattn.testing import hosts
from unilinattn.testing.hosts import Host
from unilinattn.testing.promote import promoted
from unilinattn.tracing.inputs import host_arguments
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace, trace

RECORD = Path("docs/coverage.json")
"""Path of the record of runs, relative to the root of the repository."""

FACTOR = 10.0
"""Largest ratio of a configuration's errors in two runs; errors are rounding, which depends on the machine."""

FLOAT32_KERNELS = ("fla",)
"""Packages whose kernels always compute in float32, so that they are measured in float32 only."""

_WAYS = re.compile(r"(_forward|_rule|_scan|_attention|_attention_cpu|_autograd|_sequence_native|conv1d_fn)$")
"""Functions of a host's file whose calls show its code path for a layer (fused, chunked, plain)."""

_KERNELS = re.compile(r"^(chunk|fused|parallel|naive|recurrent)_(?!.*_(fwd|bwd))")
"""The same for packages of kernels, whose functions are in separate files."""

Runs = dict[str, dict[str, Any]]
"""Measurements by "table/name" of a configuration."""


def tables() -> dict[str, tuple[Host, ...]]:
    """Return every table of hosts in `unilinattn.testing.hosts`, by the name of its module."""
    names = sorted(module.name for module in pkgutil.iter_modules(hosts.__path__))
    modules = {name: importlib.import_module(f"{hosts.__name__}.{name}") for name in names}
    return {name: module.HOSTS for name, module in modules.items() if hasattr(module, "HOSTS")}


def measure(host: Host) -> dict[str, Any] | None:
    """Run one configuration and return its record, or None if its package is not installed.

    Errors are reconstruction errors, the worst over the layers of each adapter. If the installed version cannot be
    traced, the record holds the reason.
    """
    try:
        model = model_of(host)
        with _watching(model) as paths:
            traced = trace_of(host, model)
    except Unavailable as reason:
        return {"environment": reason.environment, "left_out": str(reason)}
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("unilinattn"):
            raise
        return None
    inputs = host.inputs()
    package = type(model).__module__.split(".")[0]
    layers = {name: _described(group, paths) for name, group in _by_architecture(traced).items()}
    runs, reference, limit = {"float32": traced}, traced, tolerance("padding", torch.float32)
    if package not in FLOAT32_KERNELS:
        brief, given = copy.deepcopy(model).bfloat16(), _cast(inputs, torch.bfloat16)
        if _runs(brief, given):
            runs["bfloat16"] = trace(brief, given)
        model, limit = copy.deepcopy(model).double(), tolerance("padding", torch.float64)
        reference = runs["float64"] = _promoted(model, _cast(inputs, torch.float64))
    for how, run in runs.items():
        for name, group in _by_architecture(run).items():
            layers[name][how] = _worst(group)
    exact = {how: run for how, run in runs.items() if how != "bfloat16"}
    hybrid = None if package in FLOAT32_KERNELS else listed(exact)
    return {
        "environment": "unilinattn" if package == "unilinattn" else package_version(model),
        "architecture": host.architecture,
        "batch": host.batch,
        "length": host.length,
        "padding": _sides(model, inputs, reference, limit),
        "layers": layers,
        **({} if hybrid is None else {"model": type(model).__name__, "hybrid": hybrid}),
    }


def run(chosen: Mapping[str, Sequence[Host]]) -> tuple[Runs, list[str]]:
    """Measure tables of hosts; return their records and the messages of failed or inexact configurations."""
    runs: Runs = {}
    problems: list[str] = []
    hosts = [(table, host) for table, entries in chosen.items() for host in entries]
    quiet = quiet_hosts() if find_spec("transformers") else nullcontext()
    with warnings.catch_warnings(), quiet:
        warnings.simplefilter("ignore")
        for table, host in tqdm(hosts, disable=None, leave=False, unit="host"):
            try:
                entry = measure(host)
            except Exception as error:
                first = str(error).strip().split("\n", 1)[0]
                problems.append(f"{host.name} ({table}) failed with {type(error).__name__}: {first}")
                continue
            if entry is not None:
                runs[f"{table}/{host.name}"] = {"table": table, **entry}
                problems += _inexact(host.name, entry)
    return runs, problems


def differences(stored: Runs, fresh: Runs, *, run_tables: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return messages on the differences between a record and fresh runs; errors may differ by `FACTOR`.

    `run_tables`: the tables that were run. `known`: the names of all configurations.
    """
    messages = []
    known, run_tables = set(known), set(run_tables)
    for name, entry in stored.items():
        if name not in known and entry["table"] in run_tables:
            messages.append(f"{name}: is recorded, and no table of hosts has it any more")
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
    chosen = {name: hosts for name, hosts in every.items() if not options.tables or name in options.tables}
    record = _Record(options.root / RECORD)
    fresh, problems = run(chosen)
    names = [f"{table}/{host.name}" for table, hosts in every.items() for host in hosts]
    if options.check:
        problems += record.differences(fresh, chosen, names)
        problems += coverage_pages.stale(options.root, record.content, every)
    else:
        record.update(fresh, chosen, names)
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

    def differences(self, fresh: Runs, chosen: Iterable[str], known: Iterable[str]) -> list[str]:
        messages = []
        for environment, runs in _by_environment(fresh).items():
            if environment not in self.content:
                messages.append(f"{environment}: no run with it is recorded")
                continue
            stored = self.content[environment]["runs"]
            lines = differences(stored, runs, run_tables=chosen, known=known)
            messages += [f"{environment}: {line}" for line in lines]
        return messages

    def update(self, fresh: Runs, chosen: Iterable[str], known: Sequence[str]) -> None:
        chosen, order = set(chosen), {name: place for place, name in enumerate(known)}
        for environment, runs in _by_environment(fresh).items():
            entry = self.content.setdefault(environment, {"runs": {}})
            entry["machine"] = _machine()
            entry["runs"].update(runs)
        for entry in self.content.values():
            names = [name for name, run in entry["runs"].items() if name in order or run["table"] not in chosen]
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
    root = Path(unilinattn.__file__).parents[1]
    parser.add_argument("--root", type=Path, default=root, help="the repository (default: where the package lies)")
    return parser


def _by_architecture(found: Trace) -> dict[str, list[Layer]]:
    groups: dict[str, list[Layer]] = {}
    for layer in found.layers:
        groups.setdefault(layer.architecture, []).append(layer)
    return groups


def _by_environment(runs: Runs) -> dict[str, Runs]:
    groups: dict[str, Runs] = {}
    for name, entry in runs.items():
        own = {key: value for key, value in entry.items() if key != "environment"}
        groups.setdefault(entry["environment"], {})[name] = own
    return groups


def _described(layers: Sequence[Layer], paths: Mapping[str, set[str]]) -> dict[str, Any]:
    structures: dict[str, None] = {}
    scopes = set(SCOPES)
    for layer in layers:
        with suppress(UncoveredError):
            for chain in layer.operator.chains.values():
                cores = [stage for stage in walk(chain) if isinstance(stage, Mix) and stage.role == "core"]
                structures |= dict.fromkeys(stage.mixer.structure for stage in cores)
        scopes = {scope for scope in scopes if _supports(layer, scope)}
    return {
        "hosts": sorted({type(layer.module).__qualname__ for layer in layers}),
        "kind": sorted({layer.kind for layer in layers}),
        "structure": list(structures),
        "path": sorted(set().union(*(paths[layer.name.split("#")[0]] for layer in layers))),
        "scopes": [scope for scope in SCOPES if scope in scopes],
    }


def _supports(layer: Layer, scope: str) -> bool:
    try:
        op: MixerOperator = layer.operator
        for port in op.ports:
            op.contributions(-1, port=port) if scope == "layer" else op.rows(-1, scope=scope, port=port)
    except UncoveredError:
        return False
    return True


def _worst(layers: Sequence[Layer]) -> float | None:
    """Return the worst error, or None if a layer has no operator."""
    try:
        return float(f"{max(layer.operator.reconstruction_error() for layer in layers):.1e}")
    except UncoveredError:
        return None


def _promoted(model: nn.Module, inputs: Any) -> Trace:
    with promoted():
        found = trace(model, inputs)
        for layer in found.layers:
            with suppress(UncoveredError):
                layer.operator  # noqa: B018  built while the host is promoted
    return found


def _cast(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


@torch.no_grad()
def _runs(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether a host runs in its dtype; some mix dtypes inside and raise."""
    try:
        model(**host_arguments(model, inputs))
    except RuntimeError:
        return False
    return True


def _sides(model: nn.Module, ids: Tensor, alone: Trace, limit: float) -> list[str] | None:
    """Return the sides on which the host keeps padding out of real tokens, or None if it takes no mask."""
    if ids.is_floating_point() or "attention_mask" not in inspect.signature(model.forward).parameters:
        return None
    pads = ids[:, :1].expand(-1, 2)
    kept = []
    for side in ("left", "right"):
        order = (pads, ids) if side == "left" else (ids, pads)
        real = torch.cat([torch.full_like(part, part is ids) for part in order], dim=1)
        given = {"input_ids": torch.cat(order, dim=1), "attention_mask": real}
        with promoted() if alone.layers[0].input.dtype is torch.float64 else nullcontext():
            padded = trace(model, given)
        place = slice(2, None) if side == "left" else slice(None, ids.shape[1])
        pairs = zip(padded.layers, alone.layers, strict=True)
        if all(relative_error(layer.output[:, place], other.output) <= limit for layer, other in pairs):
            kept.append(side)
    return kept


@contextmanager
def _watching(model: nn.Module) -> Iterator[dict[str, set[str]]]:
    """Record, for every module of a model, the functions of its file, or kernels, that run in its forward pass."""
    paths: dict[str, set[str]] = {name: set() for name, _ in model.named_modules()}
    inside: list[tuple[str, str]] = []
    package = type(model).__module__.split(".")[0]
    ways = _KERNELS if package in FLOAT32_KERNELS else _WAYS

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and inside and ways.search(code.co_name):
            for name, file in inside:
                if code.co_filename.startswith(file):
                    paths[name].add(code.co_name)

    def enter(name: str, file: str) -> Any:
        return lambda *_: inside.append((name, file))

    hooks = []
    for name, module in model.named_modules():
        file = sys.modules[package if package in FLOAT32_KERNELS else type(module).__module__].__file__ or ""
        file = file.removesuffix("__init__.py")
        hooks += [
            module.register_forward_pre_hook(enter(name, file)),
            module.register_forward_hook(lambda *_: inside.pop() and None),
        ]
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield paths
    finally:
        sys.setprofile(before)
        for hook in hooks:
            hook.remove()


def _inexact(name: str, found: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {architecture} has a {how} error of {layer[how]:.1e}, above {limit:.0e}"
        for architecture, layer in found.get("layers", {}).items()
        for how in ("float32", "float64")
        if (limit := tolerance("reconstruction", getattr(torch, how))) < (layer.get(how) or 0)
    ]


def _changed(stored: Any, fresh: Any, path: str = "") -> list[str]:
    """Return messages on the differences of two entries, each with its path of keys."""
    if isinstance(stored, dict) and isinstance(fresh, dict):
        keys = [*stored, *(key for key in fresh if key not in stored)]
        return [line for key in keys for line in _changed(stored.get(key), fresh.get(key), f"{path} {key}".strip())]
    if isinstance(stored, float) and isinstance(fresh, float):
        # Errors below one unit of rounding count as equal.
        floor = torch.finfo(getattr(torch, path.rsplit(" ", 1)[-1])).eps
        low, high = sorted((max(stored, floor), max(fresh, floor)))
        return [] if high <= FACTOR * low else [f"{path} was {stored:.1e}, is {fresh:.1e}"]
    return [] if stored == fresh else [f"{path} was {stored}, is {fresh}"]


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
