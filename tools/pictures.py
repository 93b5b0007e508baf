"""`python -m tools.pictures`: draw the pictures of the gallery and of single pages by running their programs.

A program leaves its picture in the variable `figure`; that of a method, its scores in `result`.
"""

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

DOCS = Path(__file__).parents[1] / "docs"
GALLERY = DOCS / "gallery.md"

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"^!\[.*\]\((gallery/\w+\.png)\)$", re.M)


def programs() -> Iterator[tuple[Path, list[str]]]:
    """Yield each picture with the blocks of the program that draws it."""
    for page in sorted((DOCS / "analysis").glob("*.md")):
        yield page.with_suffix(".png"), _BLOCK.findall(page.read_text())
    for page in (DOCS / "your_checkpoint.md", *sorted((DOCS / "howto").glob("*.md"))):
        if f"]({page.stem}.png)" in page.read_text():
            yield page.with_suffix(".png"), _BLOCK.findall(page.read_text())
    for page in sorted((DOCS / "methods").glob("*.md")):
        if page.stem != "index":
            yield page.with_suffix(".png"), [*_BLOCK.findall(page.read_text()), "figure = result.plot()"]
    for section in GALLERY.read_text().split("\n## ")[1:]:
        ((link,), blocks) = _LINK.findall(section), _BLOCK.findall(section)
        yield DOCS / link, blocks


def figure_of(blocks: list[str], name: str) -> Any:
    """Run blocks in one namespace in a temporary folder, and return their variable `figure`."""
    if str(DOCS / "examples") not in sys.path:
        sys.path.append(str(DOCS / "examples"))
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in blocks:
            exec(compile(block, name, "exec"), names)
    return names["figure"]


def main() -> None:
    """Write all pictures."""
    for path, blocks in tqdm(list(programs())):
        path.parent.mkdir(exist_ok=True)
        figure_of(blocks, path.stem).savefig(path, dpi=110)


if __name__ == "__main__":
    main()
