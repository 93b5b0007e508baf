"""`python -m unilinattn.testing.coverage [--check]`: run every tiny host, and keep the tables of the docs true.

Each configuration of each table of hosts is run and measured. The record of all runs is `docs/coverage.json`; the pages
are written from it. A host whose package is not installed is not run: its record stays as the last run left it; one
that the installed version cannot trace is recorded with the reason.
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
from unilinattn import testing
from unilinattn.architectures.call import package_version
from unilinattn.errors import InputError, OptionError, UncoveredError, UnilinattnError, nearest
from unilinattn.evaluation.side_by_side import quiet_hosts
from unilinattn.operator import MixerOperator
from unilinattn.recorder import host_arguments
from unilinattn.scopes import SCOPES
from unilinattn.stages import Mix, walk
from unilinattn.testing import coverage_pages
from unilinattn.testing.hosts import Host
from unilinattn.testing.hybrids import listed
from unilinattn.testing.promote import promoted
from unilinattn.testing.tolerances import relative_error, tolerance
from unilinattn.testing.versions import Unavailable, model_of, trace_of
from unilinattn.trace import Layer, Trace, trace

RECORD = Path("docs/coverage.json")
"""Where the record of runs lies, below the root of the repository."""

FACTOR = 10.0
"""How far apart an error may be in two runs of a configuration: it measures rounding, which depends on the machine."""

FLOAT32_KERNELS = ("fla",)
"""Packages whose kernels compute in float32 whatever they are given: another dtype would show nothing new of them."""

_WAYS = re.compile(r"(_forward|_rule|_scan|_attention|_attention_cpu|_autograd|_sequence_native|conv1d_fn)$")
"""Functions of a host's own file that tell by which of its ways it computed a layer."""

_KERNELS = re.compile(r"^(chunk|fused|parallel|naive|recurrent)_(?!.*_(fwd|bwd))")
"""The same for packages of kernels, whose functions stand in files of their own."""

Runs = dict[str, dict[str, Any]]
"""What was measured, by "table/name" of a configuration."""


def tables() -> dict[str, tuple[Host, ...]]:
    """Return every table of hosts in `unilinattn.testing`, by the name of its module."""
    names = sorted(found.name for found in pkgutil.iter_modules(testing.__path__))
    modules = [importlib.import_module(f"{testing.__name__}.{name}") for name in names if _is_table(name)]
    return {module.__name__.rsplit(".", 1)[1]: module.HOSTS for module in modules}


def measure(host: Host) -> dict[str, Any] | None:
    """Run one configuration and return what was found, None if its package is not installed.

    Errors are reconstruction errors, the worst over the layers of each adapter. Where the installed version cannot be
    traced, what is found is why.
    """
    try:
        model = model_of(host)
        with _watching(model) as paths:
            found = trace_of(host, model)
    except Unavailable as reason:
        return {"environment": reason.environment, "left_out": str(reason)}
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("unilinattn"):
            raise
        return None
    inputs = host.inputs()
    package = type(model).__module__.split(".")[0]
    layers = {name: _described(group, paths) for name, group in _by_architecture(found).items()}
    runs, reference, limit = {"float32": found}, found, tolerance("padding", torch.float32)
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
    """Measure tables of hosts; return what was found, and what went wrong, in words."""
    runs: Runs = {}
    problems: list[str] = []
    hosts = [(table, host) for table, entries in chosen.items() for host in entries]
    quiet = quiet_hosts() if find_spec("transformers") else nullcontext()
    with warnings.catch_warnings(), quiet:
        warnings.simplefilter("ignore")
        for table, host in tqdm(hosts, disable=None, leave=False, unit="host"):
            try:
                found = measure(host)
            except Exception as error:
                first = str(error).strip().split("\n", 1)[0]
                problems.append(f"{host.name} ({table}) failed with {type(error).__name__}: {first}")
                continue
            if found is not None:
                runs[f"{table}/{host.name}"] = {"table": table, **found}
                problems += _inexact(host.name, found)
    return runs, problems


