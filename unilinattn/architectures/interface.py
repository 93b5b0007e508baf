"""Watch transformers' attention interface: what a host's softmax attention was given, and its weights from that."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.architectures.call import Call, Seen, host_function, package_version
from unilinattn.errors import UncoveredError

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

    with interface(model, handle):
        yield


@contextmanager
def interface(model: nn.Module, handle: Callable[..., Any]) -> Iterator[None]:
    """Let a function stand in for the attention function of a model's modules; all is as before afterwards."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _dispatch)
    # Without a mask function of the same name the mask arrives as None, and causality and padding vanish.
    ALL_MASK_ATTENTION_FUNCTIONS.register(INTERFACE, eager_mask)
    configs = _configs(model)
    before = [(config, config._attn_implementation_internal) for config in configs]
    eager = ALL_ATTENTION_FUNCTIONS.get("eager")
    _handlers.append(handle)
    try:
        ALL_ATTENTION_FUNCTIONS["eager"] = _dispatch
        for config in configs:
            # Attention that selects its keys puts the selection into the mask under transformers' own names alone;
            # other hosts pass the interface by where they are told to be eager.
            config._attn_implementation_internal = "eager" if hasattr(config, "index_topk") else INTERFACE
        yield
    finally:
        _handlers.pop()
        del ALL_ATTENTION_FUNCTIONS["eager"]
        if eager is not None:
            ALL_ATTENTION_FUNCTIONS["eager"] = eager
        for config, implementation in before:
            config._attn_implementation_internal = implementation


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
        cast(call, x) for x in (record.query, record.key, record.value, record.mask, dict(record.options))
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


def cast(call: Call, value: Any) -> Any:
    """Bring an argument, or what is nested in it, to the operator's dtype and device, without gradients."""
    if isinstance(value, Tensor):
        return call.weight(value).detach() if value.is_floating_point() else value.to(call.input.device)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(cast(call, item) for item in value)
    if type(value) is dict:
        return {name: cast(call, item) for name, item in value.items()}
    return value


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
