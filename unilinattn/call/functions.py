"""Functions of other packages by qualified name, replaced by ones that a torch function mode sees."""

import fnmatch
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial, wraps
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.jit import ScriptFunction
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import checkpoint as checkpoints

from unilinattn.call.entries import Entries
from unilinattn.call.nested import tensors

Entry = tuple[dict[str, Any], str]
"""A dictionary of attributes and a name in it."""

FUNCTIONS = (FunctionType, MethodType, BuiltinMethodType)
"""Types of the functions that modules have as attributes."""


CHECKPOINT = checkpoints.checkpoint
"""The function of torch that keeps only the inputs of a function for the backward pass."""

NESTED = "use_nested_tensor"
"""The attribute of a torch.nn.TransformerEncoder by which it removes padded tokens between its layers."""

_PARAMETERS = inspect.signature(CHECKPOINT).parameters.values()
_OF_CHECKPOINT = {"preserve_rng_state", *(p.name for p in _PARAMETERS if p.kind is p.KEYWORD_ONLY)}
"""The names of its options."""

_calls_plainly: ContextVar[bool] = ContextVar("unilinattn.calls_plainly", default=False)


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
def plain_functions(model: nn.Module) -> Iterator[None]:
    """Replace functions that hide the code of a model by this code; they are restored at the end.

    Functions of TorchScript become the Python functions that they were made of, since no mode sees their own calls. A
    checkpoint, which runs its function again in the backward pass, outside of modes, becomes a call. Both are replaced
    in the model's packages and in the attributes of its modules, and a checkpoint in torch too. Torch's encoder leaves
    padded tokens in its tensors, and its outputs at padded tokens are then those of its layers, not zeros.
    """
    modules = list(model.modules())
    packages = {name.partition(".")[0] for name in _class_modules(modules)}
    loaded = _hiding(frozenset(packages - {"torch", "builtins", "unilinattn"}), _loaded_modules())
    # As in `_entries`, a name may be bound again.
    recent = [vars(checkpoints), *_recent(modules), *map(vars, modules)]
    entries = [*loaded, *(entry for attributes in recent for entry in _hiding_in(attributes))]
    shown = ((attributes, name, _plain(attributes.get(name))) for attributes, name in entries)
    replaced: list[tuple[dict[str, Any], str, Any]] = [
        (attributes, name, plain) for attributes, name, plain in shown if plain is not None
    ]
    # Between the layers of a torch.nn.TransformerEncoder the padded tokens would be missing: nested tensors.
    replaced += [(vars(m), NESTED, False) for m in modules if vars(m).get(NESTED) is True]
    token = _calls_plainly.set(True)
    try:
        with _replaced(replaced):
            yield
    finally:
        _calls_plainly.reset(token)


@contextmanager
def _replaced(functions: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Replace entries (dictionary, name, value) in this context."""
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
def _hiding(packages: frozenset[str], loaded: int) -> tuple[Entry, ...]:
    """Return where loaded modules of packages have functions that hide code; `loaded` is that of `_matching`."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages]
    return tuple(entry for module in modules for entry in _hiding_in(_attributes(module)))


def _hiding_in(attributes: dict[str, Any]) -> list[Entry]:
    # The call is only for the few of thousands of values that may hide code.
    items = list(attributes.items())
    may_hide = [item for item in items if item[1] is CHECKPOINT or type(item[1]) is ScriptFunction]
    return [(attributes, name) for name, value in may_hide if _plain(value) is not None]


def _plain(value: Any) -> Callable[..., Any] | None:
    """Return the plain code of a function that hides it, None for others."""
    if type(value) is ScriptFunction:
        return getattr(value, "_torchdynamo_inline", None)
    return _without_checkpoint if value is CHECKPOINT else None


def _without_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function of a checkpoint, in this thread; a module that is imported meanwhile keeps this function."""
    if not _calls_plainly.get():
        return CHECKPOINT(function, *args, **kwargs)
    return function(*args, **{name: value for name, value in kwargs.items() if name not in _OF_CHECKPOINT})


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
