"""Regenerate what the README shows of `unilinattn compare`: its table and its picture."""

import contextlib
import io
import shutil
import tempfile
from pathlib import Path

from unilinattn.cli import main

ROOT = Path(__file__).resolve().parents[1]


def between(text: str, name: str, body: str) -> str:
    """Put a body between the markers of a section."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            main(["compare", "--out", f"{folder}/report"])
        table = shown.getvalue().split("\n\nReport:")[0].split("\n\nAUC,")[0]
        shutil.copy(f"{folder}/report/compare.png", ROOT / "docs" / "compare.png")
    readme = ROOT / "README.md"
    readme.write_text(between(readme.read_text(), "compare", f"```text\n{table.strip()}\n```"))
