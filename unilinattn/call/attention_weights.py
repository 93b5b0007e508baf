"""The weights of a host's softmax attention, from the inputs that `attention_interface` recorded."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from unilinattn.call.attention_interface import Attended, cast
from unilinattn.call.call import Call, Captured, package_version
from unilinattn.call.exactness import relative_error, tolerance
from unilinattn.call.nested import tensors
from unilinattn.errors import ModelStateError, UncoveredError


@dataclass(frozen=True)
class AttentionWeights:
    """The attention weights of a layer in the operator's dtype.

    Attributes:
        weights: (batch, head, query, key).
        repeats: number of query heads for each value head.
        context: the attention's result, (batch, query, head * channel).
        again: computes the weights again from queries, keys and mask; None where these do not decide them alone.
    """

    weights: Float[Tensor, "batch head query key"]
    repeats: int
    context: Float[Tensor, "batch query channel"]
    again: Callable[[], Tensor] | None


def attention_weights(call: Call, seen: Captured) -> AttentionWeights:
    """Return the attention weights of a layer: those of the recorded run if it kept them, else computed again.

    Raises `UncoveredError` if the eager function returns no weights.
    """
    record: Attended = seen.record
    value = cast(call, record.value)
    with torch.no_grad():
        context, weights = _computed(call, record) or _attend(call, seen, value)
        if weights is None or weights.ndim != 4:
            raise UncoveredError(
                f"{call.name}: the eager attention of {package_version(call.module)} returns no weights."
            )
        weights = _by_sequence(weights, value)
    # Parameters of the module, such as sinks, may be elsewhere by then, or other ones, and so may a mode of functions.
    decided = next(seen.module.parameters(recurse=False), None) is None and not _inside_a_mode()
    repeats = weights.shape[1] // value.shape[1]
    return AttentionWeights(weights, repeats, context.flatten(2), _Again(call, seen) if decided else None)


def weighted_values(call: Call, seen: Captured, attended: AttentionWeights) -> Float[Tensor, "batch query channel"]:
    """Return the weights times the recorded values, (batch, query, head * channel).

    Raises the error of `require_weighted`.
    """
    with torch.no_grad():
        # `repeats` query heads share a value head.
        values = cast(call, seen.record.value).repeat_interleave(attended.repeats, dim=1)
        mixed = torch.einsum("bhij,bhjp->bihp", attended.weights, values).flatten(2)
    require_weighted(call, attended, mixed)
    return mixed


def require_weighted(call: Call, attended: AttentionWeights, mixed: Float[Tensor, "batch query channel"]) -> None:
    """Raise `UncoveredError` if the weights times the values differ from the attention's result."""
    missed = relative_error(mixed, attended.context)
    if missed > tolerance("attention", call.input.dtype):
        raise UncoveredError(
            f"{call.name} ({type(call.module).__name__}): its attention weights times its values miss its attention's "
            f"result by {missed:.1e}; something other than the weights acts on it. Register an adapter for this class."
        )


def _computed(call: Call, record: Attended) -> tuple[Tensor, Tensor] | None:
    """Return the result and the weights of the recorded run, None if it released them or had another dtype."""
    result = record.taken()
    if result is None or any(x.dtype != call.input.dtype or x.device != call.input.device for x in result):
        return None
    return result


def _attend(call: Call, seen: Captured, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the result and the weights of a host's eager attention, in the operator's dtype."""
    record: Attended = seen.record
    query, key, mask, options = (cast(call, x) for x in (record.query, record.key, record.mask, dict(record.options)))
    return record.eager(seen.module, query, key, value, mask, **{**options, "dropout": 0.0})


def _by_sequence(weights: Tensor, value: Tensor) -> Float[Tensor, "batch head query key"]:
    return weights.to(value.dtype).expand(value.shape[0], -1, -1, -1)


def _inside_a_mode() -> bool:
    """Tell whether a mode changes torch's functions, as `testing.promoted` does; a default device is no such mode."""
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


class _Again:
    """Computes the attention weights of a layer again.

    Raises `ModelStateError` if queries, keys or the mask changed meanwhile.
    """

    def __init__(self, call: Call, seen: Captured) -> None:
        self._call, self._seen, self._versions = call, seen, _versions(seen.record)

    def __call__(self) -> Float[Tensor, "batch head query key"]:
        record: Attended = self._seen.record
        if _versions(record) != self._versions:
            raise ModelStateError(
                f"{self._call.name}: the queries, keys or mask of its attention were written into since its operator "
                "was built; trace the model again, or take copy.deepcopy(operator), which holds copies, before."
            )
        # The product with the values is not needed.
        value = cast(self._call, record.value[..., :1])
        _, weights = _attend(self._call, self._seen, value)
        assert weights is not None
        return _by_sequence(weights, value)


def _versions(record: Attended) -> list[int]:
    """Return how often torch wrote into the tensors that decide the weights."""
    read = tensors((record.query, record.key, record.mask, dict(record.options)))
    return [-1 if x.is_inference() else x._version for x in read]
