"""The calls that one module's forward makes itself: functions of torch, and its submodules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from unilinattn.call.nested import mapped, tensors

_frame: "ContextVar[Frame | None]" = ContextVar("unilinattn.frame", default=None)
"""The frame whose module's own code runs, None in its submodules and in functions."""


@dataclass(frozen=True)
class Value:
    """A tensor of a forward: the number of the call that returned it, -1 for the arguments, and its place there."""

    call: int
    position: int


@dataclass(frozen=True)
class Attribute:
    """Reads an attribute of a tensor, such as its shape or its transpose: a call of torch like any other."""

    name: str

    def __call__(self, tensor: Tensor, *_: Any) -> Any:
        """Return the attribute."""
        return getattr(tensor, self.name)


class Frame(TorchFunctionMode):
    """Passes the calls of one module's forward to `handle`, not those inside of a submodule or of a function."""

    def __init__(self, module: nn.Module) -> None:
        """Prepare for one call of the module."""
        super().__init__()
        self.module = module
        self.count = 0

    def handle(self, number: int, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call; `target` is a function, an `Attribute` or a submodule."""
        raise NotImplementedError

    @contextmanager
    def running(self) -> Iterator[None]:
        """Follow the module's forward in this context."""
        before, call = _frame.set(self), nn.Module.__call__
        try:
            nn.Module.__call__ = _seen(call)  # type: ignore[method-assign]  # until the forward ends
            with self:
                yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]  # restores the original
            _frame.reset(before)

    def next_call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Handle the next call, inside which nothing is followed."""
        self.count += 1
        before = _frame.set(None)
        try:
            return self.handle(self.count - 1, target, args, kwargs)
        finally:
            _frame.reset(before)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a call of torch."""
        if _frame.get() is not self:
            return func(*args, **(kwargs or {}))
        # A new object at each access.
        if getattr(func, "__name__", "") == "__get__":
            func = Attribute(func.__self__.__name__)
        return self.next_call(func, args, kwargs or {})


def _seen(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `nn.Module.__call__`, of which the present frame handles the calls of other modules."""

    def seen(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        frame = _frame.get()
        if frame is None or module is frame.module:
            return call(module, *args, **kwargs)
        with _pop_mode_temporarily():
            return frame.next_call(module, args, kwargs)

    return seen


def results_of(target: Any, args: tuple[Any, ...], result: Any) -> list[Tensor]:
    """Return the tensors that a call returned, or wrote into."""
    if getattr(target, "__name__", "") == "__setitem__":
        return [args[0]]
    return list(tensors(result))


@dataclass(frozen=True)
class Event:
    """One call of a forward: its arguments with a `Value` in place of each tensor of the forward, and its result.

    `result` has tensors of the same shapes without memory of their own, `shapes` are those of the tensors that the call
    returned or wrote into, and `aliases` the arguments that these are, None for new tensors. `writes_view` says that
    the call wrote into a part of another tensor.
    """

    number: int
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    shapes: tuple[torch.Size, ...]
    aliases: tuple[Value | None, ...]
    writes_view: bool

    @property
    def name(self) -> str:
        """The name of the function; empty for a module."""
        return "" if isinstance(self.target, nn.Module) else getattr(self.target, "__name__", repr(self.target))

    @property
    def read(self) -> tuple[Value, ...]:
        """The tensors of the forward that it reads."""
        return tuple(values_in((self.args, self.kwargs)))

    def repeats(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether another call has the same target and the same arguments, but for the tensors of the forward."""
        return self.target == target and _same(self.args, args) and _same(self.kwargs, kwargs)

    @property
    def values(self) -> tuple[Value, ...]:
        """The tensors that it returns or writes into."""
        return tuple(Value(self.number, position) for position in range(len(self.shapes)))


def values_in(nested: Any) -> Iterator[Value]:
    """Yield every value of nested tuples, lists and mappings."""
    if isinstance(nested, Value):
        yield nested
    elif isinstance(nested, (tuple, list, Mapping)):
        for item in nested.values() if isinstance(nested, Mapping) else nested:
            yield from values_in(item)


def _same(recorded: Any, other: Any) -> bool:
    if isinstance(recorded, Value):
        return isinstance(other, Tensor)
    if isinstance(recorded, Tensor) or isinstance(other, Tensor):
        return recorded is other
    if isinstance(recorded, (tuple, list)):
        alike = type(recorded) is type(other) and len(recorded) == len(other)
        return alike and all(map(_same, recorded, other))
    if isinstance(recorded, Mapping):
        alike = isinstance(other, Mapping) and recorded.keys() == other.keys()
        return alike and all(_same(value, other[key]) for key, value in recorded.items())
    return recorded is other or (type(recorded) is type(other) and bool(recorded == other))


class Recording(Frame):
    """Records the calls of a module's forward, which run as they are.

    Attributes:
        events: the calls.
        made: the shape of each tensor, the arguments among them.
    """

    def __init__(self, module: nn.Module, arguments: list[Tensor]) -> None:
        """Begin with the tensors among the module's arguments."""
        super().__init__(module)
        self.events: list[Event] = []
        # Tensors stay alive, so that no two have the same id.
        self._alive: list[Tensor] = []
        self._values: dict[int, Value] = {}
        self.made: dict[Value, tuple[int, ...]] = {}
        self._note(-1, arguments)

    def _note(self, number: int, written: Sequence[Tensor]) -> None:
        for position, tensor in enumerate(written):
            self._alive.append(tensor)
            self._values[id(tensor)] = value = Value(number, position)
            self.made[value] = tuple(tensor.shape)

    def value(self, tensor: Tensor) -> Any:
        """Return the value that a tensor is, or the tensor if no call returned it, such as a parameter."""
        return self._values.get(id(tensor), tensor)

    def handle(self, number: int, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the target and record it."""
        read_args, read_kwargs = mapped((args, dict(kwargs)), self.value)
        result = target(*args, **kwargs)
        written = results_of(target, args, result)
        shapes = tuple(tensor.shape for tensor in written)
        aliases = tuple(self._values.get(id(tensor)) for tensor in written)
        returned = mapped(result, _without_memory)
        through = any(alias is not None and tensor._is_view() for alias, tensor in zip(aliases, written, strict=True))
        self.events.append(Event(number, target, read_args, read_kwargs, returned, shapes, aliases, through))
        self._note(number, written)
        return result


def _without_memory(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(()).expand(tensor.shape)
