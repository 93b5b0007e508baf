"""GSS: a narrow fixed convolution whose widened output is gated."""

from torch import Tensor
from torch.nn import functional

from unilinattn.call import Call, padded_left
from unilinattn.mixers import Toeplitz
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


def _leak(module: object, mask: Tensor) -> str | None:
    leaks = padded_left(mask)
    return "the bias of the norm inside its state space model is not zero at padded positions" if leaks else None


@register_architecture("unilinattn.models.gss.GSS", name="gss", kind="GSS (fixed mixer)", padding_leak=_leak)
def gss(call: Call) -> Flow:
    """GSS of `unilinattn.models`: GELU, LayerNorm, a Toeplitz core with a skip, a matrix and a gate.

    Mehta et al., "Long Range Language Modeling via Gated State Spaces" (2022), Section 3.2. The core is fixed (HMA
    ACL Theorem 1); `unified` ends at the matrix that widens the core's output for the gate.
    """
    host, tensor = call.host, call.tensor
    batch, length = call.input.shape[:2]
    norm, core = host.dss.norm, Toeplitz(tensor(host.dss.kernel(length)), batch=batch, length=length)

    flow = Flow(call.input).matrix(call.stored(host.to_v[0].weight), role="input").activation("gelu")
    flow.layer_norm(*call.affine(norm), eps=norm.eps).core(core, skip=tensor(host.dss.param_D))
    flow.matrix(call.stored(host.to_gate.weight), role="gate")
    flow.gate(functional.gelu(functional.linear(call.input, call.tensor(host.to_u[0].weight))))
    return flow.matrix(*call.affine(host.to_out), role="output")
