"""Architectures and methods by name, registered by this package or by others through entry points."""

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from importlib.metadata import entry_points
from typing import Any, Concatenate, TypeVar, overload

from pydantic import BaseModel
from torch import Tensor, nn

from unilinattn.call import Call
from unilinattn.call.functions import visible
from unilinattn.errors import OptionError, nearest
from unilinattn.operator.flow import Flow
from unilinattn.optional import ENTRY_POINT_GROUPS
from unilinattn.options.base import Need, Options, first_line
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.rules.mixing_functions import FUNCTIONS

Build = Callable[[Call], Flow]
"""An adapter: from a call of a host's token-mixing module to its stages."""

Mark = Callable[[nn.Module, object], None]
"""Adds a record to the running call of a token-mixing module; adapters find it in `Call.seen`."""

Capture = Callable[[nn.Module, Mark], AbstractContextManager[None]]
"""A context manager around the run of a model, which marks the modules that it recognises."""

PaddingLeak = Callable[[nn.Module, Tensor], str | None]
"""Describes how padding reaches real tokens of a module, given the mask (batch, length); None if it does not."""

ExtraOutputs = int | Callable[[nn.Module, Mapping[str, Any]], int]
"""Number of values that a module returns after its output, or a function of the module and its arguments."""

SharedValues = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""Computes, in plain torch, the tensor that a module returns for later layers, from the arguments of its call."""

Check = Callable[[Call], None]
"""Raises `UncoveredError` for a call that an adapter does not cover, from its module's options and its arguments."""

PlainForm = Callable[..., Any]
"""Plain torch code of a module without token mixing: `form(module, *args, **kwargs)` returns the result of its call."""


@dataclass(frozen=True)
class ImageTokens:
    """Places of an image's tokens in the sequence of a vision model.

    Attributes:
        grid: (rows, columns) of the patches.
        patches: the position of each patch, row by row.
        cls: the positions of the class tokens.
    """

    grid: tuple[int, int]
    patches: tuple[int, ...]
    cls: tuple[int, ...]


Places = Callable[[nn.Module, int, int], ImageTokens | None]
"""Returns the places of an image's tokens from a module, and the height and width of its pixels; None if unknown."""

Adapter = TypeVar("Adapter", bound=Build)
Function = TypeVar("Function", bound=Callable[..., Attribution])
Form = TypeVar("Form", bound=PlainForm)
PlacesOf = TypeVar("PlacesOf", bound=Places)
Entry = TypeVar("Entry")
MethodOptions = TypeVar("MethodOptions", bound=Options)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Architecture:
    """An adapter, which builds an operator from a call of a host's token-mixing module.

    Attributes:
        name: unique name of the architecture.
        kind: the kind of token mixer ("Mamba-1 (S6)").
        hosts: qualified names of the host classes.
        summary: first line of the adapter's docstring.
        build: the adapter; `build(call)` returns a `Flow`.
        capture: `capture(model, mark)`, a context manager around the run for hosts that are recognised by the functions
            they call and not by their class. It calls `mark(module, record)` for each token-mixing module. Its changes
            to modules (attributes, parameters, hooks) are undone when the run ends.
        padding_leak: `padding_leak(module, mask)` describes how padding reaches real tokens in a host that does not
            mask it, None if it does not. The mask (batch, length) is False at padding, on one side of the texts.
        needs_capture: whether `build` needs a record of `capture`, so that it cannot replace the host's own forward.
        extra_outputs: number of values that the host's forward returns after its output, or a function of the module
            and of its arguments by name. Each is None where an operator replaces the forward.
        shared_values: `shared_values(module, arguments)` computes the tensor that the host's forward returns for later
            layers, which read it through a port of their own, such as RWKV-7's values of the first layer.
        check: `check(call)` raises `UncoveredError` for a call that `build` does not cover. `trace` runs it for every
            layer, so it reads options, arguments and shapes, and computes no operator.
    """

    name: str
    kind: str
    hosts: tuple[str, ...]
    summary: str
    build: Build
    capture: Capture | None = None
    padding_leak: PaddingLeak | None = None
    needs_capture: bool = False
    extra_outputs: ExtraOutputs = 0
    shared_values: SharedValues | None = None
    check: Check | None = None


