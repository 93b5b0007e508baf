"""The type checker that a thorough test run applies to the functions of the package: to their first calls in each test.

Later calls of a function in a test come from loops over examples, layers and tiles, and have arguments of the same
kinds. Without them a thorough run takes little longer than another one.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Self

from beartype import BeartypeConf, FrozenDict, beartype

CALLS = 4
"""Number of checked calls of each function in a test."""

# The import hook decorates methods one by one, where beartype cannot know the class that Self stands for.
_checked = beartype(conf=BeartypeConf(hint_overrides=FrozenDict({Self: object})))

_test = 0


def next_test() -> None:
    """Check the first calls of every function again."""
    global _test
    _test += 1


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks the arguments and the result of its first calls in each test."""
    checked = _checked(function)
    test = calls = 0

    @wraps(function)
    def sampled(*arguments: Any, **options: Any) -> Any:
        nonlocal test, calls
        if test != _test:
            test, calls = _test, 0
        calls += 1
        return (checked if calls <= CALLS else function)(*arguments, **options)

    return sampled
