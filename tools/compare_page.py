"""`python -m tools.compare_page`: run `unilinattn compare` and write its tables and picture into the docs."""

import contextlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.markers import replace_section
from unilinattn.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/comparison.md")
PICTURE = Path("docs/compare.png")


def table_of(output: str) -> str:
    """Cut the tables out of the output of `unilinattn compare`, as a fenced block."""
    table = output.split("\n\naccuracy: ")[0].strip()
    return f"```text\n{table}\n```"


@contextlib.contextmanager
def compared(*arguments: str) -> Iterator[tuple[Path, str]]:
    """Run `unilinattn compare`, and yield the folder of its report and its output.

    Raises `RuntimeError` if the command fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "report"), io.StringIO()
        with contextlib.redirect_stdout(output):
            status = main(["compare", *arguments, "--out", str(report)])
        if status:
            raise RuntimeError(f"`unilinattn compare` ended with status {status}.")
        yield report, output.getvalue()


def write(root: Path) -> None:
    """Compare the trained models and write the page and the picture of the repository `root`."""
    with compared() as (report, output):
        page = root / PAGE
        page.write_text(replace_section(page.read_text(), "compare", table_of(output)))
        shutil.copy(report / "compare.png", root / PICTURE)


if __name__ == "__main__":
    write(ROOT)
