"""Architectures and methods by name: what is registered here or by another package through entry points."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from torch import Tensor

from unilinattn.errors import OptionError, nearest

ENTRY_POINT_GROUPS = ("unilinattn.architectures", "unilinattn.methods")
"""Each entry point names a module that registers when it is imported; one that fails is left out with a warning."""


@dataclass(frozen=True)
class Architecture:
    """An adapter: how a host's token-mixing module becomes an operator.

    `hosts` are qualified class names; `build(call)` returns a `Flow`.
    `capture(model, mark)` is for hosts that are known by what they call and not by their class: a context manager
    around the run, which calls `mark(module, record)` for each token-mixing module that it meets.
    `leak(module, mask)` tells how padding reaches real tokens in a host that does not keep it out, or None. The mask
    (batch, length) is False at padding, which stands on one side of the texts.
    `observes` tells that `build` needs what a `capture` saw, so it cannot stand in for the host's own forward.
    `extras` is how many values the host's forward returns after its output, or a function of its module that tells:
    None each where an operator stands in.
    """

    name: str
    kind: str
    hosts: tuple[str, ...]
    summary: str
    build: Callable[[Any], Any]
    capture: Callable[[Any, Callable[[Any, Any], None]], AbstractContextManager[None]] | None = None
    leak: Callable[[Any, Tensor], str | None] | None = None
    observes: bool = False
    extras: int | Callable[[Any], int] = 0


@dataclass(frozen=True)
class Method:
    """A way to turn operators into scores: `function(trace, *, target, **options)` returns an `Attribution`.

    `cost` takes the same and returns an `Estimate` of it; None for a method that does not say.
    """

    name: str
    summary: str
    function: Callable[..., Any]
    cost: Callable[..., Any] | None = None


_architectures: dict[str, Architecture] = {}
_hosts: dict[str, Architecture] = {}
_methods: dict[str, Method] = {}


def register_architecture(
    *hosts: str,
    name: str,
    kind: str,
    capture: Callable[..., AbstractContextManager[None]] | None = None,
    leak: Callable[[Any, Tensor], str | None] | None = None,
    observes: bool = False,
    extras: int | Callable[[Any], int] = 0,
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register an adapter for host classes named as strings, "package.module.Class"; subclasses match by their MRO.

    `kind` says what mixes the tokens ("Mamba-1 (S6)"). The adapter's docstring opens with its one-line summary.
    Raises `OptionError` if a name or a host class is taken.
    """

    def decorate(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
        taken = [host for host in hosts if host in _hosts]
        if name in _architectures or taken:
            raise OptionError(
                f"architecture {name!r} or its hosts {taken} are registered already; choose another name."
            )
        architecture = Architecture(name, kind, hosts, _first_line(build), build, capture, leak, observes, extras)
        _architectures[name] = architecture
        _hosts.update(dict.fromkeys(hosts, architecture))
        return build

    return decorate


def register_method(
    name: str, *, cost: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a method under a name; its docstring opens with its one-line summary.

    `cost(trace, *, target, **options)` returns the `Estimate` of a call, for `estimate`.

    Raises `OptionError` if the name is taken.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in _methods:
            raise OptionError(f"method {name!r} is registered already; choose another name.")
        _methods[name] = Method(name, _first_line(function), function, cost)
        return function

    return decorate


def architectures() -> dict[str, Architecture]:
    """Return every registered architecture by name."""
    _load_entry_points()
    return dict(sorted(_architectures.items()))


def methods() -> dict[str, Method]:
    """Return every registered method by name."""
    _load_entry_points()
    return dict(sorted(_methods.items()))


def architecture_of(cls: type) -> Architecture | None:
    """Return the architecture registered for a host class or its nearest ancestor, None if there is none."""
    _load_entry_points()
    for ancestor in cls.__mro__:
        found = _hosts.get(f"{ancestor.__module__}.{ancestor.__qualname__}")
        if found is not None:
            return found
    return None


def method(name: str) -> Method:
    """Return a registered method; raise `OptionError` with the nearest name if there is none."""
    known = methods()
    if name not in known:
        raise OptionError(f"unknown method {name!r}" + nearest(name, known))
    return known[name]


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().split("\n", 1)[0]


@cache
def _load_entry_points() -> None:
    for group in ENTRY_POINT_GROUPS:
        for point in entry_points(group=group):
            # Whatever another package raises while it is imported, this one goes on without it.
            try:
                point.load()
            except Exception as error:
                package = "an unnamed package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
                warnings.warn(
                    f"{package} is left out: its entry point {point.name!r} = {point.value!r} of the group "
                    f"{group!r} failed with {type(error).__name__}: {error}",
                    stacklevel=3,
                )
