"""Modules without an adapter: their operator is read from the functions of torch that they call."""

import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, reduce
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unilinattn.call import CACHES, Call
from unilinattn.call.axes import in_shape, token_axis
from unilinattn.call.copies import copied
from unilinattn.call.exactness import layer_tolerance, relative_error
from unilinattn.call.functions import plain_functions
from unilinattn.call.nested import mapped, tensors, unlisted
from unilinattn.errors import UncoveredError
from unilinattn.mixers import Gather
from unilinattn.operator.flow import Flow
from unilinattn.operator.scopes import has_core, scoped
from unilinattn.operator.stages import Chain, Matrix, channel_groups, walk
from unilinattn.recording.chains import chains_of, stored
from unilinattn.recording.frozen_module import frozen_module
from unilinattn.recording.graph import Recording
from unilinattn.recording.keys import Keys, called, keys_of
from unilinattn.recording.ports import Ports
from unilinattn.registry import register_architecture, visible_functions

MANY = 64
"""Largest number of stages that a module without a map takes, rather than one."""

RANDOM = 0.1
"""Least relative difference of two outputs for one input by which a module is no function of it, in any dtype."""

OTHER = "x (argument)"
"""The port of an argument named x that is not the layer's input, whose port has this name."""

Shapes = tuple[tuple[torch.Size, ...], ...]
"""The shapes of the tensors in each argument of a call."""

Remembered = dict[tuple[object, ...], dict[Shapes, Mapping[str, bool]]]
"""The results of `passed_ports`, by the dtypes and then by the shapes of the call."""

_passed: "WeakKeyDictionary[nn.Module, tuple[object, Remembered]]" = WeakKeyDictionary()
"""What is remembered of a module, with the weights for which it holds; training replaces it."""


def passed_ports(call: Call) -> Mapping[str, bool]:
    """Tell for each port of a module whether its values are added to the output without any stage.

    The module is recorded once for its weights, and again when an axis of an argument is longer. Arguments by which it
    would run other functions are found when the operator is built. Raises the errors of `recorded_stages`.
    """
    weights = tuple((id(p), -1 if p.is_inference() else p._version) for p in call.module.parameters())
    dtypes = tuple((name, tuple(t.dtype for t in tensors(value))) for name, value in call.arguments.items())
    shapes = tuple(tuple(t.shape for t in tensors(value)) for value in call.arguments.values())
    if call.module not in _passed or _passed[call.module][0] != weights:
        _passed[call.module] = weights, {}
    remembered = _passed[call.module][1].setdefault((call.input.dtype, dtypes), {})
    # A state from an earlier call is no port, and is told by what the module returns without it.
    states = any(call.arguments.get(name) is not None for name in CACHES)
    earlier_ports = (ports for earlier, ports in remembered.items() if _covers(earlier, shapes))
    ports = None if states else next(earlier_ports, None)
    if ports is None:
        chains = recorded_stages(call).chains
        ports = remembered[shapes] = {port: not chain for port, chain in chains.items()}
    return ports


def _covers(earlier: Shapes, shapes: Shapes) -> bool:
    """Tell whether no axis of as many tensors is longer than in an earlier call."""
    pairs = [pair for sides in zip(earlier, shapes, strict=True) for pair in zip(*sides, strict=True)]
    return all(len(a) == len(b) and all(m >= n for m, n in zip(a, b, strict=True)) for a, b in pairs)


def _check(call: Call) -> None:
    """Raise `UncoveredError` unless the module can be recorded (see `passed_ports`)."""
    passed_ports(call)


@register_architecture(name="recorded", kind="recorded", needs_capture=True, check=_check)
def recorded(call: Call) -> Flow:
    """Any module, from the functions that it calls: its sums over tokens are the core.

    The module runs once more, and its functions are recorded. From its output back, each one becomes a stage: a linear
    layer a matrix, a sum over tokens with frozen weights a token mixer, whatever made the weights, an activation or a
    norm a frozen scale, a sum a branch. The stages are compared with the module's output. A number for each query and
    head right after the core, such as the denominator of a softmax, scales the core's rows.

    The input of a call whose graph is kept requires a gradient: gates are then in the graph, as the mode of the run
    (`rules.freezing`) computes them.

    Raises `UncoveredError` with the function that is no stage.
    """
    flow = recorded_stages(call)
    if any(stage.mixes for chain in flow.chains.values() for stage in chain):
        return flow
    # Its factors depend on other tokens and its values do not, as in attention over channels.
    diagonals = [_diagonal(flow.inputs[port], port, chain) for port, chain in flow.chains.items()]
    diagonal = reduce(Flow.merge, diagonals)
    diagonal.is_recorded = True
    return diagonal


