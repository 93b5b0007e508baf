"""Run a model's registered mixers through their operators: for gradients in linear time, and for long inputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from unilinattn.call import CACHES, Call
from unilinattn.call.exactness import layer_tolerance
from unilinattn.call.offloaded import loaded
from unilinattn.errors import FactorError, InputError, UncoveredError
from unilinattn.host.forwards import Forward, replaced_forwards
from unilinattn.host.inputs import bound_arguments
from unilinattn.host.module_calls import Prefix, first_tensor
from unilinattn.operator.flow import Flow
from unilinattn.operator.reconstruction import worst_error
from unilinattn.operator.stages import Mix, walk
from unilinattn.progress import counter
from unilinattn.registry import UNREGISTERED, Architecture, architecture_of

SUBSTITUTE_ABOVE = 8192
"""Default number of tokens above which a trace runs mixers through their operators: hosts' scans need tens of GiB."""

PREFIX = 2048
"""Number of first tokens on which an operator that replaces a host's forward is checked against it."""


@contextmanager
def through_operators(model: nn.Module) -> Iterator[None]:
    """Run every registered mixer of a model through its operator: the same function, differentiable in linear time.

    Useful for training and gradients of hosts whose scan is a slow loop over tokens. The modules' forwards are restored
    at the end, also after an exception. Modules whose adapter needs a capture of the host's run keep their forward.
    Calls of the model from other threads use the operators too; traces in other threads wait for the block to end.
    """

    def operator_of(name: str, module: nn.Module, host: Forward) -> Forward | None:
        architecture = functional(module)
        if architecture is None:
            return None

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = bound_arguments(module, args, kwargs)
            x = first_tensor(arguments.values())
            assert x is not None
            value = build_flow(architecture, called_on(module, name, arguments)).value
            return returned(value.to(x.dtype), architecture, module, arguments)

        return forward

    with replaced_forwards(model, operator_of):
        yield


@contextmanager
def operators_at_length(
    model: nn.Module, mask: Bool[Tensor, "batch length"] | None, note: Callable[[nn.Module, Prefix], None], above: int
) -> Iterator[None]:
    """Run registered causal mixers through their operators on inputs of more than `above` tokens.

    Each operator is checked on the first `PREFIX` tokens of its input against the host's own forward on them; `note`
    is called with the module and the check. A mixer keeps the host's forward if its first outputs depend on later
    tokens, if it gets a cache, or if its adapter needs a capture of the host's run or does not cover the configuration.
    `mask` is True at real tokens.

    Raises `UncoveredError` if operator and host differ by more than `layer_tolerance`, and `InputError` if a
    sequence has no real token to check.
    """

    def operator_of(name: str, module: nn.Module, host: Forward) -> Forward | None:
        architecture = functional(module)
        if architecture is None:
            return None

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = bound_arguments(module, args, kwargs)
            x = first_tensor(arguments.values())
            cached = any(arguments.get(cache) is not None for cache in CACHES)
            if x is None or x.shape[1] <= above or cached:
                return host(*args, **kwargs)
            first = _on_prefix(architecture, called_on(module, name, _cut(arguments, x.shape[1], copy=False)))
            if first is None:
                return host(*args, **kwargs)
            real = _real(mask, x, first.shape[1], name)
            # The host may write into its arguments, so it gets copies and not views of the whole ones.
            expected = host(*_cut(args, x.shape[1]), **_cut(kwargs, x.shape[1]))
            expected = first_tensor(expected if isinstance(expected, (tuple, list)) else (expected,))
            assert expected is not None
            _require_same(first.to(x.dtype), expected, real, name, above)
            flow = build_flow(architecture, called_on(module, name, arguments))
            ports = {port: (entered.shape[0], entered.shape[1]) for port, entered in flow.inputs.items()}
            output = flow.value.to(x.dtype)
            del flow
            prefix = output[:, : first.shape[1]]
            if not worst_error(prefix, first.to(x.dtype), real) <= layer_tolerance(x.dtype):
                # The first outputs depend on the input's length (a kernel normalised over it): a prefix is no check.
                return host(*args, **kwargs)
            note(module, Prefix(expected.detach().clone(), worst_error(prefix, expected, real), ports))
            step()
            return returned(output, architecture, module, arguments)

        return forward

    count = sum(functional(module) is not None for module in model.modules())
    with counter("trace", count) as step, replaced_forwards(model, operator_of):
        yield


def may_be_long(arguments: Mapping[str, Any], above: int) -> bool:
    """Tell whether an input has more than `above` elements per sequence, and so maybe more tokens than that."""
    return any(isinstance(x, Tensor) and x.ndim > 1 and x.numel() > above * len(x) for x in arguments.values())


