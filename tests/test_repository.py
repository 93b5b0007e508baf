"""Sizes and words of the repository's files, and the content of the wheel."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "unilinattn"


def test_no_module_is_too_long() -> None:
    def lines(path: Path) -> int:
        return len(path.read_text().splitlines())

    assert lines(PACKAGE / "__init__.py") < 100
    paths = [path for path in repository_files() if path.suffix == ".py"]
    assert {str(path.relative_to(ROOT)): lines(path) for path in paths if lines(path) > 400} == {}


OUTSIDE = {"build", "dist", "site", "unilinattn-report"}


def repository_files() -> list[Path]:
    """Every file of the repository, except those that tools generate."""
    paths = []
    for folder, folders, names in os.walk(ROOT):
        tracked_hidden = {".ci", ".github"}
        folders[:] = [
            name
            for name in folders
            if name not in OUTSIDE | {"__pycache__"}
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name in tracked_hidden)
        ]
        paths += [Path(folder, name) for name in names]
    return sorted(paths)


FORBIDDEN = [
    r"(?<![\w.])/(?:work|root|farm|home/\w+|Users/\w+)/",
    r"(?i)\bissues?[ -]?(?:#|no\.? ?|number )?\d+\b",
    r"(?i)\b(?:helper|coding|sub)[ -]?agents?\b",
    r"(?i)\b(?:extra-)?index[-]url\b|\bfind[-]links\b",
    r"(?i)\bdesign[ /-]?0\d\b|\bshared/(?:design|papers)\b",
    r"(?m)^(?:<{7}|>{7}) ",
]
"""Patterns of paths, trackers and tools of the development, and of unresolved merges: no part of the product."""


def forbidden_words(text: str) -> list[str]:
    return [match.group() for pattern in FORBIDDEN for match in re.finditer(pattern, text)]


def beginning(content: bytes) -> bytes:
    """Return a text whole, and the head of weights or of a picture, which says what wrote it."""
    return content[: 1 << 14] if b"\0" in content else content


def test_the_text_speaks_only_of_the_product() -> None:
    texts = {path: beginning(path.read_bytes()).decode(errors="replace") for path in repository_files()}
    matches = {str(path.relative_to(ROOT)): forbidden_words(text) for path, text in texts.items()}
    assert {path: words for path, words in matches.items() if words} == {}


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
        ("before\n<<<<", "<<< HEAD"),
    ],
)
def test_a_forbidden_word_is_reported(words: tuple[str, str]) -> None:
    assert len(forbidden_words("".join(words))) == 1


@pytest.mark.slow
def test_a_built_wheel_contains_exactly_the_package(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {str(path.relative_to(ROOT)) for path in repository_files() if path.is_relative_to(PACKAGE)}
    assert names == package
    assert "unilinattn/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"unilinattn"}