def _diagonal(x: Tensor, port: str, chain: Chain) -> Flow:
    """Return the flow of stages that mix no tokens, behind a core that reads each token."""
    batch, length = x.shape[:2]
    tokens = torch.arange(length, device=x.device).expand(batch, -1)
    flow = Flow(x, port=port).core(Gather(tokens, length, like=x))
    for stage in chain:
        flow.stage(replace(stage, role="output") if isinstance(stage, Matrix) else stage)
    return flow


def recorded_stages(call: Call) -> Flow:
    """Return the stages of a module, which need not mix tokens.

    An argument with heads, such as the values of an earlier layer, is a port; it is a factor where it cannot be. A
    vector of each sequence, such as that of a time, is a factor. It is one token where it cannot be, as where the
    module adds it to values.
    """
    heads = _heads(call)
    try:
        return _stages(call, (), heads)
    except UncoveredError:
        vectors = [name for name, value in unlisted(call.arguments).items() if _is_vector(value, call)]
        for single in (*([()] if heads else []), *([vectors] if vectors else [])):
            with suppress(UncoveredError):
                return _stages(call, single, {})
        _require_told_heads(call)
        raise


def _stages(call: Call, single: Collection[str], heads: Mapping[str, int]) -> Flow:
    """Return the stages of a module.

    The arguments `single` have one vector of each sequence, and `heads` have tokens along an axis beside their heads.
    """
    module, arguments = _promoted(call)
    is_live = call.input.requires_grad
    by_name = unlisted(arguments)
    entered = next((v for v in by_name.values() if _has_tokens(v) and v.numel() == call.input.numel()), None)
    axes = 3 if entered is None else entered.ndim
    masks = {name: value for name, value in by_name.items() if name in call.masks}
    streams = {n: v for n, v in by_name.items() if n not in masks and (_is_stream(v, axes) or n in single)}
    fitting = [name for name, value in streams.items() if value.numel() == call.input.numel()]
    if not fitting:
        raise UncoveredError(f"{_named(call)}: none of its arguments is (batch, token, channel).")
    # Of several tensors of one size, the layer's input has its values.
    shape = streams[fitting[0]].shape
    # (token, batch, channel)
    transposed = axes == 3 and call.axes.inputs == -1 and shape[:2] != call.input.shape[:2]
    read = in_shape(call.input.transpose(0, 1) if transposed else call.input, shape, call.axes.inputs)
    flat = read.detach().flatten()
    first = next((name for name in fitting if torch.equal(streams[name].flatten(), flat)), fitting[0])
    if is_live:
        recorded_input = streams[first]
        arguments, streams = mapped((arguments, streams), lambda t: read if t is recorded_input else t)
    inputs = {"x": streams.pop(first)}
    # A cache is left out.
    streams |= {name: value for name, value in unlisted(arguments).items() if name in heads}
    inputs = _distinct(inputs | {OTHER if name == "x" else name: value for name, value in streams.items()})
    factors = {n: v for n, v in unlisted(arguments).items() if n != first and n not in streams and n not in masks}
    heads = {OTHER if name == "x" else name: axis for name, axis in heads.items()}
    ports = Ports(call, inputs, heads, transposed)
    recording = Recording(module, inputs, heads, factors, masks)
    try:
        with torch.set_grad_enabled(is_live), plain_functions(module), visible_functions(module), recording:
            # Hooks of the module itself change what it returns, and the layer is its forward.
            positional, named = _positional(module, arguments)
            returned = called(module, positional, named)
    # A host, and its kernels, may raise any error.
    except Exception as error:
        raise UncoveredError(
            f"{_named(call)} ran inside the model, and raises {type(error).__name__} when it runs again: {error}. "
            "If the model changes itself in its first call, as BigBird does for a short text, call it once before the "
            "trace; else register an adapter for this class."
        ) from error
    if recording.differentiates:
        raise UncoveredError(
            f"{_named(call)}: it computes gradients while it runs, such as those of a memory that learns from its "
            "tokens, and what these move from token to token is not recorded, so it has no operator."
        )
    output = _main(returned)
    node = recording.node(output)
    if output is None or node is None:
        raise UncoveredError(f"{_named(call)}: its output does not depend on its inputs by functions of torch.")
    chains: Mapping[str, Chain] | None = None
    with torch._C.DisableTorchFunction():
        keys = keys_of(node)
    try:
        with torch._C.DisableTorchFunction():
            chains = chains_of(node, call.input, call.axes, keys, transposed=transposed)
            chains = {port: stored(chain, _weights(call, module), call.input) for port, chain in chains.items()}
        reason = _without_map(chains, call.input)
    # A function may have arguments of a kind that its rule does not expect.
    except Exception as error:
        reason = str(error) if isinstance(error, UncoveredError) else f"its functions are no stages ({error})"
    if reason is not None and not is_live:
        chains = _whole(ports, module, arguments, factors, masks, reason, keys) or chains
    if chains is None:
        batch, length = call.input.shape[:2]
        square = (
            f" Its input has {batch} sequences of {length} tokens: if tokens come before sequences in it, trace "
            "another number of sequences, which tells them apart."
        )
        raise UncoveredError(f"{_named(call)}: {reason}.{square if batch == length > 1 else ''}")
    flow = _flow(ports, chains)
    flow.is_recorded = True
    _require_output(call, module, flow.value.detach(), ports.output(output).detach())
    return flow


