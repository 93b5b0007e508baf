"""The choice of the combinations of parameters that run by default, and in slow runs."""

from collections.abc import Sequence
from itertools import combinations, product

import pytest

from tests.quick import MOST, covering, some


def table(*rows: Sequence[str]) -> dict[Sequence[str], Sequence[str]]:
    return {row: row for row in rows}


@pytest.mark.parametrize(("strength", "count"), [(1, 4), (2, 12), (3, 24)])
def test_every_combination_of_so_many_values_is_covered(strength: int, count: int) -> None:
    rows = table(*product("abc", "de", "fghi"))
    chosen = covering(rows, strength)
    assert len(chosen) == count
    for axes in combinations(range(3), strength):
        assert {tuple(row[axis] for axis in axes) for row in chosen} == {
            tuple(row[axis] for axis in axes) for row in rows
        }


def test_values_that_are_not_combined_are_all_covered() -> None:
    assert covering(table("a", "b", "c")) == covering(table("a", "b", "c"), 2) == {"a", "b", "c"}
    assert covering(table("ax", "bx", "by")) == {"ax", "by"}
    assert covering({}) == set()


def test_chosen_rows_count() -> None:
    assert covering(table("ax", "bx", "by"), chosen={"bx"}) == {"ax", "bx", "by"}


def test_of_many_rows_some_run_and_each_test_begins_elsewhere() -> None:
    rows = [f"host {number}" for number in range(20)]
    runs = [some(rows, f"test_{number}") for number in range(200)]
    assert {len(run) for run in runs} == {MOST} and set().union(*runs) == set(rows)
    assert some(rows[:MOST], "test") == set(rows[:MOST]) and some(rows, "test") == some(rows, "test")
