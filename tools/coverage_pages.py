"""The generated parts of README and docs: families, architectures and their runs, methods and their options."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import hybrids, sweep_pages
from tools.families import FAMILIES, GROUPS
from tools.markers import MissingSectionError, markers, replace_section, table
from tools.typeset import typeset
from unilinattn.operator.scopes import SCOPES
from unilinattn.options.described import option_texts
from unilinattn.registry import Architecture, Method, list_architectures, list_methods
from unilinattn.testing.hosts import Host

Record = Mapping[str, Mapping[str, Any]]
"""Runs by environment, in the format of `docs/coverage.json`."""

README, COVERAGE, METHODS = Path("README.md"), Path("docs/coverage.md"), Path("docs/methods")
ARCHITECTURES, HYBRIDS = Path("docs/architectures.md"), Path("docs/hybrids.md")
LOGIT, WHICH = METHODS / "logit.md", METHODS / "index.md"
DTYPES = ("float32", "float64", "bfloat16")
FEW = 3
"""Number of host classes named in a row of the short table."""

_HEAD = r"""# Coverage

The worst reconstruction error $\lVert \mathrm{op}(x) - y \rVert / \lVert y \rVert$ of each adapter, over
configurations of the real host classes with small random weights. Columns:

- *float64*: every float32 computation of the host is promoted to float64.
- *bfloat16*: the operator computes in float32 from the host's rounded weights and inputs, so the error is the rounding
  of the host.
- *scopes*: the scopes that every configuration supports.
- *padding*: the sides on which the host keeps padding out of real tokens, in the newest version.
- *since*: the oldest version of the package with which the row was measured.