def _require_output(call: Call, module: nn.Module, actual: Tensor, expected: Tensor) -> None:
    """Raise `UncoveredError` if the stages give another output than the recorded run, or this than the host's."""
    missed = relative_error(actual.reshape(1, -1), expected.reshape(1, -1))
    if not missed <= layer_tolerance(call.input.dtype):
        raise UncoveredError(
            f"{_named(call)}: the functions that it calls give its output with an error of {missed:.1e}, so one of "
            "them was not seen, such as a compiled kernel. Register an adapter for this class."
        )
    if call.output is not None and call.output.shape == actual.shape:
        repeated = relative_error(actual.reshape(1, -1), call.output.reshape(1, -1))
        if not repeated <= RANDOM:
            again = "again, as a module does that draws random numbers or keeps a state"
            if module is not call.module:
                again = (
                    f"in {call.input.dtype}, in which operators compute, so the host's numbers are not its formula's"
                )
            raise UncoveredError(
                f"{_named(call)}: for the same input it returns an output that differs by {repeated:.1e} when it runs "
                f"{again}."
            )


def _without_map(chains: Mapping[str, Chain], x: Tensor) -> str | None:
    """Return why a loop over tokens is better one stage than many: these take longer, and give no map either."""
    count = sum(1 for chain in chains.values() for _ in walk(chain))
    cores = (scoped(chain, "core", x.shape[-1])[0] for chain in chains.values() if has_core(chain))
    if count <= MANY or any(channel_groups(core) is not None for core in cores):
        return None
    return f"its code has {count} steps, as a loop over tokens has, and they mix channels"


def _whole(
    ports: Ports,
    module: nn.Module,
    arguments: Mapping[str, Any],
    factors: Any,
    masks: Any,
    reason: str,
    keys: Keys,
) -> Mapping[str, Chain] | None:
    """Return the module as one stage from each input, None if its functions have no rules or derivatives."""
    names = {id(value): port for port, value in ports.inputs.items()}

    def compute(values: Mapping[str, Tensor]) -> Tensor | None:
        def entered(tensor: Tensor) -> Tensor:
            port = names.get(id(tensor))
            return tensor if port is None else ports.argument(port, values[port])

        positional, named = _positional(module, {name: mapped(value, entered) for name, value in arguments.items()})
        with plain_functions(module):
            output = _main(called(module, positional, named))
        return None if output is None else ports.output(output)

    vectors = {port: ports.vectors(port) for port in ports.inputs}
    try:
        return frozen_module(module, vectors, compute, factors, masks, reason, keys)
    # A host may raise any error, and the one of its functions tells more.
    except Exception:
        return None


