"""The generated parts of README and docs: what was run, the methods, and each method's options."""

import collections.abc
import difflib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from unilinattn.methods import options as option_models
from unilinattn.methods.options import Options
from unilinattn.registry import Architecture, Method, architectures, methods
from unilinattn.scopes import SCOPES
from unilinattn.testing import hybrids
from unilinattn.testing.hosts import Host

Record = Mapping[str, Mapping[str, Any]]
"""Runs by environment, as `coverage` keeps them."""

README, COVERAGE, METHODS = Path("README.md"), Path("docs/coverage.md"), Path("docs/methods")
HYBRIDS = Path("docs/hybrids.md")
DTYPES = ("float32", "float64", "bfloat16")
FEW = 3
"""Host classes that a row of the short table names."""

_HEAD = """\
# Coverage

Every row was run, on real classes with small random weights: the worst reconstruction error
||op(x) - y|| / ||y|| over the configurations and layers listed, against what the host itself computed. `float64` is
against the host with every float32 that it forces turned into float64. In `bfloat16` the operator computes in float32
from the host's rounded weights and inputs, so what is left is the rounding of the host. A scope stands where every
configuration supports it; *padding* is the side on which the host itself keeps padding out of real tokens, in the
newest version; *way* names the functions that computed the layer, beside its own `forward`; *since* is the oldest
version of its package with which the row was run, and which classes were run with a newer one alone. Packages of Triton
kernels run in float32 alone; in float64 the tests compare their adapters with the recurrence of each paper.

This page is written by `python -m unilinattn.testing.coverage` from [coverage.json](coverage.json), the record of the
runs; `--check` tells whether it is stale.
"""


def pages(root: Path, record: Record, tables: Mapping[str, Sequence[Host]]) -> tuple[dict[Path, str], list[str]]:
    """Return the text that each file should have, and what keeps a file from being written, in words."""
    newest = [(name, record[name]["runs"]) for name in sorted(record, key=_release, reverse=True)]
    texts = {COVERAGE: _coverage(record, tables), HYBRIDS: hybrids.page(newest)}
    problems: list[str] = []
    readme = {"coverage": _short_table(record), "methods": _methods_table()}
    sections = {README: readme} | {
        METHODS / f"{name}.md": {"options": _options_table(options_of(name))} for name in own_methods()
    }
    for path, parts in sections.items():
        if not (root / path).is_file():
            problems.append(
                f"{path} is missing: write it, with the marks of its parts: {', '.join(map(_marks, parts))}"
            )
            continue
        text = (root / path).read_text()
        for name, table in parts.items():
            begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
            before, found, rest = text.partition(begin)
            _, closed, after = rest.partition(end)
            if not (found and closed):
                problems.append(f"{path} has no place for the {name}: put {_marks(name)} where they shall stand")
                continue
            text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
        texts[path] = text
    return texts, problems


def write(root: Path, record: Record, tables: Mapping[str, Sequence[Host]]) -> list[str]:
    """Write every file; return what could not be written, in words."""
    texts, problems = pages(root, record, tables)
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return problems


def stale(root: Path, record: Record, tables: Mapping[str, Sequence[Host]]) -> list[str]:
    """Return the differences between the files and what they should hold."""
    texts, problems = pages(root, record, tables)
    for path, text in texts.items():
        now = (root / path).read_text() if (root / path).is_file() else ""
        lines = difflib.unified_diff(now.splitlines(), text.splitlines(), str(path), f"{path} as it should be", n=0)
        if changed := "\n".join(line.rstrip("\n") for line in lines):
            problems.append(changed)
    return problems


def own_architectures() -> dict[str, Architecture]:
    """Return the architectures that this package registers itself."""
    return {name: a for name, a in architectures().items() if a.build.__module__.startswith("unilinattn.")}


def own_methods() -> dict[str, Method]:
    """Return the methods that this package registers itself."""
    return {name: m for name, m in methods().items() if m.function.__module__.startswith("unilinattn.")}


def options_of(method: str) -> type[Options]:
    """Return the model of a method's options: `transformer_attribution` has `TransformerAttributionOptions`."""
    model: type[Options] = getattr(option_models, "".join(map(str.capitalize, method.split("_"))) + "Options")
    return model


