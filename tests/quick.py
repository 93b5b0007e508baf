"""The combinations of a test's parameters that run: by default some values once, in slow runs every pair of values."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations, groupby
from typing import TypeVar
from zlib import crc32

import pytest

T = TypeVar("T", bound=Hashable)

ONLY_RUN = ("tests/fla/", "tests/architectures/test_timm.py", "tests/models/test_vim.py")
"""Tests that other environments run without the slow ones, so that all their combinations count."""

SLOW = (
    *(f"tests/{room}/" for room in ("evidence", "memory", "setups", "third_party", "tools")),
    *(
        f"tests/test_{name}.py"
        for name in ("answers", "benchmarks", "million_tokens", "peers", "startup", "whole_models")
    ),
)
"""Measurements, maintainers' commands, and new interpreters."""

NUMERIC = (
    *("tests/architectures/", "tests/frozen/", "tests/host/", "tests/kernels/", "tests/laws/", "tests/methods/"),
    *("tests/discovery/", "tests/mixers/", "tests/operator/", "tests/recording/", "tests/reruns/"),
    *("tests/rules/", "tests/scoring/", "tests/tracing/"),
)
"""Rooms whose tests ask one question of many hosts or structures."""

MOST = 3
"""Largest number of combinations of a test in these rooms that run by default; other tests run others."""


def mark_combinations(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Mark the slow rooms, and combinations whose values others have too; return those whose pairs others have too."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker("slow")
    left_out: set[pytest.Item] = set()
    for _, group in groupby(filter(_is_combination, items), lambda item: item.nodeid.partition("[")[0]):
        tests = list(group)
        # No public name tells the values of one parametrisation from those of the next.
        values = {item: item.callspec._idlist for item in tests}  # type: ignore[attr-defined]
        unmarked = {item: ids for item, ids in values.items() if item.get_closest_marker("slow") is None}
        quick = covering(unmarked)
        if tests[0].nodeid.startswith(NUMERIC):
            quick = some([item for item in unmarked if item in quick], tests[0].nodeid.partition("[")[0])
        left_out |= values.keys() - covering(values, 2, quick)
        for item in unmarked.keys() - quick:
            item.add_marker("slow")
    return left_out


def covering(rows: Mapping[T, Sequence[str]], strength: int = 1, chosen: Iterable[T] = ()) -> set[T]:
    """Return few rows, the chosen ones among them, that have all values, or pairs of values, of all rows."""
    covered = {key: set(combinations(enumerate(row), min(strength, len(row)))) for key, row in rows.items()}
    result = set(chosen)
    missing = set().union(*covered.values()).difference(*(covered[key] for key in result))
    while missing:
        # The first of equal ones.
        best = max(rows, key=lambda key: len(covered[key] & missing))
        missing -= covered[best]
        result.add(best)
    return result


def some(rows: Sequence[T], name: str) -> set[T]:
    """Return at most `MOST` rows at equal distances, of which the name of a test tells the first."""
    if len(rows) <= MOST:
        return set(rows)
    first = crc32(name.encode())
    return {rows[(first + turn * len(rows) // MOST) % len(rows)] for turn in range(MOST)}


def _is_combination(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and not item.nodeid.startswith(ONLY_RUN)
