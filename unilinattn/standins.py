"""A model whose registered mixers run through their operators: to take gradients in linear time, and at length."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from unilinattn.architectures.call import Call
from unilinattn.errors import FactorError, InputError, UncoveredError
from unilinattn.flow import Flow
from unilinattn.frames import Prefix, first_tensor
from unilinattn.operator import worst_error
from unilinattn.progress import counter
from unilinattn.recorder import bound_arguments
from unilinattn.registry import Architecture, architecture_of
from unilinattn.stages import Mix, walk

AT_LENGTH = 8192
"""Tokens above which a trace runs mixers through their operators: hosts' own scans then ask for tens of GiB."""

PREFIX = 2048
"""First tokens on which the host's own forward checks an operator that stands in for it."""

TOLERANCE = {torch.float64: 2e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest relative error of that check: what passes between an operator and a host that is run as it is."""

CACHES = ("cache_params", "past_key_values", "past_key_value", "cache", "state")
"""Arguments by which a host carries states from call to call, which an operator does not write."""

Forward = Callable[..., Any]


@contextmanager
def through_operators(model: nn.Module) -> Iterator[None]:
    """Let every registered mixer of a model run through its operator: the same function, differentiable in linear time.

    Useful to train, or to take gradients of, hosts whose own scan is a slow loop over tokens. Each module's forward
    is put back afterwards, whatever happens. Adapters that need to have observed the host's own run are left out.
    """

    def stand_in(name: str, module: nn.Module, architecture: Architecture, own: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = bound_arguments(module, args, kwargs)
            x = first_tensor(arguments.values())
            assert x is not None
            value = build_flow(architecture, _call(module, name, arguments)).value
            return _returned(value.to(x.dtype), architecture, module)

        return forward

    with _standing_in(model, stand_in):
        yield


@contextmanager
def operators_at_length(
    model: nn.Module, mask: Bool[Tensor, "batch length"] | None, note: Callable[[nn.Module, Prefix], None]
) -> Iterator[None]:
    """Let registered causal mixers run through their operators where they get more than `AT_LENGTH` tokens.

    Each is checked on the first `PREFIX` tokens of its input against the host's own forward on these; `note` takes
    the module and what the host returned. Mixers whose first outputs depend on what comes later, that get a cache, or
    whose adapter needs to have observed the host or does not cover this configuration go on through the host. `mask`
    tells real tokens.

    Raises `UncoveredError` where operator and host differ by more than `TOLERANCE`, `InputError` where a sequence has
    no real token to check.
    """

    def stand_in(name: str, module: nn.Module, architecture: Architecture, own: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = bound_arguments(module, args, kwargs)
            x = first_tensor(arguments.values())
            cached = any(arguments.get(cache) is not None for cache in CACHES)
            if x is None or x.shape[1] <= AT_LENGTH or cached:
                return own(*args, **kwargs)
            first = _on_prefix(architecture, _call(module, name, _cut(arguments, x.shape[1], copy=False)))
            if first is None:
                return own(*args, **kwargs)
            real = _real(mask, x, first.shape[1], name)
            # The host may write into its arguments, and these must not be parts of the whole ones.
            expected = own(*_cut(args, x.shape[1]), **_cut(kwargs, x.shape[1]))
            expected = first_tensor(expected if isinstance(expected, (tuple, list)) else (expected,))
            assert expected is not None
            _require_same(first.to(x.dtype), expected, real, name)
            flow = build_flow(architecture, _call(module, name, arguments))
            ports = {port: (given.shape[0], given.shape[1]) for port, given in flow.inputs.items()}
            output = flow.value.to(x.dtype)
            del flow
            begins = output[:, : first.shape[1]]
            if not worst_error(begins, first.to(x.dtype), real) <= TOLERANCE[x.dtype]:
                # It depends on how long the input is (a kernel that is normalised over it): a prefix checks nothing.
                return own(*args, **kwargs)
            note(module, Prefix(expected.detach().clone(), worst_error(begins, expected, real), ports))
            step()
            return _returned(output, architecture, module)

        return forward

    known = sum(_architecture(module) is not None for module in model.modules())
    with counter("trace", known) as step, _standing_in(model, stand_in):
        yield


def may_be_long(given: Mapping[str, Any]) -> bool:
    """Tell whether inputs hold enough numbers a sequence to make more than `AT_LENGTH` tokens."""
    return any(isinstance(x, Tensor) and x.ndim > 1 and x.numel() > AT_LENGTH * len(x) for x in given.values())


def build_flow(architecture: Architecture, call: Call) -> Flow:
    """Let an adapter build its flow, and put the layer's name into what it raises about factors."""
    try:
        flow: Flow = architecture.build(call)
    except FactorError as error:
        raise FactorError(f"{call.name}: {error}") from None
    return flow


@contextmanager
def _standing_in(
    model: nn.Module, stand_in: Callable[[str, nn.Module, Architecture, Forward], Forward]
) -> Iterator[None]:
    """Put other forwards in the place of those of registered mixers, and back whatever happens."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            architecture = _architecture(module)
            if architecture is not None:
                own = module.__dict__.get("forward")
                stack.callback(_restore_forward, module, own)
                module.forward = stand_in(name, module, architecture, module.forward)
        yield


def _architecture(module: nn.Module) -> Architecture | None:
    """Return the adapter that can stand in for a module, None if there is none."""
    architecture = architecture_of(type(module))
    return None if architecture is None or architecture.observes else architecture


def _call(module: nn.Module, name: str, arguments: Mapping[str, Any]) -> Call:
    x = first_tensor(arguments.values())
    assert x is not None
    return Call(module, name, arguments, x.to(torch.promote_types(x.dtype, torch.float32)))


def _returned(output: Tensor, architecture: Architecture, module: nn.Module) -> Any:
    """Return what the host would, with nothing in the place of what goes with its output."""
    extras = architecture.extras(module) if callable(architecture.extras) else architecture.extras
    return (output, *[None] * extras) if extras else output


def _on_prefix(architecture: Architecture, call: Call) -> Tensor | None:
    """Return the operator's output on a prefix, None where it is not causal or not covered by the adapter."""
    try:
        flow = build_flow(architecture, call)
        stages = [stage for chain in flow.chains.values() for stage in walk(chain)]
        causal = all(stage.mixer.causal for stage in stages if isinstance(stage, Mix))
        return flow.value if causal else None
    except UncoveredError:
        return None


def _real(mask: Tensor | None, x: Tensor, prefix: int, name: str) -> Tensor | None:
    """Return which tokens of the prefix are real, None for all; raise where a sequence has none."""
    if mask is None or mask.shape != x.shape[:2]:
        return None
    real = mask[:, :prefix].to(x.device)
    if not bool(real.any(1).all()):
        raise InputError(
            f"{name}: a sequence has no real token among the first {prefix}, where operators are checked against the "
            f"host at {x.shape[1]} tokens; pad on the right."
        )
    return real


def _require_same(own: Tensor, expected: Tensor, real: Tensor | None, name: str) -> None:
    error, allowed = worst_error(own, expected, real), TOLERANCE[expected.dtype]
    if not error <= allowed:
        raise UncoveredError(
            f"{name}: above {AT_LENGTH} tokens its operator stands in for the host's own forward, and differs from it "
            f"on the first {expected.shape[1]} tokens by {error:.1e} (relative; {allowed:.0e} is allowed in "
            f"{expected.dtype}). Trace at most {AT_LENGTH} tokens, or set unilinattn.standins.AT_LENGTH higher to run "
            "the host's own forward, if memory is enough."
        )


def _cut(value: Any, length: int, *, copy: bool = True) -> Any:
    """Return arguments of a call on the first tokens alone.

    Tokens are the only axis of positions, the second axis of ids, masks and states, and both last axes of a mask of
    pairs of tokens.
    """
    if isinstance(value, Tensor):
        axes = {1: (0,), 2: (1,), 3: (1,)}.get(value.ndim, (-2, -1))
        for axis in axes:
            if value.ndim and value.shape[axis] == length:
                value = value.narrow(axis, 0, min(PREFIX, length))
        return value.clone() if copy else value
    if isinstance(value, Mapping):
        return {key: _cut(part, length, copy=copy) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cut(part, length, copy=copy) for part in value)
    return value


def _restore_forward(module: nn.Module, own: Forward | None) -> None:
    if own is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = own
