"""Structure of the package: directions of imports, docstrings, cost of import, public surface."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import jaxtyping
import pytest

from tests import signatures
from unilinattn.errors import nearest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "unilinattn"

SURFACE = "__init__"
GROUND = ("aligned", "errors", "memory", "optional", "progress", "startup")
LAYERS = (
    GROUND,
    ("call", "kernels", "options", "viz"),
    ("mixers", "models", "results"),
    ("operator",),
    ("rules",),
    ("recording",),
    ("registry",),
    ("scans",),
    ("architectures", "host"),
    ("discovery",),
    ("tracing",),
    ("frozen", "reruns"),
    ("scoring",),
    ("methods",),
    ("examples",),
    ("evaluation",),
    ("analysis",),
    (SURFACE,),
    ("cli", "testing"),
    ("__main__",),
)
"""The rooms of the package in rows: a module imports from its own room and from the rows above.

Rooms of one row do not import each other, except those of GROUND.
"""

EXTRAS = {"captum", "fla", "matplotlib", "pandas", "timm", "transformers", "triton", "xarray"}

PUBLIC = (
    "Attribution",
    "Comparison",
    "MixerOperator",
    "UnilinattnError",
    "compare",
    "estimate",
    "evaluate",
    "explain",
    "list_architectures",
    "list_methods",
    "register_architecture",
    "register_method",
    "trace",
)


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The room of a module, from its dotted name."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else SURFACE


def row(name: str) -> int | None:
    return next((index for index, names in enumerate(LAYERS) if name in names), None)


def imported(node: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import below a node, also inside functions."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from ((child.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                base = ".".join([*base, *([module] if module else [])])
                if base != "unilinattn":
                    yield child.lineno, base
                    continue
                for alias in names:
                    submodule = row(alias.name) is not None or (PACKAGE / f"{alias.name}.py").exists()
                    yield child.lineno, f"unilinattn.{alias.name}" if submodule else base
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
                for argument in child.args[:1]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield child.lineno, argument.value
        yield from imported(child, package)


def wrong_imports(module: str, source: str, is_package: bool = False) -> list[str]:
    """Messages on the imports of a module that LAYERS does not allow."""
    importing_room = room(module)
    if row(importing_room) is None:
        return [f"{module}: '{importing_room}' is in no row of LAYERS"]
    parts = module.split(".")
    reports = []
    for line, target in imported(ast.parse(source), parts if is_package else parts[:-1]):
        if target.split(".")[0] != "unilinattn":
            continue
        imported_room = room(target)
        if row(imported_room) is None:
            reports.append(f"{module}:{line} imports {target}, which is in no row of LAYERS")
        elif row(imported_room) > row(importing_room):
            reports.append(f"{module}:{line} imports {target}, which is above it")
        elif (
            row(imported_room) == row(importing_room)
            and imported_room != importing_room
            and importing_room not in GROUND
        ):
            reports.append(f"{module}:{line} imports {target}, which is in the same row")
    return reports


def test_imports_go_down_only() -> None:
    files = [(module_name(path), path.read_text(), path.name == "__init__.py") for path in package_files()]
    reports = [report for file in files for report in wrong_imports(*file)]
    assert not reports, "\n".join(reports)


def test_layers_lists_every_room() -> None:
    present = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert {name for names in LAYERS for name in names} == present


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("unilinattn.errors", "import unilinattn.tracing.trace", "above it"),
        ("unilinattn.mixers.dense", "from unilinattn.operator.operator import MixerOperator", "above it"),
        ("unilinattn.mixers.dense", "from ..operator import MixerOperator", "above it"),
        ("unilinattn.mixers.dense", "from .. import operator", "above it"),
        ("unilinattn.mixers.dense", "from unilinattn import explain", "above it"),
        ("unilinattn.host.inputs", "def f():\n    from unilinattn.architectures import mamba", "in the same row"),
        ("unilinattn.kernels.map.tiled", "from ...mixers.base import CoreMixer", "above it"),
        ("unilinattn.tracing.trace", "def f():\n    from unilinattn.methods import rollout", "above it"),
        ("unilinattn.tracing.trace", "if TYPE_CHECKING:\n    from unilinattn.evaluation import report", "above it"),
        ("unilinattn.tracing.trace", "import importlib\nimportlib.import_module('unilinattn.evaluation')", "above it"),
        ("unilinattn.viz.blocks", "def f():\n    from unilinattn.results import pages", "above it"),
        ("unilinattn.tracing.trace", "import unilinattn.elsewhere", "no row"),
        ("unilinattn.elsewhere", "import torch", "no row"),
    ],
)
def test_an_import_that_goes_up_is_reported(module: str, source: str, message: str) -> None:
    reports = wrong_imports(module, source)
    assert len(reports) == 1
    assert message in reports[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("unilinattn.tracing.trace", "import torch\nfrom unilinattn.operator.operator import MixerOperator"),
        ("unilinattn.tracing.trace", "from ..operator import MixerOperator\nfrom .. import errors"),
        ("unilinattn.results.attribution", "from unilinattn.viz import blocks"),
        ("unilinattn.registry", "from unilinattn.errors import OptionError"),
    ],
)
def test_an_import_that_goes_down_is_not_reported(module: str, source: str) -> None:
    assert wrong_imports(module, source) == []


def undocumented(source: str) -> list[str]:
    """Public classes, functions and methods without a docstring, and the module itself."""

    def exempt(node: ast.AST) -> bool:
        # Overloads and overrides are documented at the function or base method, setters at the property.
        names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        return bool(names & {"overload", "override", "setter", "deleter"})

    def visit(node: ast.AST, path: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child, path)
            elif not child.name.startswith("_") and not exempt(child):
                name = f"{path}{child.name}"
                if not (ast.get_docstring(child) or "").strip():
                    yield name
                if isinstance(child, ast.ClassDef):
                    yield from visit(child, f"{name}.")

    tree = ast.parse(source)
    module = [] if (ast.get_docstring(tree) or "").strip() else ["the module"]
    return [*module, *visit(tree, "")]


def test_everything_public_has_a_docstring() -> None:
    names = {module_name(path): undocumented(path.read_text()) for path in package_files()}
    assert {module: missing for module, missing in names.items() if missing} == {}


def test_a_missing_docstring_is_reported() -> None:
    source = """
