"""The choice of the combinations of parameters that run by default."""

from itertools import product

from tests.quick import covering


def test_every_value_of_every_parameter_is_kept() -> None:
    combinations = list(product("abc", "de", "fghi"))
    kept = covering(combinations)
    assert len(kept) == 4
    for at, values in enumerate(("abc", "de", "fghi")):
        assert {combinations[place][at] for place in kept} == set(values)


def test_values_that_are_not_combined_are_all_kept() -> None:
    assert covering([("a",), ("b",), ("c",)]) == {0, 1, 2}
    assert covering([("a", "x"), ("b", "x"), ("b", "y")]) == {0, 2}
    assert covering([]) == set()