def _main(returned: Any) -> Tensor | None:
    """Return the first tensor of vectors that a module returned."""
    return next((t for t in tensors(returned) if t.is_floating_point() and t.ndim >= 2), None)


def _flow(ports: Ports, chains: Mapping[str, Any]) -> Flow:
    """Return the flow of the chains from each port, which are summed."""
    flow: Flow | None = None
    # The port whose tokens are mixed comes first: methods read its map.
    ordered = sorted(chains, key=lambda port: not any(stage.mixes for stage in chains[port]))
    for port, chain in ((port, chains[port]) for port in ordered):
        branch = Flow(ports.vectors(port), port=port)
        for stage in chain:
            branch.stage(stage)
        flow = branch if flow is None else flow.merge(branch)
    assert flow is not None
    return flow


def _promoted(call: Call) -> tuple[nn.Module, dict[str, Any]]:
    """Return the module and its arguments in the operator's dtype; the module itself if it has that dtype."""
    dtype, module = call.input.dtype, call.module
    if any(p.is_floating_point() and p.dtype != dtype for p in (*module.parameters(), *module.buffers())):
        module = copied(module).to(dtype)

    @cache
    def cast(tensor: Tensor) -> Tensor:
        # Arguments that are one tensor stay one.
        return call.tensor(tensor).detach() if tensor.is_floating_point() else tensor

    # A cache has the states of the traced call.
    uncached = {name: None if name in CACHES else value for name, value in call.arguments.items()}
    arguments = {name: mapped(value, cast) for name, value in uncached.items()}
    return module, arguments


def _weights(call: Call, module: nn.Module) -> Mapping[int, tuple[Tensor, Tensor]]:
    """Return the weights of the module that was recorded with the model's, by the storages of the former."""
    pairs = zip(module.parameters(), call.module.parameters(), strict=True)
    return {
        recorded.untyped_storage()._cdata: (recorded, weight.detach())
        for recorded, weight in pairs
        if recorded.stride() == weight.stride()
    }


def _positional(module: nn.Module, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments by position and by name; those of `*args` are named by their numbers."""
    numbers = sorted((name for name in arguments if name.isdigit()), key=int)
    if not numbers:
        return [], dict(arguments)
    parameters = inspect.signature(module.forward).parameters.values()
    leading = [p.name for p in takewhile(lambda p: p.kind is not p.VAR_POSITIONAL, parameters) if p.name in arguments]
    named = {name: value for name, value in arguments.items() if name not in (*leading, *numbers)}
    return [arguments[name] for name in (*leading, *numbers)], named


def _distinct(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first port of each tensor: queries, keys and values of self-attention are one."""
    ports: dict[int, str] = {}
    for port, value in inputs.items():
        ports.setdefault(id(value), port)
    return {port: inputs[port] for port in ports.values()}


def _has_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2


def _is_stream(value: Any, axes: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == axes


def _heads(call: Call) -> dict[str, int]:
    """Return the axis of tokens of each argument (batch, head, token, channel) or with the tokens first, by its name.

    The layer's input has neither heads nor rows and columns.
    """
    if call.axes.inputs != -1 or not any(_is_stream(value, 3) for value in unlisted(call.arguments).values()):
        return {}
    arguments = ((n, v) for n, v in unlisted(call.arguments).items() if _is_stream(v, 4) and n not in call.masks)
    axes = ((name, token_axis(value.shape, *call.input.shape[:2])) for name, value in arguments)
    return {name: axis for name, axis in axes if axis is not None}


def _require_told_heads(call: Call) -> None:
    """Raise `UncoveredError` for an argument with as many heads as tokens, whose tokens are not told apart."""
    length = call.input.shape[1]
    for name, value in unlisted(call.arguments).items():
        if _is_stream(value, 4) and value.shape[1] == value.shape[2] == length and name not in call.masks:
            raise UncoveredError(
                f"{_named(call)}: its argument {name!r} {tuple(value.shape)} has as many heads as tokens, so it is "
                "unknown which axis is which; trace another number of tokens."
            )


def _is_vector(value: Any, call: Call) -> bool:
    """Tell whether an argument has one vector of each sequence of a call, whose input has several."""
    rows = len(call.input)
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2 and len(value) == rows


def _named(call: Call) -> str:
    return f"{call.name} ({type(call.module).__module__}.{type(call.module).__qualname__})"
