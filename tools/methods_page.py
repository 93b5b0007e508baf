"""`python -m tools.methods_page`: run methods on the trained models, and write how often each finds the answer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.compare_page import compared
from tools.markers import replace_section, table

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/methods/index.md")
METHODS = (
    "logit",
    "lrp",
    "alti_logit",
    "contribution",
    "alti",
    "latim",
    "transformer_attribution",
    "attention_grad",
    "attribution",
    "rollout",
    "raw",
    "input_x_gradient",
    "gradient",
)
"""Methods that score every query at once."""


def table_of(numbers: Mapping[str, Any]) -> str:
    """Return the table of hit@1 by row and model, from the numbers of `unilinattn compare`."""
    shares: dict[str, dict[str, float]] = {}
    for comparison in numbers["comparisons"]:
        for row in comparison["table"]:
            if row["metric"] == "hit_at_1":
                shares.setdefault(row["method"], {})[f"{comparison['task']}/{row['model']}"] = row["value"]
    names = list(next(iter(shares.values())))
    rows = ((method, *(f"{by_model[name]:.0%}" for name in names)) for method, by_model in shares.items())
    return table(("method", *names), rows)


def write(root: Path) -> None:
    """Run the methods and write the table into the page of the repository `root`."""
    with compared("--methods", *METHODS) as (report, _):
        numbers = json.loads((report / "compare.json").read_text())
    page = root / PAGE
    page.write_text(replace_section(page.read_text(), "evidence", table_of(numbers)))


if __name__ == "__main__":
    write(ROOT)
