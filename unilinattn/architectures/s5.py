"""S5: one state space from all channels to all channels, diagonal over complex modes."""

import torch
from torch.nn import functional

from unilinattn.architectures.call import Call, host_function
from unilinattn.flow import Flow
from unilinattn.mixers import Toeplitz
from unilinattn.registry import register_architecture
from unilinattn.stages import ToComplex, ToReal


@register_architecture("unilinattn.models.s5.S5", name="s5", kind="S5 (fixed mixer)")
def s5(call: Call) -> Flow:
    """S5 of this package: a Toeplitz core over complex modes between the matrices B and C, a skip, GELU, a gate.

    Smith, Warrington and Linderman, "Simplified State Space Layers for Sequence Modeling" (2023). B is the input
    matrix, C with the real part behind it the output matrix, so scopes count modes as heads: `core`, `mixer` and
    `unified` are all the real part of lambda_n^(i - j), what mode n carries from a real input to a real output. The
    skip, GELU and the gate stand outside of B and C, beside and behind them: they are in `contributions` alone.
    """
    host, weight = call.host, call.weight
    batch, length = call.input.shape[:2]
    modes = host.seq.modes()
    powers = host_function(call.module, "powers")
    core = Toeplitz(powers(weight(modes.decay), length), batch=batch, length=length)

    flow = Flow(call.input)
    carried = flow.fork().stage(ToComplex("input")).matrix(weight(modes.inputs), role="input").core(core)
    carried.matrix(weight(modes.outputs), role="output").stage(ToReal("output"))
    flow.join(carried, flow.fork().scale(weight(host.seq.D)[None, None], role="skip"), role="core")
    before = flow.activation("gelu_pytorch_tanh").later()
    gate, bias = weight(host.out2.weight), weight(host.out2.bias)
    return flow.gate(lambda: torch.sigmoid(functional.linear(before(), gate, bias)))
