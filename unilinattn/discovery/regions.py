"""Layers without a module: parts of a forward that mixes tokens itself, between two tensors of its stream.

A run of the forward is recorded as calls of functions and of submodules, and `region_plans` finds its regions. A
shallow copy of the model has a module for each of them. Its forward is the model's own, but that the calls of a region
compute nothing until the last one, which calls the region's module. The copy's output is compared with the model's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from types import MethodType, NoneType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from unilinattn.call import is_cache
from unilinattn.call.exactness import layer_tolerance
from unilinattn.call.nested import mapped, tensors
from unilinattn.discovery.module_frame import Event, Frame, Recording, Value, results_of
from unilinattn.discovery.region_plans import Plan, planned
from unilinattn.discovery.unknown import probable_mixers
from unilinattn.errors import UncoveredError
from unilinattn.host.run import run

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
"""Functions that read channels from the second axis."""

Shapes = tuple[tuple[int, ...], ...]
"""The shape of each tensor."""


@dataclass(frozen=True)
class _Member:
    """A submodule, parameter or buffer of a region, by its name there."""

    name: str


class Region(nn.Module):
    """A part of a forward as a module: its calls in the recorded order, for inputs of recorded shapes."""

    def __init__(self) -> None:
        """Begin without calls."""
        super().__init__()
        self._plans: dict[Shapes, Plan] = {}
        self.in_channels: int | None = None
        self.out_channels: int | None = None

    def learn(self, shapes: Shapes, plan: Plan) -> None:
        """Store the calls for inputs of these shapes; modules and weights that they use become the region's own."""

        def named(item: Any) -> Any:
            return self._member(item) if isinstance(item, (Tensor, nn.Module)) else item

        calls = []
        for call in plan.calls:
            args, kwargs = mapped((call.args, dict(call.kwargs)), named)
            if (channels := _channels(call)) is not None:
                # As a module of torch does, it tells by these where its tensors have their channels.
                first, self.out_channels = channels
                self.in_channels = first if self.in_channels is None else self.in_channels
            calls.append(replace(call, target=named(call.target), args=args, kwargs=kwargs, result=None))
        self._plans[shapes] = replace(plan, calls=tuple(calls))

    def _member(self, item: Tensor | nn.Module) -> _Member:
        members = {**self._modules, **self._parameters, **self._buffers}
        name = next((name for name, member in members.items() if member is item), None)
        if name is None:
            name = f"member_{len(members)}"
            if isinstance(item, nn.Module):
                self.add_module(name, item)
            elif isinstance(item, nn.Parameter):
                self.register_parameter(name, item)
            else:
                self.register_buffer(name, item, persistent=False)
        return _Member(name)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Compute the region's output from the tensor that enters, and from the others that it reads.

        Raises `UncoveredError` for tensors of shapes for which it was not recorded.
        """
        plan = self._plans.get(shapes_of((x, *others)))
        if plan is None:
            raise UncoveredError(
                f"A part of the model's forward was recorded for tensors of other shapes than "
                f"{[tuple(t.shape) for t in (x, *others)]}. Make it a module."
            )
        values = dict(zip((plan.entered, *plan.others), (x, *others), strict=True))

        def resolved(item: Any) -> Any:
            return values[item] if isinstance(item, Value) else getattr(self, item.name)

        for call in plan.calls:
            args, kwargs = _replaced((call.args, call.kwargs), resolved)
            target = resolved(call.target) if isinstance(call.target, _Member) else call.target
            values.update(zip(call.values, results_of(target, args, target(*args, **kwargs)), strict=True))
        return values[plan.output]


def _channels(call: Event) -> tuple[int, int] | None:
    """Return the numbers of channels, in the second axis, that a convolution or a pool reads and writes."""
    if "pool" in call.name:
        return call.shapes[0][1], call.shapes[0][1]
    if call.name not in CONVOLUTIONS:
        return None
    weight = call.args[1] if len(call.args) > 1 else call.kwargs["weight"]
    groups = call.args[6] if len(call.args) > 6 else call.kwargs.get("groups", 1)
    return (groups * weight.shape[1], call.shapes[0][1]) if isinstance(weight, Tensor) else None


def _replaced(nested: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same nesting with `function` applied to its values and members."""
    if isinstance(nested, (Value, _Member)):
        return function(nested)
    if type(nested) is dict:
        return {key: _replaced(item, function) for key, item in nested.items()}
    return type(nested)(_replaced(item, function) for item in nested) if type(nested) in (tuple, list) else nested


def shapes_of(values: Any) -> Shapes:
    """Return the shape of every tensor in nested values; a region may run in another dtype."""
    return tuple(tuple(tensor.shape) for tensor in tensors(values))


@dataclass(frozen=True)
class _Recorded:
    """A forward for arguments of certain shapes: its calls, its regions, and the shapes of what these read."""

    events: tuple[Event, ...]
    plans: tuple[Plan, ...]
    shapes: tuple[Shapes, ...]


