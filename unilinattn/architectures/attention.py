"""Softmax attention of every host that goes through transformers' attention interface."""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.call import Call, Seen, host_function, package_version
from unilinattn.errors import UncoveredError
from unilinattn.flow import Flow
from unilinattn.mixers import Dense
from unilinattn.registry import register_architecture

INTERFACE = "unilinattn"
"""Name under which the attention function and its mask function are registered in transformers."""

CROSS_ARGUMENTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Names under which transformers' attention modules take the states that they attend to in another stream."""

_handlers: list[Callable[..., tuple[Tensor, Tensor | None]]] = []


@dataclass(frozen=True)
class Attended:
    """One call of the attention function: what the host's module put in, and the file's own eager form of it."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]
    eager: Callable[..., tuple[Tensor, Tensor | None]]


@contextmanager
def capture(model: nn.Module, mark: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """Send every attention of a model through the eager form of its own file, noting what went in.

    The attention implementation of every configuration and sub-configuration is as before afterwards.
    """
    if "transformers" not in sys.modules:
        yield
        return

    def handle(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        eager = host_function(module, "eager_attention_forward")
        mark(module, Attended(query.detach(), key.detach(), value.detach(), mask, options, eager))
        return eager(module, query, key, value, mask, **options)

    with _interface(_configs(model), handle):
        yield


@register_architecture(name="attention", kind="softmax attention", capture=capture, observes=True)
def attention(call: Call) -> Flow:
    """Any attention that goes through transformers' interface: weights recomputed, projections probed and verified.

    HMA ACL Eq. 1. The weights are what the host's own eager function makes of its queries, keys and mask (windows,
    sinks, soft caps, position biases included). The ways into the values and out of the result are found by
    feeding basis vectors to a copy of the module, and are then checked on the observed input; where they are not
    affine (output gates, normed values), `core` works and anything that needs them raises `UncoveredError`.
    """
    seen = only_attention(call)
    weights, repeats = attention_weights(call, seen)
    port, source = value_source(call, seen)
    value, output = probe(call, seen, source)
    flow = Flow(source, port=port)
    add_values(flow, call, seen, value, repeats)
    flow.core(Dense(weights))
    heads, head_dim = weights.shape[1], seen.record.value.shape[-1]
    if call.output is not None:
        with torch.no_grad():
            context = mixed_values(weights, call.weight(seen.record.value), repeats)
            missed = relative_error(functional.linear(context, *output), call.output)
        if missed > tolerance(seen.record.value.dtype):
            reason = _not_affine(call, "from its attention's result to its output", missed, "an output gate")
            return flow.unmapped("output", reason, call.output.shape[-1])
    assert output[0].shape[1] == heads * head_dim
    return flow.matrix(*output, role="output")


def only_attention(call: Call) -> Seen:
    """Return the one call of the attention function inside a layer; raise `UncoveredError` for none or several."""
    if len(call.seen) != 1:
        raise UncoveredError(
            f"{call.name} ({type(call.module).__name__}) called transformers' attention interface {len(call.seen)} "
            "times; only modules that call it once are covered. Register an adapter for this class."
        )
    return call.seen[0]


def attention_weights(call: Call, seen: Seen) -> tuple[Tensor, int]:
    """Recompute the attention weights (batch, head, query, key) in the operator's dtype; also queries a value head.

    Raises `UncoveredError` where weights and values do not give what the eager function returns.
    """
    record: Attended = seen.record
    query, key, value, mask, options = (
        _cast(call, x) for x in (record.query, record.key, record.value, record.mask, dict(record.options))
    )
    with torch.no_grad():
        context, weights = record.eager(seen.module, query, key, value, mask, **{**options, "dropout": 0.0})
        if weights is None or weights.ndim != 4:
            raise UncoveredError(
                f"{call.name}: the eager attention of {package_version(call.module)} returns no weights."
            )
        weights = weights.to(query.dtype).expand(query.shape[0], -1, -1, -1)
        repeats = weights.shape[1] // value.shape[1]
        missed = relative_error(mixed_values(weights, value, repeats), context.flatten(2))
    if missed > tolerance(query.dtype):
        raise UncoveredError(
            f"{call.name} ({type(call.module).__name__}): its attention weights times its values miss its attention's "
            f"result by {missed:.1e}; something beside the weights acts on it. Register an adapter for this class."
        )
    return weights, repeats


def value_source(call: Call, seen: Seen) -> tuple[str, Tensor]:
    """Return the port that the values come from and what it held: the other stream for cross-attention."""
    for name in CROSS_ARGUMENTS:
        states = seen.arguments.get(name)
        if isinstance(states, Tensor):
            return "encoder", call.weight(states.detach())
    return "x", call.input


def add_values(flow: Flow, call: Call, seen: Seen, value: tuple[Tensor, Tensor], repeats: int) -> None:
    """Append the way into the values, each value head repeated for its queries, if it is affine as observed."""
    weight, bias = value
    observed = call.weight(seen.record.value).transpose(1, 2).flatten(2)
    missed = relative_error(functional.linear(flow.value.detach(), weight, bias), observed)
    head_dim = seen.record.value.shape[-1]
    weight = weight.unflatten(0, (-1, head_dim)).repeat_interleave(repeats, dim=0).flatten(0, 1)
    bias = bias.unflatten(0, (-1, head_dim)).repeat_interleave(repeats, dim=0).flatten(0, 1)
    if missed > tolerance(seen.record.value.dtype):
        reason = _not_affine(
            call, "from its input to its values", missed, "a norm on the values, or values kept in a latent"
        )
        flow.unmapped("input", reason, weight.shape[0])
    else:
        flow.matrix(weight, bias, role="input")


def probe(call: Call, seen: Seen, source: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Read off the affine maps into the values and out of the attention's result: ((W_v, b_v), (W_o, b_o)).

    Basis vectors go through a copy of the module as tokens, as many at once as the observed call had (its masks and
    position embeddings have that shape); the attention function hands basis vectors back as its result.
    """
    record: Attended = seen.record
    module = _copy(seen.module, source.dtype)
    batch, heads, queries = record.query.shape[:3]
    width, inner = source.shape[-1], heads * record.value.shape[-1]
    tokens = batch * source.shape[1]
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    basis = _basis(width, source)
    results = _basis(inner, source)

    def handle(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        values.append(value.transpose(1, 2).flatten(2).flatten(0, 1))
        rows = _rows(results, len(outputs) * batch * queries, batch * queries)
        return rows.view(batch, queries, heads, -1), None

    calls = max(-(-(width + 1) // tokens), -(-(inner + 1) // (batch * queries)))
    arguments = {name: _cast(call, value) for name, value in seen.arguments.items()}
    place = next(name for name, value in seen.arguments.items() if _is_source(name, value, source, call))
    with torch.no_grad(), _interface(_configs(module), handle):
        for start in range(calls):
            arguments[place] = _rows(basis, start * tokens, tokens).view(batch, -1, width)
            result = module(**{k: v for k, v in arguments.items() if not k.isdigit()})
            outputs.append((result[0] if isinstance(result, tuple) else result).flatten(0, 1))
    return _affine(torch.cat(values), width), _affine(torch.cat(outputs), inner)


def mixed_values(weights: Tensor, value: Tensor, repeats: int) -> Tensor:
    """Return the attention's result (batch, query, head * channel) from weights and values."""
    return torch.einsum("bhij,bhjp->bihp", weights, value.repeat_interleave(repeats, dim=1)).flatten(2)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return ||got - expected|| / ||expected||."""
    scale = expected.norm().clamp_min(torch.finfo(expected.dtype).tiny)
    return float((got - expected).norm() / scale)


def tolerance(dtype: torch.dtype) -> float:
    """Return how far rounding alone may take a whole layer in a dtype: thousands of its epsilon."""
    return 4096 * torch.finfo(torch.promote_types(dtype, torch.float16)).eps if dtype.itemsize > 2 else 0.05


def _not_affine(call: Call, where: str, missed: float, example: str) -> str:
    host = f"{type(call.module).__name__} of {package_version(call.module)}"
    return (
        f"{call.name} ({host}): the way {where} is not one matrix and one bias (missed by {missed:.1e} on the observed "
        f"input; perhaps {example}). Use scope='core', 'mixer' or 'unified', or register an adapter for this class."
    )


@contextmanager
def _interface(configs: list[Any], handle: Callable[..., Any]) -> Iterator[None]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _dispatch)
    # Without a mask function of the same name the mask arrives as None, and causality and padding vanish.
    ALL_MASK_ATTENTION_FUNCTIONS.register(INTERFACE, eager_mask)
    before = [(config, config._attn_implementation_internal) for config in configs]
    _handlers.append(handle)
    try:
        for config in configs:
            config._attn_implementation_internal = INTERFACE
        yield
    finally:
        _handlers.pop()
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Any:
    return _handlers[-1](module, query, key, value, attention_mask, **options)


def _configs(model: nn.Module) -> list[Any]:
    """Return every configuration that a model or one of its modules holds, sub-configurations included, once each."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config
        waiting.extend(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    return list(found.values())


def _copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    copied = copy.deepcopy(module).to(dtype)
    for inner in copied.modules():
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks):
            hooks.clear()
        inner.__dict__.pop("forward", None)
    return copied


def _cast(call: Call, value: Any) -> Any:
    if isinstance(value, Tensor):
        return call.weight(value).detach() if value.is_floating_point() else value.to(call.input.device)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_cast(call, item) for item in value)
    if type(value) is dict:
        return {name: _cast(call, item) for name, item in value.items()}
    return value


def _is_source(name: str, value: Any, source: Tensor, call: Call) -> bool:
    return (
        isinstance(value, Tensor) and value.shape == source.shape and torch.equal(call.weight(value), source.detach())
    )


def _basis(width: int, like: Tensor) -> Tensor:
    """Return a zero vector and the unit vectors: what reads off a bias and the columns of a matrix."""
    return torch.cat([like.new_zeros(1, width), torch.eye(width, dtype=like.dtype, device=like.device)])


def _rows(rows: Tensor, start: int, count: int) -> Tensor:
    """Return `count` rows from `start` on, zeros where there are no more."""
    picked = rows[start : start + count]
    return functional.pad(picked, (0, 0, 0, count - picked.shape[0]))


def _affine(images: Tensor, width: int) -> tuple[Tensor, Tensor]:
    bias = images[0]
    return (images[1 : width + 1] - bias).T, bias
