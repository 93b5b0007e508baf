"""Softmax attention of every host that calls transformers' attention interface."""

from unilinattn.architectures.attention_weights import attention_weights, require_weighted, weighted_values
from unilinattn.architectures.probe import probe, with_output, with_values
from unilinattn.architectures.recorded import recorded
from unilinattn.call import Call
from unilinattn.call.attention_interface import (
    capture,
    only_attention,
    require_same_tokens,
    value_source,
)
from unilinattn.errors import UncoveredError
from unilinattn.operator.flow import Flow
from unilinattn.operator.stages import Unmapped
from unilinattn.registry import register_architecture


@register_architecture(
    name="attention", kind="softmax attention", capture=capture, needs_capture=True, check=require_same_tokens
)
def attention(call: Call) -> Flow:
    """Softmax attention behind transformers' interface: weights of captured queries, projections probed and verified.

    HMA ACL Eq. 1. `mixers.Softmax` computes the weights from the captured queries, keys and mask (windows, soft caps
    and position biases included), where they are used, and the host's eager function those that sinks decide. The maps
    from the input to the values and from the result to the output, an output gate included, are read off by feeding
    basis vectors to a copy of the module, and are then checked on the observed input. Where they are not affine (normed
    values), `core` works, and anything that needs them raises `UncoveredError`.
    """
    try:
        return _written(call)
    except UncoveredError as error:
        # Norms inside, several attentions and other maps that are no matrix are stages of the functions that it calls.
        try:
            return recorded(call)
        except UncoveredError:
            raise error from None


def _written(call: Call) -> Flow:
    """Return the stages whose maps are read off by basis vectors."""
    captured = only_attention(call)
    attended = attention_weights(call, captured)
    port, source = value_source(call, captured)
    value, output = probe(call, captured, source)
    flow = with_values(Flow(source, port=port), call, captured, value, attended.repeats)
    is_mapped = not isinstance(flow.chain[-1], Unmapped)
    flow.core(attended.mixer)
    mixed = None
    if is_mapped and captured.record.value.dtype == call.input.dtype:
        require_weighted(call, attended, flow.value)
    else:
        # The host's rounded values are not those of the map to them.
        mixed = weighted_values(call, captured, attended)
    flow = with_output(flow, call, captured, mixed, output)
    unmapped = next((stage for stage in flow.chain if isinstance(stage, Unmapped)), None)
    if unmapped is None:
        return flow
    try:
        return recorded(call)
    except UncoveredError:
        return flow
