"""S5: one state space with all channels as input and output, diagonal over complex modes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unilinattn.call import Call
from unilinattn.errors import UncoveredError
from unilinattn.mixers import Reversed, Toeplitz
from unilinattn.models.numerics import powers
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
    core = Toeplitz(powers(tensor(modes.decay), length), batch=batch, length=length)

    flow = Flow(call.input)
    carried = flow.fork().stage(ToComplex("input")).matrix(tensor(modes.inputs), role="input").core(core)
    carried.matrix(tensor(modes.outputs), role="output").stage(ToReal("output"))
    flow.join(carried, flow.fork().scale(tensor(host.seq.D)[None, None], role="skip"), role="core")
    before = flow.activation("gelu_pytorch_tanh").deferred()
    gate = call.affine(host.out2)
    return flow.gate(lambda: torch.sigmoid(gate(before())))


def _check(call: Call) -> None:
    call.refuse("state")
    if getattr(call.module.seq, "liquid", False):
        raise UncoveredError(f"{call.name}: with liquid=True its input is a decay and a value at once.")
    if isinstance(call.arguments.get("step_scale"), Tensor):
        raise UncoveredError(
            f"{call.name}: it was called with a tensor of step scales; pass one number for all tokens."
        )


def _extras(module: object, arguments: Mapping[str, Any]) -> int:
    """Count the outputs after the first: the last state, if it is asked for."""
    return int(bool(arguments.get("return_state")))


@register_architecture(
    "s5.s5_model.S5", name="s5_pytorch", kind="S5 (fixed mixer)", check=_check, extra_outputs=_extras
)
def s5_pytorch(call: Call) -> Flow:
    """S5 of s5-pytorch: a Toeplitz core over complex modes between B and C, one for each direction, and a skip.

    Smith, Warrington and Linderman, "Simplified State Space Layers for Sequence Modeling" (2023).
    """
    host = call.host.seq
    batch, length = call.input.shape[:2]
    inputs, outputs = (call.tensor(matrix) for matrix in host.get_BC_tilde())
    step = call.tensor(host.log_step).exp() * call.arguments.get("step_scale", 1.0)
    decay, inputs = host.discretize(call.tensor(host.Lambda), inputs, step)
    core = Toeplitz(powers(decay, length), batch=batch, length=length)

    flow = Flow(call.input)
    cores = [core, Reversed(core)] if host.bidir else [core]
    # The columns of C are the modes of one direction after those of the other.
    directions = [
        flow.fork().stage(ToComplex("input")).matrix(inputs**host.degree, role="input").core(direction)
        for direction in cores
    ]
    for direction, columns in zip(directions, outputs.chunk(len(cores), 1), strict=True):
        direction.matrix(columns, role="output").stage(ToReal("output"))
    skip = flow.fork().scale(call.tensor(host.D)[None, None], role="skip")
    return flow.join(*directions, skip, role="core")