def differences(stored: Runs, fresh: Runs, *, run_tables: Iterable[str], known: Iterable[str]) -> list[str]:
    """Tell in words how a record differs from fresh runs: everything exactly, errors within `FACTOR`.

    `run_tables` are the tables that were run; `known` are the names of all configurations there are.
    """
    found = []
    known, run_tables = set(known), set(run_tables)
    for name, entry in stored.items():
        if name not in known and entry["table"] in run_tables:
            found.append(f"{name}: is recorded, and no table of hosts has it any more")
    for name, entry in fresh.items():
        if name not in stored:
            found.append(f"{name}: was never recorded")
        else:
            found += [f"{name}: {line}" for line in _changed(stored[name], entry)]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if something is stale (with `--check`), inexact or failed."""
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
        print("\nBring the tables up to date: python -m unilinattn.testing.coverage")
    print(f"{len(fresh)} configurations ran, {len(problems)} problems.")
    return 1 if problems else 0


class _Record:
    """The record of runs: for each environment the machine, and what each configuration showed there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}

    def differences(self, fresh: Runs, chosen: Iterable[str], known: Iterable[str]) -> list[str]:
        found = []
        for environment, runs in _by_environment(fresh).items():
            if environment not in self.content:
                found.append(f"{environment}: no run with it is recorded")
                continue
            stored = self.content[environment]["runs"]
            lines = differences(stored, runs, run_tables=chosen, known=known)
            found += [f"{environment}: {line}" for line in lines]
        return found

    def update(self, fresh: Runs, chosen: Iterable[str], known: Sequence[str]) -> None:
        chosen, order = set(chosen), {name: place for place, name in enumerate(known)}
        for environment, runs in _by_environment(fresh).items():
            entry = self.content.setdefault(environment, {"runs": {}})
            entry["machine"] = _machine()
            entry["runs"].update(runs)
        for entry in self.content.values():
            kept = [name for name, found in entry["runs"].items() if name in order or found["table"] not in chosen]
            kept.sort(key=lambda name: order.get(name, len(order)))
            entry["runs"] = {name: entry["runs"][name] for name in kept}
        self.content = {name: entry for name, entry in self.content.items() if entry["runs"]}

    def save(self) -> None:
        blocks = []
        for environment, entry in sorted(self.content.items()):
            runs = ",\n".join(f"    {json.dumps(n)}: {json.dumps(found)}" for n, found in entry["runs"].items())
            machine = json.dumps(entry["machine"])
            blocks.append(f'{json.dumps(environment)}: {{\n  "machine": {machine},\n  "runs": {{\n{runs}\n  }}\n}}')
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m unilinattn.testing.coverage",
        description="Run every tiny host and write the tables of the documentation from what was found.",
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table or page is stale")
    parser.add_argument(
        "--tables", nargs="+", metavar="TABLE", help="run these tables of hosts only, such as hosts_fla"
    )
    root = Path(unilinattn.__file__).parents[1]
    parser.add_argument("--root", type=Path, default=root, help="the repository (default: where the package lies)")
    return parser


def _is_table(name: str) -> bool:
    return name == "hosts" or name.startswith("hosts_")


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
        "hosts": sorted({type(layer._module).__qualname__ for layer in layers}),
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
    """Return the worst error, None where a layer cannot be expressed."""
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
    """Whether a host by itself runs in its dtype; some mix dtypes inside and stop."""
    try:
        model(**host_arguments(model, inputs))
    except RuntimeError:
        return False
    return True


def _sides(model: nn.Module, ids: Tensor, alone: Trace, limit: float) -> list[str] | None:
    """Return on which sides the host keeps padding out of real tokens, None if it takes no mask."""
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
    """Note, for every module of a model, which functions of its own file, or kernels, run inside its forward."""
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
    """Tell where two entries differ, by the path of keys that leads there."""
    if isinstance(stored, dict) and isinstance(fresh, dict):
        keys = [*stored, *(key for key in fresh if key not in stored)]
        return [line for key in keys for line in _changed(stored.get(key), fresh.get(key), f"{path} {key}".strip())]
    if isinstance(stored, float) and isinstance(fresh, float):
        # Below one unit of rounding all errors are the same.
        floor = torch.finfo(getattr(torch, path.rsplit(" ", 1)[-1])).eps
        low, high = sorted((max(stored, floor), max(fresh, floor)))
        return [] if high <= FACTOR * low else [f"{path} was {stored:.1e}, is {fresh:.1e}"]
    return [] if stored == fresh else [f"{path} was {stored}, is {fresh}"]


def _machine() -> dict[str, str]:
    """Describe what ran: enough to repeat it, nothing that names a place."""
    interpreted = ", Triton's interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    return {
        "machine": f"{platform.system()} {platform.machine()}, CPU{interpreted}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
