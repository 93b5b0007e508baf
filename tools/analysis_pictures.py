"""`python -m tools.analysis_pictures`: draw the pictures of the pages in docs/analysis by running their programs.

A program leaves its picture in the variable `figure`.
"""

import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[1] / "docs" / "analysis"


def figure_of(page: Path) -> Any:
    """Run the Python blocks of a page in one namespace, and return its variable `figure`."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
        exec(compile(block, str(page), "exec"), names)
    return names["figure"]


def main() -> None:
    """Write the picture of each page beside it."""
    for page in sorted(PAGES.glob("*.md")):
        figure_of(page).savefig(page.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