@dataclass
class _Forwards:
    """The recorded forwards of a module, by the shapes of its arguments and by its other arguments.

    `is_model` says that its arguments are those of the whole model, so that vectors among them are pixels or
    embeddings.
    """

    recorded: dict[object, _Recorded] = field(default_factory=dict)
    latest: _Recorded | None = None
    is_model: bool = True
    has_regions: bool = False


_forwards: "WeakKeyDictionary[nn.Module, _Forwards]" = WeakKeyDictionary()


class _Run(Frame):
    """A run of a forward in which the last call of each region calls the region's module."""

    def __init__(self, module: nn.Module, recorded: _Recorded, arguments: Sequence[Tensor]) -> None:
        super().__init__(module)
        self._recorded = recorded
        self._regions = {call.number: at for at, plan in enumerate(recorded.plans) for call in plan.calls}
        self._needed = {value for plan in recorded.plans for value in (plan.entered, *plan.others)}
        self._values = {Value(-1, position): tensor for position, tensor in enumerate(arguments)}
        self._written: dict[int, Tensor] = {}

    def handle(self, number: int, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute a call outside of regions, or a region at its last call."""
        events = self._recorded.events
        event = events[number] if number < len(events) else None
        inside = number in self._regions
        if event is None or not (event.repeats(target, args, kwargs) if inside else event.target == target):
            raise UncoveredError(
                f"{type(self.module).__name__} mixes tokens in its own forward, and calls other functions, or with "
                "other numbers, than in an earlier run on tensors of the same shapes. Make what mixes a module."
            )
        result = self._placeholder(self._regions[number], event) if inside else target(*args, **kwargs)
        for value, tensor in zip(event.values, results_of(target, args, result), strict=True):
            if value in self._needed:
                self._values[value] = tensor
        return result

    def _placeholder(self, at: int, event: Event) -> Any:
        """Return the result of a region's call: its output at the last one, before it tensors that nothing reads."""
        plan = self._recorded.plans[at]
        if plan.made in event.values:
            self._written[at] = event.result.new_empty(event.result.shape)
            return self._written[at]
        if event is not plan.calls[-1]:
            return event.result
        region = self.module.get_submodule(region_name(at))
        output = region(self._values[plan.entered], *(self._values[value] for value in plan.others))
        if at in self._written:
            output = self._written.pop(at).copy_(output)
        results = iter(event.values)
        return mapped(event.result, lambda tensor: output if next(results) == plan.output else tensor)


def region_name(number: int) -> str:
    """Return the name of a region in the module of whose forward it is a part."""
    return f"region_{number}"


def _forward_of(model: nn.Module) -> Callable[..., Any]:
    """Return the forward of a model, by its copy, that calls the regions as modules."""
    plain = getattr(vars(model).get("forward"), "__func__", type(model).forward)

    @wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        host = partial(plain, self, *args, **kwargs)
        # The run that is recorded would fill a cache once more.
        copies = {name: deepcopy(value) if is_cache(name, value) else value for name, value in kwargs.items()}
        recorded = _recorded(self, partial(plain, self, *args, **copies), args, kwargs)
        if not _forwards[self].has_regions:
            # The first run finds the regions, which `regional_model` makes modules.
            return host()
        _learn(self, recorded)
        with _Run(self, recorded, [*tensors((args, kwargs))]).running():
            return host()

    return forward


def _recorded(
    module: nn.Module, host: Callable[[], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _Recorded:
    """Return the recorded forward for such arguments; the first time it runs once more."""
    # A deep copy of a model has regions too.
    forwards = _forwards.setdefault(module, _Forwards(has_regions=region_name(0) in module._modules))
    others = [value for value in (*args, *kwargs.values()) if not isinstance(value, Tensor)]
    key = (shapes_of((args, kwargs)), tuple(kwargs), repr(others))
    if key not in forwards.recorded:
        arguments = [*tensors((args, kwargs))]
        frame = Recording(module, arguments)

        def once() -> Any:
            with frame.running():
                return host()

        with _without_modes():
            output = run(module, once, seed=torch.get_rng_state())
        names = {id(tensor): name for name, value in kwargs.items() for tensor in tensors(value)}
        tokens = [Value(-1, k) for k, tensor in enumerate(arguments) if "mask" not in names.get(id(tensor), "")]
        vectors = {value for value in tokens if arguments[value.position].is_floating_point()}
        ends = [value for tensor in tensors(output) if isinstance(value := frame.value(tensor), Value)]
        plans = tuple(planned(frame.events, {*tokens} - vectors, vectors if forwards.is_model else set(), ends))
        read = (tuple(frame.made[value] for value in (plan.entered, *plan.others)) for plan in plans)
        forwards.recorded[key] = _Recorded(tuple(frame.events), plans, tuple(read))
    forwards.latest = forwards.recorded[key]
    return forwards.latest


def _learn(module: nn.Module, recorded: _Recorded) -> None:
    """Give the regions of a module the calls of a recorded forward."""
    for at, (plan, shapes) in enumerate(zip(recorded.plans, recorded.shapes, strict=True)):
        region = module._modules.get(region_name(at))
        if not isinstance(region, Region):
            raise UncoveredError(
                f"{type(module).__name__} mixes tokens in its own forward, in {len(recorded.plans)} parts for this "
                f"input and in {at} for earlier ones. Make what mixes a module."
            )
        region.learn(shapes, plan)


@contextmanager
def _without_modes() -> Iterator[None]:
    """Hide a run from the function modes around it, but for the device of new tensors."""
    modes = [_pop_mode() for _ in _get_current_function_mode_stack()]
    try:
        with ExitStack() as stack:
            for mode in reversed(modes):
                if isinstance(mode, DeviceContext):
                    stack.enter_context(mode)
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


_copies: "WeakKeyDictionary[nn.Module, dict[str | None, tuple[str, nn.Module]]]" = WeakKeyDictionary()
"""By the path that was asked for: that of the forward with regions, and a copy with a module for each region."""


def regional_model(model: nn.Module, arguments: Mapping[str, Any], path: str | None = None) -> nn.Module | None:
    """Return a model that computes the same, in which regions of a forward that takes ids or pixels are modules.

    The forward is that of the module at `path`, by default of the first one that calls a function by which tokens
    usually mix. The copy shares modules and weights with `model` and does not change it. None without a module that
    mixes tokens of ids in the code of its forward. Runs the model four times.

    Raises `UncoveredError` if what the forward computes depends on numbers of its tokens, or comes out otherwise. None
    too where the copy cannot run, as where a module reads an attribute that a call leaves in another one.
    """
    try:
        return _regional_model(model, arguments, path)
    except AttributeError:
        return None


def _regional_model(model: nn.Module, arguments: Mapping[str, Any], path: str | None) -> nn.Module | None:
    seed = torch.get_rng_state()
    copies = _copies.setdefault(model, {})
    if path not in copies:
        mixer = path if path is not None else next(iter(probable_mixers(model, arguments)), ("", model))[0]
        copies[path] = mixer, _copied(model, mixer)
    path, copied = copies[path]
    inner = _refreshed(copied, model, path)
    # Attributes and numbers that the forward reads may have changed since the last trace.
    forwards = _forwards[inner] = _Forwards(is_model=not path)
    run(copied, arguments, seed=seed)
    recorded = forwards.latest
    if recorded is None or not recorded.plans:
        return None
    for name in map(region_name, range(len(recorded.plans))):
        if not isinstance(inner._modules.get(name), (Region, NoneType)):
            raise UncoveredError(f"{type(model).__name__} has a module {name}, as the parts of its forward are named.")
        inner._modules.setdefault(name, Region())
    forwards.has_regions = True
    _require_same(model, run(model, arguments, seed=seed), run(copied, arguments, seed=seed))
    _learn(inner, recorded)
    return copied


def _require_same(model: nn.Module, expected: Any, output: Any) -> None:
    """Raise `UncoveredError` unless a model's output is the one with its regions as modules."""
    # Masked logits may be infinite.
    pairs = [(a.nan_to_num(), b.nan_to_num()) for a, b in zip(tensors(expected), tensors(output), strict=True)]
    error = max((float((a - b).double().norm() / a.double().norm().clamp_min(1e-30)) for a, b in pairs), default=0.0)
    if not error <= layer_tolerance(torch.float32):
        raise UncoveredError(
            f"{type(model).__name__} mixes tokens in its own forward, whose output differs by {error:.1e} when parts "
            "of it run as modules. Make what mixes a module."
        )


def _copied(model: nn.Module, path: str) -> nn.Module:
    """Return a shallow copy of a model, and of the modules on the way to a path, whose forward calls regions."""
    copied: nn.Module = object.__new__(type(model))
    vars(copied).update(vars(model), _modules=dict(model._modules))
    if path:
        name, _, rest = path.partition(".")
        copied._modules[name] = _copied(model.get_submodule(name), rest)
    else:
        # Bound, so that that of a deep copy is the copy's own.
        vars(copied)["forward"] = MethodType(_forward_of(model), copied)
    return _rebound(copied, model)


def _rebound(copied: nn.Module, model: nn.Module) -> nn.Module:
    """Bind a forward that a model has for itself, as the copy of one with choices does, to its copy."""
    forward = vars(copied).get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is model:
        vars(copied)["forward"] = MethodType(forward.__func__, copied)
    return copied


def _refreshed(copied: nn.Module, model: nn.Module, path: str) -> nn.Module:
    """Give a copy the present attributes and modules of its model; return the module at the path."""
    name, _, rest = path.partition(".")
    forward, inner = vars(copied).get("forward"), copied._modules.get(name) if path else None
    regions = {key: module for key, module in copied._modules.items() if isinstance(module, Region)}
    vars(copied).clear()
    vars(copied).update(vars(model), _modules={**model._modules, **regions})
    if not path:
        vars(copied)["forward"] = forward
        return copied
    assert inner is not None
    copied._modules[name] = inner
    _rebound(copied, model)
    return _refreshed(inner, model.get_submodule(name), rest)
