"""`python -m tools.notebooks`: write notebooks of pages of the docs, whose cells were executed, into docs/notebooks."""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from base64 import b64encode
from pathlib import Path
from typing import Any

from tqdm import tqdm

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "notebooks"
PAGES = ("your_checkpoint.md", "howto/generation.md", "howto/vision.md")

EXAMPLES = 'import sys\n\nsys.path.append("../examples")  # the modules of this repository that train the models\n'
"""The first code cell."""

_PART = re.compile(r"^```(?P<kind>\w+)\n(?P<code>.*?)^```\n|(?P<text>(?:(?!```)[^\n]*\n)+)", re.M | re.S)
_LINK = re.compile(r"\]\((?!http|#)([^)]+)\)")


def cells(page: Path) -> list[dict[str, Any]]:
    """Return the cells of a page without outputs; the outputs that it shows are left out."""
    content = [_cell("code", EXAMPLES, 0)]
    for block in _PART.finditer(page.read_text()):
        if block["kind"] == "python":
            content.append(_cell("code", block["code"], len(content)))
        elif block["kind"] not in (None, "text"):
            content.append(_cell("markdown", block[0], len(content)))
        elif block["kind"] is None and block["text"].strip():
            content.append(_cell("markdown", _relinked(block["text"], page), len(content)))
    return [content[1], content[0], *content[2:]]


def executed(cells: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run the code cells in one namespace in `folder`, and return the cells with their outputs.

    A cell shows what it prints, and the figure that it names `figure`.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    with contextlib.chdir(folder):
        for cell in cells:
            if cell["cell_type"] == "code":
                count += 1
                printed, before = io.StringIO(), names.get("figure")
                with contextlib.redirect_stdout(printed):
                    exec(compile("".join(cell["source"]), "<cell>", "exec"), names)
                figure = names.get("figure")
                cell |= {
                    "execution_count": count,
                    "outputs": _outputs(printed.getvalue(), figure, drawn=figure is not before),
                }
    return cells


def notebook(cells: list[dict[str, Any]]) -> str:
    """Return cells as the JSON of a notebook (nbformat 4.5)."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Execute and write every notebook."""
    sys.path.append(str(DOCS / "examples"))
    FOLDER.mkdir(exist_ok=True)
    for name in tqdm(PAGES):
        page = DOCS / name
        with tempfile.TemporaryDirectory() as folder:
            done = executed(cells(page), Path(folder))
        (FOLDER / page.with_suffix(".ipynb").name).write_text(notebook(done))


def _relinked(text: str, page: Path) -> str:
    """Return text of a page with its links relative to the folder of the notebooks."""
    folder = os.path.relpath(page.parent, FOLDER)
    return _LINK.sub(lambda link: f"]({os.path.normpath(os.path.join(folder, link[1]))})", text)


def _cell(kind: str, text: str, number: int) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return {**cell, "source": text.strip("\n").splitlines(keepends=True)}


def _outputs(text: str, figure: Any, *, drawn: bool) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    if text:
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if drawn:
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=80)
        data = {"image/png": b64encode(picture.getvalue()).decode()}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


if __name__ == "__main__":
    main()
