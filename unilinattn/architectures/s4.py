"""S4, S4D and DSS: a fixed convolution from a state space, the same for every input."""

import torch
from torch import Tensor, nn

from unilinattn.call import Affine, Call
from unilinattn.mixers import Toeplitz
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


@register_architecture("unilinattn.models.s4.S4D", name="s4d", kind="S4D (fixed mixer)")
def s4d(call: Call) -> Flow:
    """S4D of `unilinattn.models`: a Toeplitz core with a skip, GELU, and a gated output projection.

    HMA ACL Theorem 1 (i): the core does not depend on the input; only the GLU after it does.
    """
    host = call.host
    linear = host.output_linear[0]
    flow = _convolved(call, host.kernel, host.D)
    return _gated_output(flow, Affine(call.stored(linear.weight.squeeze(-1)), call.tensor(linear.bias)))


@register_architecture("unilinattn.models.s4_dplr.S4", name="s4", kind="S4 (fixed mixer)")
def s4(call: Call) -> Flow:
    """S4 of `unilinattn.models`: the kernel of a diagonal plus low-rank state space, in the same layer as S4D's.

    HMA ACL Theorem 1 (i); Gu, Goel and Ré, "Efficiently Modeling Long Sequences with Structured State Spaces" (2022).
    """
    host = call.host
    linear = host.output_linear[0]
    flow = _convolved(call, host.layer.kernel, host.layer.D.squeeze(0))
    return _gated_output(flow, call.affine(linear))


def _kernel_of_padded_length(module: nn.Module, mask: Tensor) -> str | None:
    if module.get_submodule("kernel").version != "softmax":
        return None
    return "its softmax kernel is normalised over the padded length, so that padding changes it"


@register_architecture(
    "unilinattn.models.dss.DSS", name="dss", kind="DSS (fixed mixer)", padding_leak=_kernel_of_padded_length
)
def dss(call: Call) -> Flow:
    """DSS of `unilinattn.models`, softmax or exponential form: a Toeplitz core with a skip, GELU, an output projection.

    HMA ACL Theorem 1 (i); Gupta, Gu and Berant, "Diagonal State Spaces are as Effective as Structured State Spaces"
    (2022). Of the input, the softmax form's kernel depends only on the length.
    """
    host = call.host
    linear = host.output_linear
    flow = _convolved(call, host.kernel, host.D.squeeze(0))
    return flow.matrix(call.stored(linear.weight), call.tensor(linear.bias).squeeze(-1), role="output")


def _convolved(call: Call, kernel: nn.Module, skip: Tensor) -> Flow:
    """Start a flow with the core, its skip and GELU."""
    batch, length = call.input.shape[:2]
    core = Toeplitz(call.tensor(kernel(length)), batch=batch, length=length)
    return Flow(call.input).core(core, skip=call.tensor(skip)).activation("gelu")


def _gated_output(flow: Flow, projection: Affine) -> Flow:
    """Append a GLU: the first half of a projection carries, and the sigmoid of the second half gates it."""
    half = len(projection.weight) // 2
    before = flow.deferred()
    flow.matrix(*projection[:half], role="output")
    return flow.gate(lambda: torch.sigmoid(projection[half:](before())))
