"""Rows of tables for numbers that no metric of `ula.evaluate` measures."""

from collections.abc import Iterable
from typing import Any

from unilinattn.evaluation.table import PARTS


def number(
    method: str, metric: str, value: float, weight: float = 1.0, *, model: str = "", sample: str = "0"
) -> dict[str, Any]:
    """Return the row of a mean: `value` over `weight` cases."""
    parts = [(value * weight, weight)]
    return {
        "model": model,
        "method": method,
        "layer": "",
        "sample": sample,
        "metric": metric,
        "value": value,
        PARTS: parts,
    }


def proportion(method: str, metric: str, right: Iterable[bool], *, model: str = "") -> list[dict[str, Any]]:
    """Return a row for each case, 1 for a right one and 0 for a wrong one, whose mean is the proportion."""
    return [number(method, metric, float(one), model=model, sample=str(at)) for at, one in enumerate(right)]
