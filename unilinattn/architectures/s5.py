"""S5: one state space with all channels as input and output, diagonal over complex modes."""

import torch

from unilinattn.call import Call, host_function
from unilinattn.mixers import Toeplitz
from unilinattn.operator.flow import Flow
from unilinattn.operator.stages import ToComplex, ToReal
from unilinattn.registry import register_architecture


@register_architecture("unilinattn.models.s5.S5", name="s5", kind="S5 (fixed mixer)")
def s5(call: Call) -> Flow:
    """S5 of `unilinattn.models`: a Toeplitz core over complex modes between the matrices B and C, a skip, GELU, a gate.

    Smith, Warrington and Linderman, "Simplified State Space Layers for Sequence Modeling" (2023). B is the input
    matrix, C followed by the real part is the output matrix, so each mode is a head: `core`, `mixer` and `unified` are
    all Re lambda_n^(i - j), the weight of mode n from a real input to a real output. The skip, GELU and the gate stand
    outside B and C: they are only in `contributions`.
    """
    host, tensor = call.host, call.tensor
    batch, length = call.input.shape[:2]
    modes = host.seq.modes()
    powers = host_function(call.module, "powers")
    core = Toeplitz(powers(tensor(modes.decay), length), batch=batch, length=length)

    flow = Flow(call.input)
    carried = flow.fork().stage(ToComplex("input")).matrix(tensor(modes.inputs), role="input").core(core)
    carried.matrix(tensor(modes.outputs), role="output").stage(ToReal("output"))
    flow.join(carried, flow.fork().scale(tensor(host.seq.D)[None, None], role="skip"), role="core")
    before = flow.activation("gelu_pytorch_tanh").deferred()
    gate = call.affine(host.out2)
    return flow.gate(lambda: torch.sigmoid(gate(before())))
