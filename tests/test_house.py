"""What holds for the whole repository: directions of imports, docstrings, cost of import, sizes, words."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jaxtyping
import pytest

from unilinattn.errors import nearest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "unilinattn"

SURFACE = "__init__"
GROUND = ("errors", "memory", "optional", "progress", "startup")
LAYERS = (
    GROUND,
    ("call", "kernels", "viz"),
    ("mixers", "models", "results"),
    ("operator",),
    ("registry",),
    ("architectures", "tracing"),
    ("methods",),
    ("examples",),
    ("evaluation",),
    (SURFACE,),
    ("cli", "testing"),
    ("__main__",),
)
"""The rooms of the package from the ground up: a module imports from its own room and from the rows before it.

Rooms of one row stand side by side and do not know each other; those of the ground do.
"""

EXTRAS = {"captum", "fla", "matplotlib", "pandas", "timm", "transformers", "triton", "xarray"}

PUBLIC = (
    "Attribution",
    "Comparison",
    "MixerOperator",
    "UnilinattnError",
    "compare",
    "estimate",
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
    """The part of a dotted name that LAYERS lists."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else SURFACE


def row(name: str) -> int | None:
    return next((index for index, names in enumerate(LAYERS) if name in names), None)


def imported(node: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Every import below a node, inside functions too: its line and the dotted name."""
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
    """What breaks the directions in one module's text, as readable lines."""
    here = room(module)
    if row(here) is None:
        return [f"{module}: '{here}' stands in no row of LAYERS"]
    parts = module.split(".")
    found = []
    for line, target in imported(ast.parse(source), parts if is_package else parts[:-1]):
        if target.split(".")[0] != "unilinattn":
            continue
        there = room(target)
        if row(there) is None:
            found.append(f"{module}:{line} imports {target}, which stands in no row of LAYERS")
        elif row(there) > row(here):
            found.append(f"{module}:{line} imports {target}, which stands above it")
        elif row(there) == row(here) and there != here and here not in GROUND:
            found.append(f"{module}:{line} imports {target}, which stands beside it")
    return found


@pytest.mark.parametrize("path", package_files(), ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    reports = wrong_imports(module_name(path), path.read_text(), path.name == "__init__.py")
    assert not reports, "\n".join(reports)


def test_every_row_names_modules_that_exist() -> None:
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
        ("unilinattn.tracing.trace", "def f():\n    from unilinattn.architectures import mamba", "beside it"),
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
        # An overload or an override has its description at what it stands for; a setter at its property.
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


@pytest.mark.parametrize("path", package_files(), ids=module_name)
def test_everything_public_has_a_docstring(path: Path) -> None:
    assert undocumented(path.read_text()) == []


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
    """The output of a fresh interpreter, without this run's import hook."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cost_of_import(name: str) -> tuple[float, set[str]]:
    """CPU seconds that an import takes after torch's, and the top-level modules that it loads beside torch's.

    Processor time, since the wall clock also counts whatever else the machine does.
    """
    code = f"""
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import {name}
seconds = time.process_time() - start
print(json.dumps([seconds, sorted({{module.partition(".")[0] for module in set(sys.modules) - before}})]))
"""
    seconds, loaded = json.loads(run_python(code))
    return seconds, set(loaded)


def test_the_import_is_quick_and_loads_no_extra() -> None:
    # The fastest of three: whatever else the machine does can only add to a run.
    runs = [cost_of_import("unilinattn") for _ in range(3)]
    assert not runs[0][1] & EXTRAS
    assert "unilinattn" in runs[0][1]
    assert min(seconds for seconds, _ in runs) < 0.5


def test_an_extra_that_is_loaded_is_seen() -> None:
    assert cost_of_import("matplotlib")[1] & EXTRAS == {"matplotlib"}


def test_the_public_surface() -> None:
    import unilinattn

    assert set(PUBLIC) <= set(unilinattn.__all__)
    assert [name for name in unilinattn.__all__ if not hasattr(unilinattn, name)] == []
    assert [name for name in PUBLIC if not (getattr(unilinattn, name).__doc__ or "").strip()] == []


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import each other, directly or through others."""
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
    """The modules of the package that a file imports, those named in `from package import module` among them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            base = base if node.level else node.module or ""
            found |= ({f"{base}.{alias.name}" for alias in node.names} & names.keys()) or {base}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & names.keys()


def test_modules_that_import_each_other_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": {"e"}}
    assert cycles(graph) == [{"b", "c"}, {"e"}]


def test_rooms_are_modules_of_the_surface() -> None:
    import unilinattn

    assert {type(unilinattn.methods), type(unilinattn.architectures)} == {type(sys)}


def test_the_root_is_small() -> None:
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= 10


def test_public_names_survive_the_import_of_every_module() -> None:
    # The first import of a module rebinds its name on the package.
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


def test_the_surface_is_short_and_no_module_is_long() -> None:
    def lines(path: Path) -> int:
        return len(path.read_text().splitlines())

    assert lines(PACKAGE / "__init__.py") < 100
    paths = [path for path in repository_files() if path.suffix == ".py"]
    most = {path: 400 if PACKAGE in path.parents else 500 for path in paths}
    assert {str(path.relative_to(ROOT)): lines(path) for path in paths if lines(path) > most[path]} == {}


OUTSIDE = {"build", "dist", "site", "unilinattn-report"}


def repository_files() -> list[Path]:
    """Every file of the repository but what tools generate."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        hidden_but_ours = {".ci", ".github"}
        folders[:] = [
            name
            for name in folders
            if name not in OUTSIDE | {"__pycache__"}
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name in hidden_but_ours)
        ]
        found += [Path(folder, name) for name in names]
    return sorted(found)


FORBIDDEN = [
    r"(?<![\w.])/(?:work|root|farm|home/\w+|Users/\w+)/",
    r"(?i)\bissues?[ -]?(?:#|no\.? ?|number )?\d+\b",
    r"(?i)\b(?:helper|coding|sub)[ -]?agents?\b",
    r"(?i)\b(?:extra-)?index[-]url\b|\bfind[-]links\b",
    r"(?i)\bdesign[ /-]?0\d\b|\bshared/(?:design|papers)\b",
]
"""Words of the place where the code is written, not of the product."""


def forbidden_words(text: str) -> list[str]:
    return [match.group() for pattern in FORBIDDEN for match in re.finditer(pattern, text)]


def test_the_text_speaks_of_the_product_alone() -> None:
    texts = {path: path.read_bytes().decode(errors="replace") for path in repository_files()}
    found = {str(path.relative_to(ROOT)): forbidden_words(text) for path, text in texts.items()}
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize(
    "words",
    [
        ("see /", "work/notes"),
        ("/", "root/x"),
        ("'/ho", "me/someone/x'"),
        ("fixes iss", "ue #12"),
        ("as iss", "ue 2 asks"),
        ("a helper ", "agent wrote"),
        ("--extra-index", "-url"),
        ("see design ", "06"),
    ],
)
def test_a_word_that_does_not_belong_is_reported(words: tuple[str, str]) -> None:
    assert len(forbidden_words("".join(words))) == 1


def test_signatures_are_checked_in_a_thorough_run_alone(request: pytest.FixtureRequest) -> None:
    thorough = request.config.getoption("--thorough")
    with pytest.raises(jaxtyping.TypeCheckError if thorough else TypeError):
        nearest("rollout", 3)


def test_a_built_wheel_holds_the_whole_package_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {str(path.relative_to(ROOT)) for path in repository_files() if path.is_relative_to(PACKAGE)}
    assert names == ours
    assert "unilinattn/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"unilinattn"}


def test_the_pages_at_the_root_agree_with_the_package() -> None:
    import unilinattn

    rooms = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    for (number, cell), names in zip(rooms, LAYERS, strict=False):
        listed = tuple(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", cell)))
        assert listed == (() if names == (SURFACE,) else names), number
    assert len(rooms) == LAYERS.index((SURFACE,)) + 1
    assert f"\nversion: {unilinattn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{unilinattn.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
