"""The weights of a host's softmax attention, from the inputs that `attention_interface` recorded."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.call.attention_interface import Attended, cast
from unilinattn.call.call import Call, Captured, package_version
from unilinattn.call.exactness import relative_error, tolerance
from unilinattn.call.nested import tensors
from unilinattn.errors import ModelStateError, UncoveredError
from unilinattn.mixers import CoreMixer, Dense, Softmax


@dataclass(frozen=True)
class AttentionWeights:
    """The attention weights of a layer in the operator's dtype.

    Attributes:
        mixer: the weights as a mixer.
        repeats: number of query heads for each value head.
        context: the attention's result, (batch, query, head * channel).
    """

    mixer: CoreMixer
    repeats: int
    context: Float[Tensor, "batch query channel"]


def attention_weights(call: Call, seen: Captured) -> AttentionWeights:
    """Return the attention weights of a layer, those of a plain softmax computed where they are used.

    Raises `UncoveredError` if the eager function returns no weights.
    """
    record: Attended = seen.record
    value = cast(call, record.value)
    if record.returned is not None:
        return _plain(call, seen, value)
    query, key, mask, options = (cast(call, x) for x in (record.query, record.key, record.mask, dict(record.options)))
    with torch.no_grad():
        context, weights = record.eager(seen.module, query, key, value, mask, **{**options, "dropout": 0.0})
    if weights is None or weights.ndim != 4:
        raise UncoveredError(f"{call.name}: the eager attention of {package_version(call.module)} returns no weights.")
    weights = weights.to(value.dtype).expand(value.shape[0], -1, -1, -1)
    return AttentionWeights(Dense(weights), weights.shape[1] // value.shape[1], context.flatten(2))


def _plain(call: Call, seen: Captured, value: Tensor) -> AttentionWeights:
    """Return the weights of a softmax of scores, a soft cap, a position bias and a mask."""
    record: Attended = seen.record
    # No copies: `_Unchanged` tells of later writes.
    query, key = (x.to(call.input) for x in (record.query, record.key))
    is_boolean = record.mask is not None and record.mask.dtype == torch.bool
    added = (record.options.get("position_bias"), None if is_boolean else record.mask)
    biases = [x.detach().to(query) for x in added if x is not None]
    scale = record.options.get("scaling")
    mixer = Softmax(
        query,
        key,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        mask=record.mask.to(query.device) if record.mask is not None and is_boolean else None,
        bias=sum(biases[1:], biases[0]) if biases else None,
        cap=record.options.get("softcap"),
        causal=record.is_causal,
        unchanged=_Unchanged(call, seen),
    )
    repeats = query.shape[1] // value.shape[1]
    context = record.context
    if context is None or context.dtype != query.dtype or context.device != query.device:
        # The host's rounded result is not that of these values.
        context = mixer.apply(value.repeat_interleave(repeats, dim=1).transpose(1, 2))
    return AttentionWeights(mixer, repeats, context.flatten(2))


def weighted_values(call: Call, seen: Captured, attended: AttentionWeights) -> Float[Tensor, "batch query channel"]:
    """Return the weights times the recorded values, (batch, query, head * channel).

    Raises the error of `require_weighted`.
    """
    with torch.no_grad():
        # `repeats` query heads share a value head.
        values = cast(call, seen.record.value).repeat_interleave(attended.repeats, dim=1)
        mixed = attended.mixer.apply(values.transpose(1, 2)).flatten(2)
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


class _Unchanged:
    """Raises `ModelStateError` if queries, keys or the mask of a layer's attention changed since then."""

    def __init__(self, call: Call, seen: Captured) -> None:
        self._call, self._seen, self._versions = call, seen, _versions(seen.record)

    def __call__(self) -> None:
        if _versions(self._seen.record) != self._versions:
            raise ModelStateError(
                f"{self._call.name}: the queries, keys or mask of its attention were written into since its operator "
                "was built; trace the model again, or take copy.deepcopy(operator), which holds copies, before."
            )


def _versions(record: Attended) -> list[int]:
    """Return how often torch wrote into the tensors that decide the weights."""
    read = tensors((record.query, record.key, record.mask, dict(record.options)))
    return [-1 if x.is_inference() else x._version for x in read]
