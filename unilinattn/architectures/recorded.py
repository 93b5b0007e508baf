"""Modules without an adapter: their operator is read from the functions of torch that they call."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache, reduce
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unilinattn.call import CACHES, Call
from unilinattn.call.axes import in_shape
from unilinattn.call.copies import copied
from unilinattn.call.exactness import layer_tolerance, relative_error
from unilinattn.call.functions import plain_functions
from unilinattn.call.nested import mapped, tensors, unlisted
from unilinattn.errors import UncoveredError
from unilinattn.mixers import Gather
from unilinattn.operator.flow import Flow
from unilinattn.operator.stages import Chain, Matrix
from unilinattn.recording.chains import chains_of, choices_of, stored
from unilinattn.recording.compilation import is_carried
from unilinattn.recording.core_chains import chains_around_core, count, without_map
from unilinattn.recording.frozen_module import frozen_module
from unilinattn.recording.graph import Recording
from unilinattn.recording.inner_core import Made
from unilinattn.recording.keys import Keys, called, keys_of
from unilinattn.recording.nodes import Position
from unilinattn.recording.ports import (
    Ports,
    distinct,
    has_tokens,
    heads_of,
    is_stream,
    is_vector,
    named_call,
    positional_and_named,
    require_told_heads,
)
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
    head right after the core, such as the denominator of a softmax, scales the core's rows, and one for each key and
    head right before it, which is no norm of the values, its columns.

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
    heads, refusals = heads_of(call), list[UncoveredError]()
    for single, read in _readings(call, heads):
        try:
            return _stages(_recorded(call, single, read))
        except UncoveredError as error:
            refusals.append(error)
    require_told_heads(call)
    raise refusals[0]


def _readings(call: Call, heads: Mapping[str, int]) -> Iterator[tuple[Collection[str], Mapping[str, int]]]:
    """Yield the arguments that are one vector of each sequence, and those with heads, in the order of the trials."""
    yield (), heads
    if heads:
        yield (), {}
    if vectors := [name for name, value in unlisted(call.arguments).items() if is_vector(value, call)]:
        yield vectors, {}


def chosen_values(call: Call) -> Mapping[Position, list[int]]:
    """Return which operands of a module's products are values, behind all tensors that it returns, by their calls."""
    choices: dict[Position, list[int]] = {}
    for single, heads in _readings(call, heads_of(call)):
        try:
            recorded = _recorded(call, single, heads)
        except UncoveredError:
            continue
        is_read = True
        for tensor in (recorded.output, *tensors(recorded.returned)):
            node = recorded.recording.node(tensor)
            if node is None or not is_carried(node):
                continue
            # A function may have arguments of a kind that its rule does not expect.
            try:
                with torch._C.DisableTorchFunction():
                    behind = choices_of(node, call.input, call.axes, transposed=recorded.ports.transposed)
                # Those of an earlier reading, and of the output, hold.
                choices = {**behind, **choices}
            except Exception:
                is_read = is_read and tensor is not recorded.output
        if is_read:
            break
    return choices


class _Recorded(NamedTuple):
    """A module's run with its functions recorded.

    Attributes:
        ports: its arguments that carry tokens.
        recording: its functions.
        module, arguments: the module and its arguments in the operator's dtype.
        factors, masks: the arguments that may depend on tokens and are no ports, and those that do not.
        returned, output: what it returned, and its output.
    """

    ports: Ports
    recording: Recording
    module: nn.Module
    arguments: dict[str, Any]
    factors: dict[str, Any]
    masks: dict[str, Any]
    returned: Any
    output: Tensor


def _recorded(call: Call, single: Collection[str], heads: Mapping[str, int]) -> _Recorded:
    """Run a module once more and record its functions.

    The arguments `single` have one vector of each sequence, and `heads` have tokens along an axis beside their heads.
    """
    module, arguments = _promoted(call)
    is_live = call.input.requires_grad
    by_name = unlisted(arguments)
    entered = next((v for v in by_name.values() if has_tokens(v) and v.numel() == call.input.numel()), None)
    axes = 3 if entered is None else entered.ndim
    masks = {name: value for name, value in by_name.items() if name in call.masks}
    streams = {n: v for n, v in by_name.items() if n not in masks and (is_stream(v, axes) or n in single)}
    fitting = [name for name, value in streams.items() if value.numel() == call.input.numel()]
    if not fitting:
        raise UncoveredError(f"{named_call(call)}: none of its arguments is (batch, token, channel).")
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
    inputs = distinct(inputs | {OTHER if name == "x" else name: value for name, value in streams.items()})
    factors = {n: v for n, v in unlisted(arguments).items() if n != first and n not in streams and n not in masks}
    heads = {OTHER if name == "x" else name: axis for name, axis in heads.items()}
    ports = Ports(call, inputs, heads, transposed)
    recording = Recording(module, inputs, heads, factors, masks)
    try:
        with torch.set_grad_enabled(is_live), plain_functions(module), visible_functions(module), recording:
            # Hooks of the module itself change what it returns, and the layer is its forward.
            positional, named = positional_and_named(module, arguments)
            returned = called(module.forward, positional, named)
    # A host, and its kernels, may raise any error.
    except Exception as error:
        raise UncoveredError(
            f"{named_call(call)} ran inside the model, and raises {type(error).__name__} when it runs again: {error}. "
            "If the model changes itself in its first call, as BigBird does for a short text, call it once before the "
            "trace; else register an adapter for this class."
        ) from error
    if recording.differentiates:
        raise UncoveredError(
            f"{named_call(call)}: it computes gradients while it runs, such as those of a memory that learns from its "
            "tokens, and what these move from token to token is not recorded, so it has no operator."
        )
    output = _main(returned)
    if output is None or recording.node(output) is None:
        raise UncoveredError(f"{named_call(call)}: its output does not depend on its inputs by functions of torch.")
    return _Recorded(ports, recording, module, arguments, factors, masks, returned, output)


