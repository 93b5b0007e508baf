"""The type checker that a thorough run applies to the functions of the package: to their first calls in each test.

Later calls of a function in a test come from loops over examples, layers and tiles, and have arguments of the same
kinds. Checking all of them takes more than twice as long.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Self

import jaxtyping
from beartype import BeartypeConf, FrozenDict, beartype

CALLS = 4
"""Number of checked calls of each function in a test."""

# The import hook decorates methods one by one, where beartype cannot know the class that Self stands for.
check = beartype(conf=BeartypeConf(hint_overrides=FrozenDict({Self: object})))

_jaxtyped = jaxtyping.jaxtyped
_test = 0


def install(package: str) -> None:
    """Check the first calls of the functions of a package that is not yet imported."""
    jaxtyping.install_import_hook(package, f"{__name__}.check")
    # The code that the hook generates decorates with this name.
    jaxtyping.jaxtyped = first_calls


def next_test() -> None:
    """Check the first calls of every function again."""
    global _test
    _test += 1


def first_calls(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator like `jaxtyping.jaxtyped` that checks a plain function at its first calls in each test."""

    def decorate(function: Any) -> Any:
        checked = _jaxtyped(function, typechecker=typechecker)
        if not inspect.isfunction(function):
            return checked
        test = calls = 0

        @wraps(function)
        def sampled(*arguments: Any, **options: Any) -> Any:
            nonlocal test, calls
            if test != _test:
                test, calls = _test, 0
            calls += 1
            return (checked if calls <= CALLS else function)(*arguments, **options)

        return sampled

    return decorate
