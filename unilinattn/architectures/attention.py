"""Softmax attention of every host that goes through transformers' attention interface."""

from unilinattn.architectures.call import Call
from unilinattn.architectures.interface import attention_weights, capture, only_attention, value_source
from unilinattn.architectures.probe import add_output, add_values, probe
from unilinattn.flow import Flow
from unilinattn.mixers import Dense
from unilinattn.registry import register_architecture


@register_architecture(name="attention", kind="softmax attention", capture=capture, observes=True)
def attention(call: Call) -> Flow:
    """Any attention that goes through transformers' interface: weights recomputed, projections probed and verified.

    HMA ACL Eq. 1. The weights are what the host's own eager function makes of its queries, keys and mask (windows,
    sinks, soft caps, position biases included). The ways into the values and out of the result, an output gate
    included, are found by feeding basis vectors to a copy of the module, and are then checked on the observed input;
    where they are not affine (normed values), `core` works and anything that needs them raises `UncoveredError`.
    """
    seen = only_attention(call)
    weights, repeats = attention_weights(call, seen)
    port, source = value_source(call, seen)
    value, output = probe(call, seen, source)
    flow = Flow(source, port=port)
    add_values(flow, call, seen, value, repeats)
    flow.core(Dense(weights))
    return add_output(flow, call, seen, weights, repeats, output)
