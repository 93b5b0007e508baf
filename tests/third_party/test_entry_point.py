"""A third-party package: the tutorial's adapter in a wheel, loaded through its entry point."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package: modules and metadata."""
    source, site = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("site")
    shutil.copy(Path(__file__).with_name("pyproject.toml"), source)
    for name in ("mingru.py", "mingru_adapter.py"):
        shutil.copy(EXAMPLES / name, source)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(source / "dist")]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def python(code: str, *, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter with an additional folder of installed packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*([site] if site else []), ROOT]))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, cwd=os.path.sep
    )


FOUND_AND_TRACED = """
import torch
import unilinattn as ula
from unilinattn.cli import main

print(ula.list_architectures()["mingru"].summary)

from mingru import MinGRUForCausalLM

trace = ula.trace(MinGRUForCausalLM(vocabulary=31, width=8, blocks=2).eval(), torch.arange(12).reshape(2, 6))
print(*[(layer.name, layer.architecture, layer.operator.reconstruction_error() < 1e-5) for layer in trace.layers])
main(["list"])
"""


def test_an_installed_package_is_loaded_traced_and_listed(installed: Path) -> None:
    done = python(FOUND_AND_TRACED, site=installed)
    assert done.returncode == 0, done.stderr
    summary, layers, listed = done.stdout.split("\n", 2)
    assert summary.startswith("A gated RNN whose gate reads only the current token")
    assert layers == "('blocks.0.mixer', 'mingru', True) ('blocks.1.mixer', 'mingru', True)"
    assert "  mingru: minGRU\n" in listed
    assert "      host  mingru.MinGRU\n" in listed
    assert "Warning" not in done.stderr


def test_without_the_package_its_architecture_is_not_registered() -> None:
    done = python("import unilinattn as ula\nprint([n in ula.list_architectures() for n in ('mingru', 'mamba')])")
    assert done.stdout == "[False, True]\n"


BROKEN = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import unilinattn as ula
    print(len(caught))
    architectures = ula.list_architectures()
    again = ula.list_methods()
print("mamba" in architectures, "mingru" in architectures, "rollout" in again)
print(*[f"{warning.category.__name__}: {warning.message}" for warning in caught], sep="\\n")
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import a_package_that_nobody_has", "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        (
            "import unilinattn as u\nu.register_architecture('a.B', name='mamba', kind='?')(lambda call: None)",
            "OptionError: architecture 'mamba' or its hosts [] are registered already; choose another name.",
        ),
    ],
)
def test_a_failing_package_is_skipped_with_a_warning(installed: Path, tmp_path: Path, text: str, reason: str) -> None:
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    (site / "broken_adapter.py").write_text(text)
    metadata = site / "broken-0.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.3\n")
    (metadata / "entry_points.txt").write_text("[unilinattn.architectures]\nbad = broken_adapter\n")
    done = python(BROKEN, site=site)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "0",
        "True True True",
        "UserWarning: broken 0.3 is left out: its entry point 'bad' = 'broken_adapter' of the group "
        f"'unilinattn.architectures' failed with {reason}",
    ]