def _stages(recorded: _Recorded) -> Flow:
    """Return the stages of a module."""
    ports, module, call = recorded.ports, recorded.module, recorded.ports.call
    node = recorded.recording.node(recorded.output)
    assert node is not None
    chains: Mapping[str, Chain] | None = None
    with torch._C.DisableTorchFunction():
        keys = keys_of(node)
    try:
        with torch._C.DisableTorchFunction():
            chains = chains_of(node, call.input, call.axes, keys, transposed=ports.transposed)
        reason = without_map(chains, call.input.shape[-1])
    # A function may have arguments of a kind that its rule does not expect.
    except Exception as error:
        reason = str(error) if isinstance(error, UncoveredError) else f"its functions are no stages ({error})"
    if reason is not None:
        chains = _from_graph(recorded, chains, reason, keys) or chains
    if chains is None:
        batch, length = call.input.shape[:2]
        square = (
            f" Its input has {batch} sequences of {length} tokens: if tokens come before sequences in it, trace "
            "another number of sequences, which tells them apart."
        )
        raise UncoveredError(f"{named_call(call)}: {reason}.{square if batch == length > 1 else ''}")
    flow = _flow(ports, {port: stored(chain, _weights(call, module), call.input) for port, chain in chains.items()})
    flow.is_recorded = True
    _require_output(call, module, flow.value.detach(), ports.output(recorded.output).detach())
    return flow


def _require_output(call: Call, module: nn.Module, actual: Tensor, expected: Tensor) -> None:
    """Raise `UncoveredError` if the stages give another output than the recorded run, or this than the host's."""
    missed = relative_error(actual.reshape(1, -1), expected.reshape(1, -1))
    if not missed <= layer_tolerance(call.input.dtype):
        raise UncoveredError(
            f"{named_call(call)}: the functions that it calls give its output with an error of {missed:.1e}, so one of "
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
                f"{named_call(call)}: for the same input it returns an output that differs by {repeated:.1e} when it "
                f"runs {again}."
            )


def _from_graph(
    recorded: _Recorded, chains: Mapping[str, Chain] | None, reason: str, keys: Keys
) -> Mapping[str, Chain] | None:
    """Return stages with a part of the module's graph as core, or the module as one stage if it has no others or many.

    `reason` says why its stages `chains` have no map.
    """
    call, node, whole = recorded.ports.call, recorded.recording.node(recorded.output), _whole(recorded, reason, keys)
    if whole is None or node is None:
        return None
    single, made = whole
    if not recorded.ports.transposed:
        with_core = chains_around_core(node, call.input, call.axes, keys, single, made)
        if with_core is not None:
            return with_core
    is_live = call.input.requires_grad
    return single if not is_live and (chains is None or count(chains) > MANY) else None


def _whole(recorded: _Recorded, reason: str, keys: Keys) -> tuple[Mapping[str, Chain], Made] | None:
    """Return the module as one stage from each input, and the tensors with tokens of its graph.

    None if its functions have no rules or derivatives.
    """
    ports, module = recorded.ports, recorded.module
    names = {id(value): port for port, value in ports.inputs.items()}

    def compute(values: Mapping[str, Tensor]) -> Tensor | None:
        def entered(tensor: Tensor) -> Tensor:
            port = names.get(id(tensor))
            return tensor if port is None else ports.argument(port, values[port])

        positional, named = positional_and_named(module, mapped(recorded.arguments, entered))
        with plain_functions(module):
            output = _main(called(module.forward, positional, named))
        return None if output is None else ports.output(output)

    vectors = {port: ports.vectors(port) for port in ports.inputs}
    try:
        return frozen_module(module, vectors, compute, recorded.factors, recorded.masks, reason, keys)
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
