"""Files of compiled loops."""

from pathlib import Path

ROOT = Path(__file__).parents[2] / "unilinattn"


def test_compiled_code_is_in_one_file() -> None:
    # Numba compiles a stored loop again when its own file changes, but not when a function that it inlines does.
    assert [path.name for path in ROOT.rglob("*.py") if "njit" in path.read_text()] == ["loops.py"]
