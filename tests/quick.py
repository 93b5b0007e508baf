"""The parameters of a test that run by default: every value of each parameter once; the other combinations are slow."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import pytest

ONLY_RUN = ("tests/fla/", "tests/architectures/test_timm.py", "tests/models/test_vim.py")
"""Tests that other environments run without the slow ones, so that all their combinations count."""


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the combinations of parameters whose values the other combinations of a test have too."""
    quick = [item for item in items if _is_combination(item)]
    for _, group in groupby(quick, lambda item: item.nodeid.partition("[")[0]):
        tests = list(group)
        # No public name tells the values of one parametrisation from those of the next.
        kept = covering([item.callspec._idlist for item in tests])  # type: ignore[attr-defined]
        for at, item in enumerate(tests):
            if at not in kept:
                item.add_marker("slow")


def covering(combinations: Sequence[Sequence[str]]) -> set[int]:
    """Return the places of few combinations that have every value of each parameter, the first of equal ones."""
    values = [set(enumerate(combination)) for combination in combinations]
    missing, kept = set().union(*values), set()
    while missing:
        best = max(range(len(values)), key=lambda at: (len(values[at] & missing), -at))
        missing -= values[best]
        kept.add(best)
    return kept


def _is_combination(item: pytest.Item) -> bool:
    slow = item.get_closest_marker("slow") is not None
    return hasattr(item, "callspec") and not slow and not item.nodeid.startswith(ONLY_RUN)