import abc
if abc:
    def bare(): pass
class Bare:
    def method(self): pass
    def _private(self): pass
    @property
    def value(self): "Documented."
    @value.setter
    def value(self, new): pass
class Documented:
    "  "
async def later():
    def inner(): pass
class _Private:
    def method(self): pass
"""
    assert undocumented(source) == ["the module", "bare", "Bare", "Bare.method", "Documented", "later"]


def run_python(code: str) -> str:
    """The output of a new interpreter, which runs without the import hook of the tests."""
    # An empty value: bytecode is stored, as by default.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cost_of_import(name: str) -> tuple[float, set[str]]:
    """CPU time of an import after torch's, as a share of torch's, and the top-level modules that it adds to torch's.

    CPU time rather than elapsed time, which depends on the load of the machine.
    """
    # The package imports its parts when a public name is first used.
    use = "unilinattn.explain" if name == "unilinattn" else ""
    code = f"""
import json, sys, time
start = time.process_time()
import torch
torchs, before = time.process_time() - start, set(sys.modules)
import {name}
{use}
share = (time.process_time() - start - torchs) / torchs
print(json.dumps([share, sorted({{module.partition(".")[0] for module in set(sys.modules) - before}})]))
"""
    share, loaded = json.loads(run_python(code))
    return share, set(loaded)


def test_the_import_is_quick_and_loads_no_extra() -> None:
    # The first one may have to compile the package.
    share, loaded = cost_of_import("unilinattn")
    assert not loaded & EXTRAS
    assert "unilinattn" in loaded
    assert share < 0.5 or min(cost_of_import("unilinattn")[0] for _ in range(2)) < 0.5


@pytest.mark.slow
def test_a_loaded_extra_is_detected() -> None:
    assert cost_of_import("matplotlib")[1] & EXTRAS == {"matplotlib"}


def test_the_public_surface() -> None:
    import unilinattn

    assert set(PUBLIC) <= set(unilinattn.__all__)
    assert [name for name in unilinattn.__all__ if not hasattr(unilinattn, name)] == []
    assert sorted(name for names in unilinattn._HOMES.values() for name in names) == [
        name for name in unilinattn.__all__ if name not in ("analysis", "methods")
    ]
    for home, names in unilinattn._HOMES.items():
        module = importlib.import_module(f"unilinattn.{home}")
        assert [name for name in names if getattr(module, name) is not getattr(unilinattn, name)] == []
    assert dir(unilinattn) == unilinattn.__all__ == sorted(unilinattn.__all__)
    assert not hasattr(unilinattn, "explian") and not hasattr(unilinattn, "_explain")
    assert [name for name in PUBLIC if not (getattr(unilinattn, name).__doc__ or "").strip()] == []


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import each other, directly or indirectly."""
    reach = {module: set(targets) for module, targets in graph.items()}
    for through in graph:
        for targets in reach.values():
            if through in targets:
                targets |= reach[through]
    circles = ({other for other in targets if module in reach[other]} for module, targets in reach.items())
    return sorted({frozenset(circle) for circle in circles if circle}, key=sorted)


