"""Functions of other packages by qualified name, replaced by ones that a torch function mode sees."""

import fnmatch
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.jit import ScriptFunction
from torch.overrides import handle_torch_function, has_torch_function

from unilinattn.call.entries import Entries
from unilinattn.call.nested import tensors

Entry = tuple[dict[str, Any], str]
"""A dictionary of attributes and a name in it."""

FUNCTIONS = (FunctionType, MethodType, BuiltinMethodType)
"""Types of the functions that modules have as attributes."""


class _Scan:
    """The last scan of all loaded modules, which takes a tenth of a second: its functions, and where they were."""

    def __init__(self) -> None:
        self.names: set[int] = set()
        self.loaded = 0
        self.entries: list[Entry] = []


_scan = _Scan()


def meaning_of(function: Any) -> Any:
    """Return what a visible function was registered with, None for any other function."""
    return getattr(function, "unilinattn_meaning", None)


@contextmanager
def visible(meanings: Mapping[str, Any], model: nn.Module, forms: Callable[[type], Any]) -> Iterator[None]:
    """Show the calls of functions and of module forwards to torch function modes, as calls of one function each.

    A mode gets a function whose `meaning_of` is the registered one, and which computes what the original does. Outside
    of modes, and in other threads, the originals run. They are restored at the end, also after an exception.

    Args:
        meanings: by qualified name, what a function is registered with; names of modules that are not loaded are
            skipped.
        model: a module whose attributes may be such functions.
        forms: returns the plain form of a module's class, None for none.
    """
    seen = {function: _seen(function, meanings[name]) for name, function in _loaded(meanings)}
    replaced = [(attributes, name, seen[attributes[name]]) for attributes, name in _entries(seen, model)]
    for module in model.modules():
        if (form := forms(type(module))) is not None:
            replaced.append((vars(module), "forward", _seen(module.forward, partial(form, module))))
    with _replaced(replaced):
        yield


@contextmanager
def without_script(model: nn.Module) -> Iterator[None]:
    """Replace functions of TorchScript, whose own calls no mode sees, by the Python functions that they were made of.

    These are the functions of the model's packages and the attributes of its modules; they are restored at the end.
    """
    modules = list(model.modules())
    packages = {name.partition(".")[0] for name in _class_modules(modules)}
    loaded = _scripted(frozenset(packages - {"torch", "builtins"}), _loaded_modules())
    # As in `_entries`, a name may be bound again.
    recent = [*_recent(modules), *map(vars, modules)]
    entries = [*loaded, *(entry for attributes in recent for entry in _scripted_in(attributes))]
    scripted = [(attributes, name) for attributes, name in entries if _is_scripted(attributes.get(name))]
    with _replaced([(attributes, name, attributes[name]._torchdynamo_inline) for attributes, name in scripted]):
        yield


@contextmanager
def _replaced(functions: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Replace entries (dictionary, name, function) in this context."""
    before = Entries((attributes, name) for attributes, name, _ in functions)
    try:
        try:
            for attributes, name, function in functions:
                attributes[name] = function
            yield
        finally:
            before.put_back()
    finally:
        # An interrupt may have ended the first attempt early.
        before.put_back()


@lru_cache(maxsize=64)
def _scripted(packages: frozenset[str], loaded: int) -> tuple[Entry, ...]:
    """Return where loaded modules of packages have functions of TorchScript; `loaded` is that of `_matching`."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages]
    return tuple(entry for module in modules for entry in _scripted_in(_attributes(module)))


def _scripted_in(attributes: dict[str, Any]) -> list[Entry]:
    # The call is only for the few of thousands of values that are of the type.
    entries = list(attributes.items())
    return [(attributes, name) for name, value in entries if type(value) is ScriptFunction and _is_scripted(value)]


def _is_scripted(value: Any) -> bool:
    return type(value) is ScriptFunction and hasattr(value, "_torchdynamo_inline")


def _loaded(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the functions of loaded modules with their qualified names."""
    loaded = _loaded_modules()
    for name in names:
        pattern, _, attribute = name.rpartition(".")
        for module in _matching(pattern, loaded) if "*" in pattern else (pattern,):
            # A lazy module would import what it is asked for.
            function = _attributes(sys.modules.get(module)).get(attribute)
            if callable(function) and not isinstance(function, type) and meaning_of(function) is None:
                yield name, function


def _loaded_modules() -> int:
    """Return a number that changes with the loaded modules; their count may stay when one is exchanged."""
    return hash(tuple(map(id, list(sys.modules.values()))))


@lru_cache(maxsize=64)
def _matching(pattern: str, loaded: int) -> tuple[str, ...]:
    """Return the names of loaded modules that match a pattern; `loaded` tells them from those of another time."""
    return tuple(fnmatch.filter(list(sys.modules), pattern))


def _entries(functions: Collection[Any], model: nn.Module) -> list[Entry]:
    """Return where the functions are attributes of loaded modules and of the model's modules."""
    names, loaded = {id(function) for function in functions}, _loaded_modules()
    if _scan.names != names or _scan.loaded != loaded:
        _scan.names, _scan.loaded = names, loaded
        every = list(sys.modules.values())
        _scan.entries = [entry for module in every for entry in _entries_of(_attributes(module), names)]
    # A name may be bound again in a module that was loaded before: in the user's, and in those of the host's classes.
    modules = list(model.modules())
    recent = (entry for attributes in _recent(modules) for entry in _entries_of(attributes, names))
    entries = [*_scan.entries, *recent]
    distinct = {(id(attributes), name): (attributes, name) for attributes, name in entries}
    result = [(attributes, name) for attributes, name in distinct.values() if id(attributes.get(name)) in names]
    for module in modules:
        # A copy of a module has another object for a bound method, which is equal.
        methods = ((name, value) for name, value in vars(module).items() if isinstance(value, FUNCTIONS))
        result += [(vars(module), name) for name, value in methods if value in functions]
    return result


def _recent(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return the names in the user's module and in those of the classes of a model's modules."""
    return [_attributes(sys.modules.get(name)) for name in ("__main__", *sorted(_class_modules(modules)))]


def _class_modules(modules: Sequence[nn.Module]) -> set[str]:
    """Return the names of the Python modules that define the classes of a model's modules."""
    return {cls.__module__ for kind in set(map(type, modules)) for cls in kind.__mro__}


def _entries_of(attributes: dict[str, Any], identities: Collection[int]) -> Iterator[Entry]:
    return ((attributes, name) for name, value in list(attributes.items()) if id(value) in identities)


def _attributes(module: Any) -> dict[str, Any]:
    attributes = getattr(module, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def _seen(function: Callable[..., Any], meaning: Any) -> Callable[..., Any]:
    """Return a function that a torch function mode sees like one of torch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        values = tuple(tensors((args, kwargs)))
        if has_torch_function(values):
            return handle_torch_function(call, values, *args, **kwargs)
        return function(*args, **kwargs)

    call = wraps(function)(call)
    call.__name__ = getattr(function, "__name__", type(function).__name__)
    call.unilinattn_meaning = meaning  # type: ignore[attr-defined]
    return call