@dataclass(frozen=True)
class Method:
    """A way to turn operators into scores: `function(trace, *, target, **options)` returns an `Attribution`.

    `options` is the class of the method, or the model of a plugin's options; None if the plugin gives none. `cost`
    takes the same arguments and returns an `Estimate`; it is None for a method without a cost model. `needs` are the
    facilities of a trace that the method uses with its default options; a method that does not state them is never
    recommended.
    """

    name: str
    summary: str
    function: Callable[..., Attribution]
    options: type[BaseModel] | None = None
    cost: Callable[..., Estimate] | None = None
    needs: tuple[Need, ...] | None = None


UNREGISTERED = "recorded"
"""Name of the architecture of modules without an adapter."""

_architectures: dict[str, Architecture] = {}
_hosts: dict[str, Architecture] = {}
_methods: dict[str, Method] = {}
_plain_forms: dict[str, PlainForm] = {}
_image_tokens: dict[str, Places] = {}


def register_architecture(
    *hosts: str,
    name: str,
    kind: str,
    capture: Capture | None = None,
    padding_leak: PaddingLeak | None = None,
    needs_capture: bool = False,
    extra_outputs: ExtraOutputs = 0,
    shared_values: SharedValues | None = None,
    check: Check | None = None,
) -> Callable[[Adapter], Adapter]:
    """Register an adapter for host classes named as strings, "package.module.Class"; subclasses match by their MRO.

    `kind` is the kind of token mixer ("Mamba-1 (S6)"). The first line of the adapter's docstring is its summary. The
    other arguments are those of `Architecture`.

    Raises `OptionError` if the name or a host class is registered already.
    """

    def decorate(build: Adapter) -> Adapter:
        taken = [host for host in hosts if host in _hosts]
        if name in _architectures or taken:
            raise OptionError(
                f"architecture {name!r} or its hosts {taken} are registered already; choose another name."
            )
        architecture = Architecture(
            name,
            kind,
            hosts,
            first_line(build),
            build,
            capture,
            padding_leak,
            needs_capture,
            extra_outputs,
            shared_values,
            check,
        )
        _architectures[name] = architecture
        _hosts.update(dict.fromkeys(hosts, architecture))
        return build

    return decorate


def visible_functions(model: nn.Module) -> AbstractContextManager[None]:
    """Let torch function modes see the calls of registered functions and modules (see `call.functions.visible`)."""
    load_entry_points()
    return visible(FUNCTIONS, model, plain_form_of)


def register_plain_form(*hosts: str) -> Callable[[Form], Form]:
    """Register the plain form of modules between layers whose own code hides its computation, such as fused norms.

    The frozen run (`frozen.run.frozen`) calls `form(module, *args, **kwargs)` in place of the module's forward, and
    compares the results. `hosts` are class names, "package.module.Class"; subclasses match by their MRO.

    Raises `OptionError` if a host class has a plain form already.
    """

    return _registers(_plain_forms, hosts, "have a plain form already; register the form of another class.")


def register_image_tokens(*hosts: str) -> Callable[[PlacesOf], PlacesOf]:
    """Register where a vision model's patches and class tokens are in its sequence, for `Trace.image_tokens`.

    `hosts` are class names, "package.module.Class", of the model or of its only module that makes tokens of pixels;
    subclasses match by their MRO. `places(module, height, width)` returns `ImageTokens`, or None if they are unknown.

    Raises `OptionError` if a host class is registered already.
    """

    return _registers(_image_tokens, hosts, "have image tokens already; register those of another class.")


def _registers(table: dict[str, Any], hosts: Sequence[str], refusal: str) -> Callable[[Any], Any]:
    """Return a decorator that adds an entry to a table for each of some host classes that have none."""

    def decorate(entry: Any) -> Any:
        if taken := [host for host in hosts if host in table]:
            raise OptionError(f"{taken} {refusal}")
        table.update(dict.fromkeys(hosts, entry))
        return entry

    return decorate


