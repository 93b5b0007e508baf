"""ViM: Mamba in both directions of time, with shared projections and one gate."""

from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.s6 import s6_core
from unilinattn.call import Call
from unilinattn.mixers import Reversed, Toeplitz
from unilinattn.operator.flow import Flow, silu
from unilinattn.operator.stages import Mix
from unilinattn.registry import register_architecture


def _leak(module: nn.Module, mask: Tensor) -> str | None:
    layers = [module.get_submodule(name) for name in ("in_proj", "conv1d", "conv1d_b")]
    if all(layer.bias is None for layer in layers):
        return None
    return "biases before its scans are not zero at padded positions, and it reads a text from both ends"


@register_architecture("unilinattn.models.vim.BiMamba", name="vim", kind="ViM (bidirectional S6)", padding_leak=_leak)
def vim(call: Call) -> Flow:
    """ViM of `unilinattn.models`: two directions, each with its convolution, activation, core and skip, summed.

    Zhu et al., "Vision Mamba" (2024), Algorithm 1; each direction is S6 (HMA ACL Eq. 14), the second one on the
    reversed sequence. Where the host halves the sum, the shared gate holds the factor 1/2: `core` is the forward matrix
    plus the flipped backward one, as HMA draws it, and `unified` includes the factor.
    """
    host, inner = call.host, call.host.d_inner
    projection = call.affine(host.in_proj)
    gate = silu(projection[inner:](call.input))

    flow = Flow(call.input).matrix(*projection[:inner], role="input")
    ahead = _direction(flow.fork(), call, "", backward=False)
    back = _direction(flow.fork(), call, "_b", backward=True)
    flow.join(ahead, back, role="core").gate(gate / 2 if host.divide_out else gate)
    return flow.matrix(*call.affine(host.out_proj), role="output")


def _direction(flow: Flow, call: Call, suffix: str, *, backward: bool) -> Flow:
    """Append convolution, SiLU, core and skip of one direction; the backward one runs on the reversed sequence."""
    host, tensor = call.host, call.tensor
    conv, x_proj, dt_proj = (getattr(host, name + suffix) for name in ("conv1d", "x_proj", "dt_proj"))
    batch, length = call.input.shape[:2]

    def in_its_order(tokens: Tensor) -> Tensor:
        return tokens.flip(1) if backward else tokens

    taps = Toeplitz(tensor(conv.weight).squeeze(1).flip(-1), batch=batch, length=length)
    flow.stage(Mix("conv", Reversed(taps) if backward else taps, call.tensor(conv.bias))).activation("silu")
    projected = in_its_order(flow.value) @ tensor(x_proj.weight).T
    step, key, query = projected.split([host.dt_rank, host.d_state, host.d_state], dim=-1)
    delta = functional.softplus(call.affine(dt_proj)(step))
    log_rate = getattr(host, "A_b_log" if backward else "A_log")
    core = s6_core(call, delta, key.unsqueeze(2), query.unsqueeze(2), log_rate)
    return flow.core(Reversed(core) if backward else core, skip=tensor(getattr(host, "D" + suffix)))
