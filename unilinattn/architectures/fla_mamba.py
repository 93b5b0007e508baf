"""Mamba and Mamba-2 of flash-linear-attention."""

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.architectures.call import Call, host_function
from unilinattn.architectures.fla_parts import elementwise, masked, padding
from unilinattn.flow import Flow, silu
from unilinattn.mixers import DiagonalDecay, ScalarDecay
from unilinattn.registry import register_architecture

_ACTIVATIONS = {"gelu": "gelu_pytorch_tanh"}
"""The host's names that mean another function in its package than elsewhere."""


@register_architecture("fla.layers.mamba.Mamba", name="fla_mamba", kind="Mamba-1 (S6)", extras=2)
def mamba(call: Call) -> Flow:
    """S6 as flash-linear-attention runs it: one head a channel; the mask falls on what the projection returned.

    HMA ACL Eq. 6-9 and 14; delta, B and C are functions of the convolved input and are frozen with it.
    """
    host, mask, weight = call.host, padding(call), call.weight
    inner, rank, state = host.intermediate_size, host.dt_rank, host.ssm_state_size
    projection, bias = weight(host.in_proj.weight), call.cast(host.in_proj.bias)
    gate = functional.linear(call.input, projection[inner:], None if bias is None else bias[inner:])
    flow = Flow(call.input).matrix(projection[:inner], None if bias is None else bias[:inner], role="input")
    flow.scale(mask, role="input").conv(weight(host.conv1d.weight), call.cast(host.conv1d.bias))
    flow.activation(_ACTIVATIONS.get(host.activation, host.activation)).scale(mask, role="act")
    step, key, query = functional.linear(flow.value, weight(host.x_proj.weight)).split([rank, state, state], dim=-1)
    delta = functional.softplus(functional.linear(step, weight(host.dt_proj.weight), weight(host.dt_proj.bias)))
    rate = -torch.exp(weight(host.A_log))
    core = DiagonalDecay(query.unsqueeze(2), key.unsqueeze(2), delta.unsqueeze(-1), key_scale=delta, rate=rate)
    flow.core(core, skip=weight(host.D)).gate(elementwise(call, call.host.activation)(gate))
    return flow.matrix(weight(host.out_proj.weight), call.cast(host.out_proj.bias), role="output")


@register_architecture("fla.layers.mamba2.Mamba2", name="fla_mamba2", kind="Mamba-2 (SSD)", extras=2)
def mamba2(call: Call) -> Flow:
    """SSD as flash-linear-attention runs it: the gate before the norm, after it, or without one.

    LaTIM Eq. 13-14 and 24-25. Where the layer runs in plain torch, head h reads query C and key B of group h modulo
    the number of groups; where it runs in mamba-ssm's kernels, consecutive heads share a group.
    """
    host, mask, weight = call.host, padding(call), call.weight
    inner, state = host.intermediate_size, host.ssm_state_size
    projection, bias = weight(host.in_proj.weight), call.cast(host.in_proj.bias)
    x = masked(call.input, mask)
    gate, _, side, step = functional.linear(x, projection, bias).split(
        [inner, inner, host.conv_dim - inner, host.num_heads], dim=-1
    )
    kernel, kernel_bias = weight(host.conv1d.weight), call.cast(host.conv1d.bias)
    activation = _ACTIVATIONS.get(host.activation, host.activation)

    # B and C go through the same convolution and activation as x, in a flow of their own that nothing carries.
    frozen = Flow(masked(side, mask)).conv(kernel[inner:], None if kernel_bias is None else kernel_bias[inner:])
    frozen.activation(activation).scale(mask, role="act")
    key, query = (part.unflatten(-1, (host.n_groups, state)) for part in frozen.value.chunk(2, dim=-1))
    if not (host_function(call.module, "is_fast_path_available") and host.in_proj.weight.is_cuda):
        key, query = (part.repeat(1, 1, host.num_heads // host.n_groups, 1) for part in (key, query))
    delta = functional.softplus(step + weight(host.dt_bias)).clamp(*host.dt_limit)
    decay = -torch.exp(weight(host.A_log)) * delta

    flow = Flow(call.input).scale(mask, role="input")
    flow.matrix(projection[inner : 2 * inner], None if bias is None else bias[inner : 2 * inner], role="input")
    flow.scale(mask, role="input").conv(kernel[:inner], None if kernel_bias is None else kernel_bias[:inner])
    flow.activation(activation).scale(mask, role="act")
    flow.core(ScalarDecay(query, key, decay, key_scale=delta), skip=weight(host.D))
    _norm_and_gate(call, flow, gate)
    return flow.matrix(weight(host.out_proj.weight), call.cast(host.out_proj.bias), role="output")


def _norm_and_gate(call: Call, flow: Flow, gate: Tensor) -> None:
    norm = call.host.norm
    if norm is None:
        flow.gate(elementwise(call, call.host.activation)(gate))
        return
    if not norm.norm_before_gate:
        flow.gate(silu(gate))
    groups = call.host.intermediate_size // (norm.group_size or call.host.intermediate_size)
    flow.rms_norm(call.weight(norm.weight), norm.eps, groups=groups)
    if norm.norm_before_gate:
        flow.gate(silu(gate))