def test_no_modules_import_each_other() -> None:
    names = {module_name(path): path for path in package_files()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        parts = name.split(".")
        graph[name] = imported_modules(path, parts if path.name == "__init__.py" else parts[:-1], names) - {name}
    assert cycles(graph) == []


def imported_modules(path: Path, package: list[str], names: Mapping[str, Path]) -> set[str]:
    """The modules of the package that a file imports, including those of `from package import module`."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            base = base if node.level else node.module or ""
            modules |= ({f"{base}.{alias.name}" for alias in node.names} & names.keys()) or {base}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules & names.keys()


def test_modules_that_import_each_other_are_detected() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": {"e"}}
    assert cycles(graph) == [{"b", "c"}, {"e"}]


def test_methods_and_architectures_are_modules() -> None:
    import unilinattn

    assert {type(unilinattn.methods), type(unilinattn.architectures)} == {type(sys)}


def test_the_surface_and_the_root_are_small() -> None:
    assert len((PACKAGE / "__init__.py").read_text().splitlines()) < 100
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= 10


@pytest.mark.slow
def test_public_names_survive_the_import_of_every_module() -> None:
    # The first import of a submodule binds its name on the package, where it could replace a public name.
    modules = [module_name(path) for path in package_files() if path.stem != "__main__"]
    for order in (modules, modules[::-1]):
        code = f"""
import importlib
for module in {order!r}:
    importlib.import_module(module)
import unilinattn
print(*[name for name in {PUBLIC!r} if not callable(getattr(unilinattn, name, None))])
"""
        assert run_python(code).split() == []


def test_signatures_are_checked_only_in_a_thorough_run(request: pytest.FixtureRequest) -> None:
    thorough = request.config.getoption("--thorough")
    # The next calls are the first of a file, which are checked.
    signatures.next_test(Path("another file"))
    with pytest.raises(jaxtyping.TypeCheckError if thorough else TypeError):
        nearest("rollout", 3)


def test_contributing_citation_and_changelog_agree_with_the_package() -> None:
    import unilinattn

    rooms = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    for (number, cell), names in zip(rooms, LAYERS, strict=False):
        listed = tuple(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", cell)))
        assert listed == (() if names == (SURFACE,) else names), number
    assert len(rooms) == LAYERS.index((SURFACE,)) + 1
    assert f"\nversion: {unilinattn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{unilinattn.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