[Configurations](#configurations) lists the functions that computed the layers of each adapter, besides `forward`, and
the classes that were measured only with newer versions.

Packages of Triton kernels run only in float32; in float64 the tests compare their adapters with the recurrence of each
paper.

`python -m tools.coverage` writes this page from [coverage.json](coverage.json), the record of the runs; `--check`
reports whether it is stale.
"""


def pages(root: Path, record: Record, tables: Mapping[str, Sequence[Host]]) -> tuple[dict[Path, str], list[str]]:
    """Return the text of each generated file, and messages on files that cannot be written."""
    newest = [(name, record[name]["runs"]) for name in sorted(record, key=_release, reverse=True)]
    texts = {COVERAGE: _coverage(record, tables, sweep_pages.read_record(root)), HYBRIDS: hybrids.page(newest)}
    homeless = sorted(set(package_architectures()) - {name for family in FAMILIES for name in family.adapters})
    problems = [f"tools/families.py has no family for the architecture {name!r}" for name in homeless]
    ungrouped = sorted(set(package_methods()) - {name for group in GROUPS for name in group.methods})
    problems += [f"tools/families.py has no group for the method {name!r}" for name in ungrouped]
    sections = {
        README: {"families": _families_table(record), "methods": _groups_table(f"{METHODS}/")},
        WHICH: {"groups": _groups_table(""), "methods": _methods_table(root)},
        ARCHITECTURES: {"architectures": _architectures_table(record)},
        **{METHODS / f"{name}.md": {"options": _options_table(method)} for name, method in package_methods().items()},
    }
    sections[LOGIT]["gaps"] = _gaps_table(record)
    for path, bodies in sections.items():
        if not (root / path).is_file():
            marks = ", ".join(" and ".join(markers(name)) for name in bodies)
            problems.append(f"{path} is missing: write it, with the markers of its sections: {marks}")
            continue
        text = (root / path).read_text()
        for name, body in bodies.items():
            try:
                text = replace_section(text, name, body)
            except MissingSectionError as error:
                problems.append(f"{path}: {error}")
        texts[path] = text
    return texts, problems


def write(root: Path, record: Record, tables: Mapping[str, Sequence[Host]]) -> list[str]:
    """Write every generated file; return messages on files that cannot be written."""
    texts, problems = pages(root, record, tables)
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return problems


def stale(root: Path, record: Record, tables: Mapping[str, Sequence[Host]]) -> list[str]:
    """Return the differences between the files and their generated text, as unified diffs."""
    texts, problems = pages(root, record, tables)
    for path, text in texts.items():
        now = (root / path).read_text() if (root / path).is_file() else ""
        lines = difflib.unified_diff(now.splitlines(), text.splitlines(), str(path), f"{path} (generated)", n=0)
        if changed := "\n".join(line.rstrip("\n") for line in lines):
            problems.append(changed)
    return problems


def package_architectures() -> dict[str, Architecture]:
    """Return the architectures that this package registers, without plugins."""
    return {name: a for name, a in list_architectures().items() if a.build.__module__.startswith("unilinattn.")}


def package_methods() -> dict[str, Method]:
    """Return the methods that this package registers, without plugins."""
    return {name: m for name, m in list_methods().items() if m.function.__module__.startswith("unilinattn.")}


def _options_table(method: Method) -> str:
    rows = []
    for text in option_texts(method.options):
        accepted = re.sub(r"'[^']*'|None", r"`\g<0>`", text.accepted)
        rows.append((f"`{text.name}`", f"`{text.default}`", accepted, typeset(text.meaning)))
    return table(("option", "default", "accepted", "meaning"), rows)


def _methods_table(root: Path) -> str:
    """Return the methods with the opening paragraphs of their pages."""
    paths = {name: root / METHODS / f"{name}.md" for name in package_methods()}
    texts = {name: path.read_text() for name, path in paths.items() if path.is_file()}
    rows = [(f"[`{name}`]({name}.md)", " ".join(text.split("\n\n")[1].split())) for name, text in texts.items()]
    return table(("method", "scores"), rows)


def _groups_table(folder: str) -> str:
    rows = [(group.question, ", ".join(f"[`{name}`]({folder}{name}.md)" for name in group.methods)) for group in GROUPS]
    return table(("question", "methods"), rows)


def _families_table(record: Record) -> str:
    rows = []
    by_adapter: dict[str, list[_Row]] = {}
    for (architecture, _), row in _rows(record).items():
        by_adapter.setdefault(architecture, []).append(row)
    for family in FAMILIES:
        members = [row for name in family.adapters for row in by_adapter.get(name, [])]
        if members:
            structures = dict.fromkeys(structure for row in members for structure in row.structures)
            worst = max(members, key=lambda row: row.errors.get("float32", 0.0)).error("float32")
            rows.append((family.name, family.models, ", ".join(structures), worst))
    return table(("family", "models", "structure of the operator", "worst error, float32"), rows)


def _gaps_table(record: Record) -> str:
    rows = []
    runs = [run for entry in record.values() for run in _ran(entry).values() if "shares" in run]
    for family in FAMILIES:
        members = [run["shares"] for run in runs if run["architecture"] in family.adapters]
        refused = sum(shares["float32"] is None for shares in members)
        count = f"{len(members)}" if not refused else f"{len(members)}, of which {refused} refused"
        rows.append((family.name, count, *(_worst_gap(members, how) for how in ("float32", "float64"))))
    return table(("family of the configuration", "configurations", "worst gap, float32", "worst gap, float64"), rows)


def _worst_gap(members: Sequence[Mapping[str, float | None]], how: str) -> str:
    gaps = [gap for shares in members if (gap := shares.get(how)) is not None]
    return f"{max(gaps):.0e}" if gaps else "not run"


def _architectures_table(record: Record) -> str:
    rows = []
    for (architecture, package), row in _rows(record).items():
        classes = [*list(row.hosts)[:FEW], *([f"{len(row.hosts) - FEW} more"] if len(row.hosts) > FEW else [])]
        errors = (row.error("float32"), row.error("float64"))
        kinds, structures = ", ".join(row.kinds), ", ".join(row.structures)
        since = row.oldest if not row.later else f"{row.oldest} ({sum(map(len, row.later.values()))} later)"
        rows.append((architecture, kinds, structures, *errors, f"{package}: {', '.join(classes)}", since))
    heads = ("architecture", "mixes tokens by", "structure", "float32 error", "float64 error", "hosts", "since")
    return table(heads, rows)


def _coverage(record: Record, tables: Mapping[str, Sequence[Host]], sweep: Mapping[str, Any] | None) -> str:
    rows, details = [], []
    adapter_rows = _rows(record)
    for (architecture, package), row in adapter_rows.items():
        rows.append(
            (
                architecture,
                ", ".join(row.kinds),
                ", ".join(row.structures),
                ", ".join(row.hosts),
                ", ".join(row.scopes),
                *map(row.error, DTYPES),
                row.padding,
                row.oldest,
            )
        )
        ways = ", ".join(f"`{name}`" for name in row.paths) or "`forward`"
        later = "".join(f" Only since {version}: {', '.join(hosts)}." for version, hosts in row.later.items())
        details.append(f"- **{architecture}** ({package}), by {ways}: {'; '.join(row.configurations)}.{later}")
    heads = ("architecture", "mixes tokens by", "structure", "host classes", "scopes", *DTYPES)
    page = [_HEAD, table((*heads, "padding", "since"), rows), ""]
    never = [name for name in package_architectures() if name not in {architecture for architecture, _ in adapter_rows}]
    ran = {name for entry in record.values() for name in entry["runs"] if "layers" in entry["runs"][name]}
    unrun = {
        family: [host.name for host in hosts if f"{family}/{host.name}" not in ran] for family, hosts in tables.items()
    }
    if never:
        page += [f"Registered adapters without a recorded run: {', '.join(never)}.", ""]
    if any(unrun.values()):
        lines = [f"- {family}: {'; '.join(names)}." for family, names in unrun.items() if names]
        page += ["Configurations without a recorded run:", "", *lines, ""]
    begin, end = markers(sweep_pages.SECTION)
    swept = sweep_pages.section(sweep) if sweep else "No sweep is recorded."
    page += ["## Auto classes of transformers", "", begin, "", swept, "", end, ""]
    page += ["## Configurations", "", "In parentheses: batch x length.", "", *details, "", "## Environments", ""]
    for environment, entry in sorted(record.items()):
        machine = entry["machine"]
        page.append(
            f"- **{environment}**: {len(_ran(entry))} configurations, torch {machine['torch']}, "
            f"Python {machine['python']}, {machine['machine']}."
        )
    page += [line for environment, entry in sorted(record.items()) for line in _left_out(environment, entry)]
    return "\n".join([*page, ""])


def _ran(entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: run for name, run in entry["runs"].items() if "left_out" not in run}


def _left_out(environment: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the lines on the configurations that a version cannot trace, by reason; none if there are none."""
    reasons: dict[str, list[str]] = {}
    for name, run in entry["runs"].items():
        if "left_out" in run:
            reasons.setdefault(run["left_out"], []).append(name.partition("/")[2])
    if not reasons:
        return []
    return ["", f"### Left out with {environment}", "", *(f"- {'; '.join(n)}: {why}." for why, n in reasons.items())]


@dataclass
class _Row:
    """The combined results of all runs of one adapter on hosts of one package, in order, without repetition."""

    hosts: dict[str, None] = field(default_factory=dict)
    kinds: dict[str, None] = field(default_factory=dict)
    structures: dict[str, None] = field(default_factory=dict)
    paths: dict[str, None] = field(default_factory=dict)
    configurations: dict[str, None] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    scopes: list[str] = field(default_factory=lambda: list(SCOPES))
    errors: dict[str, float] = field(default_factory=dict)
    sides: list[Sequence[str] | None] = field(default_factory=list)

    def add(self, version: str, name: str, run: Mapping[str, Any], layer: Mapping[str, Any], *, primary: bool) -> None:
        """Add one configuration, newest versions first; `primary`: whether its padding counts for this row."""
        for column, entries in (
            (self.hosts, layer["hosts"]),
            (self.kinds, layer["kind"]),
            (self.structures, layer["structure"]),
            (self.paths, layer["path"]),
            (self.configurations, [f"{name.partition('/')[2]} ({run['batch']} x {run['length']})"]),
        ):
            column.update(dict.fromkeys(entries))
        self.versions.update(dict.fromkeys(layer["hosts"], version))
        self.scopes = [scope for scope in self.scopes if scope in layer["scopes"]]
        for how in DTYPES:
            if layer.get(how) is not None:
                self.errors[how] = max(self.errors.get(how, 0.0), layer[how])
        if primary:
            self.sides.append(run["padding"])

    @property
    def oldest(self) -> str:
        """The oldest version with which a class of the row was run."""
        return min(self.versions.values(), key=_release)

    @property
    def later(self) -> dict[str, list[str]]:
        """The classes that were run only with newer versions, by the oldest of these."""
        classes: dict[str, list[str]] = {}
        for host, version in self.versions.items():
            if version != self.oldest:
                classes.setdefault(version, []).append(host)
        return classes

    def error(self, how: str) -> str:
        """Return the worst error of a dtype, to one digit."""
        return f"{self.errors[how]:.0e}" if how in self.errors else "not run"

    @property
    def padding(self) -> str:
        """The sides on which the hosts keep padding out of real tokens."""
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
                primary = run["architecture"] == architecture and newest[package] == version
                row.add(version or "-", name, run, layer, primary=primary)
    return dict(sorted(rows.items()))


def _release(environment: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", environment.rpartition(" ")[2])))
