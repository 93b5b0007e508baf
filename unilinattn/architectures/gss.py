"""GSS: a narrow fixed convolution whose widened output is gated."""

from torch import Tensor
from torch.nn import functional

from unilinattn.architectures.call import Call, padded_left
from unilinattn.flow import Flow
from unilinattn.mixers import Toeplitz
from unilinattn.registry import register_architecture


def _leak(module: object, mask: Tensor) -> str | None:
    leaks = padded_left(mask)
    return "the bias of the norm inside its state space model is not zero at padded positions" if leaks else None


@register_architecture("unilinattn.models.gss.GSS", name="gss", kind="GSS (fixed mixer)", leak=_leak)
def gss(call: Call) -> Flow:
    """GSS of this package: GELU and LayerNorm before a Toeplitz core with a skip, a matrix and a gate behind it.

    Mehta et al., "Long Range Language Modeling via Gated State Spaces" (2022), Section 3.2. The core is fixed (HMA
    ACL Theorem 1); `unified` ends at the matrix that widens the core's output for the gate.
    """
    host, weight = call.host, call.weight
    batch, length = call.input.shape[:2]
    norm, core = host.dss.norm, Toeplitz(weight(host.dss.kernel(length)), batch=batch, length=length)

    flow = Flow(call.input).matrix(weight(host.to_v[0].weight), role="input").activation("gelu")
    flow.layer_norm(weight(norm.weight), weight(norm.bias), norm.eps).core(core, skip=weight(host.dss.param_D))
    flow.matrix(weight(host.to_gate.weight), role="gate")
    flow.gate(functional.gelu(functional.linear(call.input, weight(host.to_u[0].weight))))
    return flow.matrix(weight(host.to_out.weight), weight(host.to_out.bias), role="output")