def build_flow(architecture: Architecture, call: Call) -> Flow:
    """Return the flow that an adapter builds for a call; its factor errors get the layer's name.

    Raises `FactorError` if the layer's input is not finite, and `UncoveredError` if the adapter does not return a
    `Flow`.
    """
    entered = call.input.detach()
    # Extremes take no memory; NaN is both.
    if entered.numel() and not torch.stack(entered.aminmax()).isfinite().all():
        wrong = int((~entered.isfinite()).sum())
        raise FactorError(
            f"{call.name}: its input of shape {tuple(call.input.shape)} holds {wrong} NaN or infinite numbers, so the "
            "model was not finite before this layer; check its inputs and the weights of earlier modules."
        )
    # The check of a module without an adapter builds its flow, which raises the same errors.
    try:
        with loaded(call.module):
            if architecture.check is not None and architecture.name != UNREGISTERED:
                architecture.check(call)
            flow: Any = architecture.build(call)
    except FactorError as error:
        raise FactorError(f"{call.name}: {error}") from None
    if not isinstance(flow, Flow):
        raise UncoveredError(
            f"{call.name} ({type(call.module).__name__}): its adapter {architecture.name!r} "
            f"({architecture.build.__module__}.{architecture.build.__qualname__}) returned {type(flow).__name__}; an "
            "adapter returns the Flow that it built: end it with `return flow`."
        )
    return flow


def functional(module: nn.Module) -> Architecture | None:
    """Return the adapter whose operator can replace a module's forward, None if there is none."""
    architecture = architecture_of(type(module))
    return None if architecture is None or architecture.needs_capture else architecture


def called_on(module: nn.Module, name: str, arguments: Mapping[str, Any]) -> Call:
    """Return a call of a module for its adapter, whose input is at least in float32."""
    x = first_tensor(arguments.values())
    assert x is not None
    return Call(module, name, arguments, x.to(torch.promote_types(x.dtype, torch.float32)))


def returned(output: Tensor, architecture: Architecture, module: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """Return the output in the host's format, with None for each of its extra outputs."""
    extras = architecture.extra_outputs
    if callable(extras):
        extras = extras(module, arguments)
    return (output, *[None] * extras) if extras else output


def _on_prefix(architecture: Architecture, call: Call) -> Tensor | None:
    """Return the operator's output on a prefix, None if it is not causal or the adapter does not cover it."""
    try:
        flow = build_flow(architecture, call)
        stages = [stage for chain in flow.chains.values() for stage in walk(chain)]
        causal = all(stage.mixer.causal for stage in stages if isinstance(stage, Mix))
        return flow.value if causal else None
    except UncoveredError:
        return None


def _real(mask: Tensor | None, x: Tensor, prefix: int, name: str) -> Tensor | None:
    """Return the mask of the prefix's real tokens, None for all; raise `InputError` if a sequence has none."""
    if mask is None or mask.shape != x.shape[:2]:
        return None
    real = mask[:, :prefix].to(x.device)
    if not bool(real.any(1).all()):
        raise InputError(
            f"{name}: a sequence has no real token among the first {prefix}, where operators are checked against the "
            f"host at {x.shape[1]} tokens; pad on the right."
        )
    return real


def _require_same(computed: Tensor, expected: Tensor, real: Tensor | None, name: str, above: int) -> None:
    error, allowed = worst_error(computed, expected, real), layer_tolerance(expected.dtype)
    if not error <= allowed:
        raise UncoveredError(
            f"{name}: above {above} tokens its operator stands in for the host's own forward, and differs from it "
            f"on the first {expected.shape[1]} tokens by {error:.1e} (relative; {allowed:.0e} is allowed in "
            f"{expected.dtype}). Trace at most {above} tokens, or pass a larger substitute_above to run the host's own "
            "forward, if memory is enough."
        )


def _cut(value: Any, length: int, *, copy: bool = True) -> Any:
    """Return the arguments of a call on the first `PREFIX` tokens only.

    The token axis is the only axis of positions, the second axis of ids, masks and states, and the last two axes of a
    mask of pairs of tokens.
    """
    if isinstance(value, Tensor):
        axes = {1: (0,), 2: (1,), 3: (1,)}.get(value.ndim, (-2, -1))
        for axis in axes:
            if value.ndim and value.shape[axis] == length:
                value = value.narrow(axis, 0, min(PREFIX, length))
        return value.clone() if copy else value
    if isinstance(value, Mapping):
        return {key: _cut(item, length, copy=copy) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cut(item, length, copy=copy) for item in value)
    return value
