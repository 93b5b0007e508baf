"""Mamba-1: the selective state space S6 between a short convolution and a gate."""

import torch
from torch.nn import functional

from unilinattn.architectures.call import Call, projection_leak
from unilinattn.flow import Flow, silu
from unilinattn.mixers import DiagonalDecay
from unilinattn.registry import register_architecture


@register_architecture(
    "transformers.models.mamba.modeling_mamba.MambaMixer",
    name="mamba",
    kind="Mamba-1 (S6)",
    leak=projection_leak,
)
def mamba(call: Call) -> Flow:
    """S6 as transformers runs it: one head a channel, query C and key B shared by all of them.

    HMA ACL Eq. 6-9 and 14; delta, B and C are functions of the convolved input and are frozen with it.
    """
    host, weight = call.host, call.weight
    inner, rank, state = host.intermediate_size, host.time_step_rank, host.ssm_state_size
    mask = call.padding_scale(call.arguments.get("attention_mask"))
    in_proj, in_bias = weight(host.in_proj.weight), call.cast(host.in_proj.bias)
    masked = call.input if mask is None else call.input * mask
    gate = functional.linear(masked, in_proj[inner:], None if in_bias is None else in_bias[inner:])

    flow = Flow(call.input).scale(mask, role="input")
    flow.matrix(in_proj[:inner], None if in_bias is None else in_bias[:inner], role="input")
    flow.conv(weight(host.conv1d.weight), call.cast(host.conv1d.bias)).activation(host.activation)
    flow.scale(mask, role="act")
    step, key, query = (flow.value @ weight(host.x_proj.weight).T).split([rank, state, state], dim=-1)
    delta = functional.softplus(functional.linear(step, weight(host.dt_proj.weight), call.cast(host.dt_proj.bias)))
    rate = -torch.exp(weight(host.A_log))
    core = DiagonalDecay(query.unsqueeze(2), key.unsqueeze(2), delta.unsqueeze(-1), key_scale=delta, rate=rate)
    flow.core(core, skip=weight(host.D)).gate(silu(gate))
    return flow.matrix(weight(host.out_proj.weight), call.cast(host.out_proj.bias), role="output")