@overload
def register_method(
    name: type[MethodOptions], *, cost: Callable[Concatenate[Any, MethodOptions, ...], Estimate] | None = None
) -> Callable[[Callable[Concatenate[Any, MethodOptions, ...], Attribution]], Callable[..., Attribution]]: ...
@overload
def register_method(
    name: str,
    *,
    options: type[BaseModel] | None = None,
    cost: Callable[..., Estimate] | None = None,
    needs: tuple[Need, ...] | None = None,
) -> Callable[[Function], Function]: ...
def register_method(
    name: str | type[Options],
    *,
    options: type[BaseModel] | None = None,
    cost: Callable[..., Estimate] | None = None,
    needs: tuple[Need, ...] | None = None,
) -> Callable[[Callable[..., Attribution]], Callable[..., Attribution]]:
    """Register the function of a method: of a class of `unilinattn.options`, or under a name.

    `function(trace, options, *, target)` of a class takes an object of it, and the class has the name, summary and
    needs. `function(trace, *, target, **options)` under a name takes keywords; the first line of its docstring is the
    summary, `options` the pydantic model of its options, and `needs` are the facilities of a trace that it uses with
    its default options: errors of other methods recommend it where a trace has them. `cost` takes the arguments of the
    function and returns the `Estimate` of a call, for `estimate`.

    Returns the function with keywords. Raises `OptionError` if the name is registered already.
    """

    def decorate(function: Callable[..., Attribution]) -> Callable[..., Attribution]:
        if isinstance(name, str):
            entry = Method(name, first_line(function), function, options, cost, needs)
        else:
            costed = None if cost is None else _from_keywords(name, cost)
            entry = Method(name.name, name.summary(), _from_keywords(name, function), name, costed, name.needs)
        if entry.name in _methods:
            raise OptionError(f"method {entry.name!r} is registered already; choose another name.")
        _methods[entry.name] = entry
        return entry.function

    return decorate


def _from_keywords(method: type[Options], function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that takes the options of a method as keywords and calls `function` with an object of them."""

    @wraps(function)
    def run(trace: Any, *, target: Any = None, **options: Any) -> Result:
        return function(trace, method(**options), target=target)

    del run.__wrapped__  # Its signature is another.
    return run


def list_architectures() -> dict[str, Architecture]:
    """Return every registered architecture by name."""
    load_entry_points()
    return dict(sorted(_architectures.items()))


def list_methods() -> dict[str, Method]:
    """Return every registered method by name."""
    load_entry_points()
    return registered_methods()


def registered_methods() -> dict[str, Method]:
    """Return the methods that are registered so far, by name, without those of packages that were not imported yet."""
    return dict(sorted(_methods.items()))


def architecture_of(cls: type) -> Architecture | None:
    """Return the architecture registered for a host class or its nearest ancestor, None if there is none."""
    return _nearest_ancestor(_hosts, cls)


def plain_form_of(cls: type) -> PlainForm | None:
    """Return the plain form registered for a host class or its nearest ancestor, None if there is none."""
    return _nearest_ancestor(_plain_forms, cls)


def image_tokens_of(cls: type) -> Places | None:
    """Return the image tokens registered for a host class or its nearest ancestor, None if there are none."""
    return _nearest_ancestor(_image_tokens, cls)


def method(name: str) -> Method:
    """Return a registered method; raise `OptionError` with the nearest name if there is none."""
    methods = list_methods()
    if name not in methods:
        raise OptionError(f"unknown method {name!r}" + nearest(name, methods))
    return methods[name]


@contextmanager
def overridden(*entries: Architecture | Method) -> Iterator[None]:
    """Override or add entries inside the block, and restore the registry as it was before, to test an adapter."""
    load_entry_points()
    tables: tuple[dict[str, Any], ...] = (_architectures, _hosts, _methods, _plain_forms, _image_tokens, FUNCTIONS)
    before = [dict(table) for table in tables]
    try:
        for entry in entries:
            if isinstance(entry, Method):
                _methods[entry.name] = entry
            else:
                _architectures[entry.name] = entry
                _hosts.update(dict.fromkeys(entry.hosts, entry))
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)


def _nearest_ancestor(table: Mapping[str, Entry], cls: type) -> Entry | None:
    load_entry_points()
    return next((table[name] for name in _names(cls) if name in table), None)


@lru_cache(maxsize=1024)
def _names(cls: type) -> tuple[str, ...]:
    """Return the qualified names of a class and its ancestors, the nearest first."""
    return tuple(f"{ancestor.__module__}.{ancestor.__qualname__}" for ancestor in cls.__mro__)


@cache
def load_entry_points() -> None:
    """Import this package's adapters and methods, and the modules that other packages name in their groups, once."""
    for group in ENTRY_POINT_GROUPS:
        # A group has the name of the module that registers this package's own entries.
        importlib.import_module(group)
    for group in ENTRY_POINT_GROUPS:
        for point in entry_points(group=group):
            # Another package may raise any error on import; the registry continues without it.
            try:
                point.load()
            except Exception as error:
                package = "an unnamed package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
                warnings.warn(
                    f"{package} is left out: its entry point {point.name!r} = {point.value!r} of the group "
                    f"{group!r} failed with {type(error).__name__}: {error}",
                    stacklevel=3,
                )
