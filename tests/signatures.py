"""The type checker that a thorough run applies to calls 1, 2, 4, 8, ... of each function of the package in a test file.

Most calls of a function come from loops over examples, layers and tiles, and have arguments of the same kinds. Checking
all of them takes more than twice as long.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import CodeType
from typing import Any, Self

import jaxtyping
from beartype import BeartypeConf, FrozenDict, beartype

# The import hook decorates methods one by one, where beartype cannot know the class that Self stands for.
check = beartype(conf=BeartypeConf(hint_overrides=FrozenDict({Self: object})))

_jaxtyped = jaxtyping.jaxtyped
# Of each function: its calls in the present test file, and the number of the next one that is checked.
_calls: dict[CodeType, list[int]] = {}
_file: Path | None = None


def install(package: str) -> None:
    """Check some calls of the functions of a package that is not yet imported."""
    jaxtyping.install_import_hook(package, f"{__name__}.check")
    # The code that the hook generates decorates with this name.
    jaxtyping.jaxtyped = sampled


def next_test(file: Path) -> None:
    """Check the first calls of every function again if the next test is in another file."""
    global _file
    if file != _file:
        _file = file
        for calls in _calls.values():
            calls[:] = 0, 1


def sampled(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator like `jaxtyping.jaxtyped` that checks some calls of a plain function."""

    def decorate(function: Any) -> Any:
        if not inspect.isfunction(function):
            return _jaxtyped(function, typechecker=typechecker)
        # The handler of all functions of torch takes any arguments, and is on the stack of the host.
        if getattr(function, "__no_type_check__", False) or function.__name__ == "__torch_function__":
            return function
        # An inner function is decorated at every call of the outer one: all of them have the code in common.
        calls, checked = _calls.setdefault(function.__code__, [0, 1]), None

        @wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal checked
            calls[0] += 1
            if calls[0] < calls[1]:
                return function(*arguments, **options)
            calls[1] *= 2
            # The checker is compiled for functions that are called.
            checked = checked or _jaxtyped(function, typechecker=typechecker)
            return checked(*arguments, **options)

        return counted

    return decorate
