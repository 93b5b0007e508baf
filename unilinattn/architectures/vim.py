"""ViM: Mamba in both directions of time, between shared projections and under one gate."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.call import Call
from unilinattn.flow import Flow, silu
from unilinattn.mixers import DiagonalDecay, Reversed, Toeplitz
from unilinattn.registry import register_architecture
from unilinattn.stages import Mix


def _leak(module: nn.Module, mask: Tensor) -> str | None:
    layers = [module.get_submodule(name) for name in ("in_proj", "conv1d", "conv1d_b")]
    if all(layer.bias is None for layer in layers):
        return None
    return "biases before its scans are not zero at padded positions, and it reads a text from both ends"


@register_architecture("unilinattn.models.vim.BiMamba", name="vim", kind="ViM (bidirectional S6)", leak=_leak)
def vim(call: Call) -> Flow:
    """ViM of this package: a branch of two directions, each with its own convolution, activation, core and skip.

    Zhu et al., "Vision Mamba" (2024), Algorithm 1; each direction is S6 (HMA ACL Eq. 14), the second one in a mirror
    of time. The gate is shared and holds the halving of the sum where the host halves it, so that `core` is the
    forward matrix plus the flipped backward one, as HMA draws it, and `unified` has the halving.
    """
    host, weight = call.host, call.weight
    in_proj, in_bias = weight(host.in_proj.weight), call.cast(host.in_proj.bias)
    inner = host.d_inner
    gate = silu(functional.linear(call.input, in_proj[inner:], None if in_bias is None else in_bias[inner:]))

    flow = Flow(call.input)
    flow.matrix(in_proj[:inner], None if in_bias is None else in_bias[:inner], role="input")
    ahead = _direction(flow.fork(), call, "", backward=False)
    back = _direction(flow.fork(), call, "_b", backward=True)
    flow.join(ahead, back, role="core").gate(gate / 2 if host.divide_out else gate)
    return flow.matrix(weight(host.out_proj.weight), call.cast(host.out_proj.bias), role="output")


def _direction(flow: Flow, call: Call, suffix: str, *, backward: bool) -> Flow:
    """Append convolution, SiLU, core and skip of one direction; the backward one reads the sequence from its end."""
    host, weight = call.host, call.weight
    conv, x_proj, dt_proj = (getattr(host, name + suffix) for name in ("conv1d", "x_proj", "dt_proj"))
    batch, length = call.input.shape[:2]

    def in_its_order(tokens: Tensor) -> Tensor:
        return tokens.flip(1) if backward else tokens

    taps = Toeplitz(weight(conv.weight).squeeze(1).flip(-1), batch=batch, length=length)
    flow.stage(Mix("conv", Reversed(taps) if backward else taps, call.cast(conv.bias))).activation("silu")
    chosen = in_its_order(flow.value) @ weight(x_proj.weight).T
    step, key, query = chosen.split([host.dt_rank, host.d_state, host.d_state], dim=-1)
    delta = functional.softplus(functional.linear(step, weight(dt_proj.weight), weight(dt_proj.bias)))
    rate = -torch.exp(weight(getattr(host, "A_b_log" if backward else "A_log")))
    core = DiagonalDecay(query.unsqueeze(2), key.unsqueeze(2), delta.unsqueeze(-1), key_scale=delta, rate=rate)
    return flow.core(Reversed(core) if backward else core, skip=weight(getattr(host, "D" + suffix)))