def accepted(annotation: Any, limits: Iterable[Any] = ()) -> str:
    """Say which values an option accepts, in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [limit for part in parts[1:] for limit in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return accepted(parts[0], [*inner, *limits])
    if origin is Literal:
        return ", ".join(f"`{value!r}`" for value in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(accepted(part, limits) for part in parts)
    if annotation is type(None):
        return "`None`"
    if origin is collections.abc.Callable:
        return "a function"
    if origin is collections.abc.Sequence:
        return f"a list of {accepted(parts[0])}"
    if origin is tuple:
        return f"a pair of {accepted(parts[0])}"
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(limit, name)}" for limit in limits for name, sign in signs.items() if hasattr(limit, name)
    ]
    return " ".join([annotation.__name__, ", ".join(bounds)]).strip()


def _options_table(model: type[Options]) -> str:
    rows = [
        (f"`{name}`", f"`{info.default!r}`", accepted(info.annotation, info.metadata), info.description or "")
        for name, info in model.model_fields.items()
    ]
    return _table(("option", "default", "accepted", "meaning"), rows)


def _methods_table() -> str:
    rows = [(f"[`{name}`]({METHODS}/{name}.md)", method.summary) for name, method in own_methods().items()]
    return _table(("method", "what it computes"), rows)


def _short_table(record: Record) -> str:
    rows = []
    for (architecture, package), found in _rows(record).items():
        classes = [*list(found.hosts)[:FEW], *([f"{len(found.hosts) - FEW} more"] if len(found.hosts) > FEW else [])]
        errors = (found.error("float32"), found.error("float64"))
        kinds, structures = ", ".join(found.kinds), ", ".join(found.structures)
        since = found.oldest if not found.later else f"{found.oldest} ({sum(map(len, found.later.values()))} later)"
        rows.append((architecture, kinds, structures, *errors, f"{package}: {', '.join(classes)}", since))
    heads = ("architecture", "mixes tokens by", "structure", "float32 error", "float64 error", "hosts", "since")
    return _table(heads, rows)


def _coverage(record: Record, tables: Mapping[str, Sequence[Host]]) -> str:
    rows, details = [], []
    found_rows = _rows(record)
    for (architecture, package), found in found_rows.items():
        rows.append(
            (
                architecture,
                ", ".join(found.kinds),
                ", ".join(found.structures),
                ", ".join(found.hosts),
                ", ".join(found.scopes),
                *map(found.error, DTYPES),
                found.padding,
                ", ".join(f"`{name}`" for name in found.paths) or "`forward`",
                found.since,
            )
        )
        details.append(f"- **{architecture}** ({package}): {'; '.join(found.configurations)}.")
    heads = ("architecture", "mixes tokens by", "structure", "host classes", "scopes", *DTYPES)
    parts = [_HEAD, _table((*heads, "padding", "way", "since"), rows), ""]
    never = [name for name in own_architectures() if name not in {row[0] for row in found_rows}]
    ran = {name for entry in record.values() for name in entry["runs"] if "layers" in entry["runs"][name]}
    unrun = {
        table: [host.name for host in hosts if f"{table}/{host.name}" not in ran] for table, hosts in tables.items()
    }
    if never:
        parts += [f"Registered, and no run of a host is recorded: {', '.join(never)}.", ""]
    if any(unrun.values()):
        lines = [f"- {table}: {'; '.join(names)}." for table, names in unrun.items() if names]
        parts += ["Configurations without a recorded run:", "", *lines, ""]
    parts += ["## Configurations", "", "Each with batch x length.", "", *details, "", "## Environments", ""]
    for environment, entry in sorted(record.items()):
        machine = entry["machine"]
        parts.append(
            f"- **{environment}**: {len(_ran(entry))} configurations, torch {machine['torch']}, "
            f"Python {machine['python']}, {machine['machine']}."
        )
    parts += [line for environment, entry in sorted(record.items()) for line in _left_out(environment, entry)]
    return "\n".join([*parts, ""])


def _ran(entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: run for name, run in entry["runs"].items() if "left_out" not in run}


def _left_out(environment: str, entry: Mapping[str, Any]) -> list[str]:
    """List what a version could not be traced with, by reason, nothing where there is none."""
    reasons: dict[str, list[str]] = {}
    for name, run in entry["runs"].items():
        if "left_out" in run:
            reasons.setdefault(run["left_out"], []).append(name.partition("/")[2])
    if not reasons:
        return []
    return ["", f"### Left out with {environment}", "", *(f"- {'; '.join(n)}: {why}." for why, n in reasons.items())]


@dataclass
class _Row:
    """What all runs of one adapter on hosts of one package showed together; lists without repetition, in order."""

    hosts: dict[str, None] = field(default_factory=dict)
    kinds: dict[str, None] = field(default_factory=dict)
    structures: dict[str, None] = field(default_factory=dict)
    paths: dict[str, None] = field(default_factory=dict)
    configurations: dict[str, None] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    scopes: list[str] = field(default_factory=lambda: list(SCOPES))
    errors: dict[str, float] = field(default_factory=dict)
    sides: list[Sequence[str] | None] = field(default_factory=list)

    def add(self, version: str, name: str, run: Mapping[str, Any], layer: Mapping[str, Any], *, own: bool) -> None:
        """Take in one configuration, those of older versions later; `own` tells whether its padding is this row's."""
        for known, more in (
            (self.hosts, layer["hosts"]),
            (self.kinds, layer["kind"]),
            (self.structures, layer["structure"]),
            (self.paths, layer["path"]),
            (self.configurations, [f"{name.partition('/')[2]} ({run['batch']} x {run['length']})"]),
        ):
            known.update(dict.fromkeys(more))
        self.versions.update(dict.fromkeys(layer["hosts"], version))
        self.scopes = [scope for scope in self.scopes if scope in layer["scopes"]]
        for how in DTYPES:
            if layer.get(how) is not None:
                self.errors[how] = max(self.errors.get(how, 0.0), layer[how])
        if own:
            self.sides.append(run["padding"])

    @property
    def oldest(self) -> str:
        """The oldest version with which any class of the row was run."""
        return min(self.versions.values(), key=_release)

    @property
    def later(self) -> dict[str, list[str]]:
        """Classes that were run with newer versions alone, by the oldest of these."""
        found: dict[str, list[str]] = {}
        for host, version in self.versions.items():
            if version != self.oldest:
                found.setdefault(version, []).append(host)
        return found

    @property
    def since(self) -> str:
        """Say since which version the row's classes are covered."""
        return "; ".join([self.oldest, *(f"{version}: {', '.join(hosts)}" for version, hosts in self.later.items())])

    def error(self, how: str) -> str:
        """Show the worst error of a dtype."""
        return f"{self.errors[how]:.0e}" if how in self.errors else "not run"

    @property
    def padding(self) -> str:
        """Say on which sides the hosts keep padding out of real tokens."""
        tried = [sides for sides in self.sides if sides is not None]
        if not tried:
            return "no mask" if self.sides else "-"
        counts = {side: sum(side in sides for sides in tried) for side in ("left", "right")}
        shown = [side if n == len(tried) else f"{side} in {n} of {len(tried)}" for side, n in counts.items() if n]
        return ", ".join(shown) or "neither"


def _rows(record: Record) -> dict[tuple[str, str], _Row]:
    rows: dict[tuple[str, str], _Row] = {}
    newest: dict[str, str] = {}
    for environment in sorted(record, key=_release, reverse=True):
        package, _, version = environment.partition(" ")
        newest.setdefault(package, version)
        for name, run in _ran(record[environment]).items():
            for architecture, layer in run["layers"].items():
                row = rows.setdefault((architecture, package), _Row())
                own = run["architecture"] == architecture and newest[package] == version
                row.add(version or "-", name, run, layer, own=own)
    return dict(sorted(rows.items()))


def _release(environment: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", environment.rpartition(" ")[2])))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _marks(name: str) -> str:
    return f"<!-- {name}:begin --> and <!-- {name}:end -->"
