"""S4D: a fixed convolution from a diagonal state space, the same for every input."""

import torch
from torch.nn import functional

from unilinattn.architectures.call import Call
from unilinattn.flow import Flow
from unilinattn.mixers import Toeplitz
from unilinattn.registry import register_architecture


@register_architecture("unilinattn.models.s4.S4D", name="s4d", kind="S4D (fixed mixer)")
def s4d(call: Call) -> Flow:
    """S4D of this package: a Toeplitz core with a skip, GELU, and a gated output projection.

    HMA ACL Theorem 1 (i): the core does not depend on the input; only the GLU behind it does.
    """
    host = call.host
    length = call.input.shape[1]
    carry, gate = call.weight(host.output_linear[0].weight).squeeze(-1).chunk(2)
    carry_bias, gate_bias = call.weight(host.output_linear[0].bias).chunk(2)

    flow = Flow(call.input)
    flow.core(
        Toeplitz(call.weight(host.kernel(length)), batch=call.input.shape[0], length=length),
        skip=call.weight(host.D),
    )
    flow.activation("gelu")
    factor = torch.sigmoid(functional.linear(flow.value, gate, gate_bias))
    return flow.matrix(carry, carry_bias, role="output").gate(factor)
