"""Mamba and Mamba-2 of flash-linear-attention."""

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.architectures.fla_parts import elementwise, masked, padding
from unilinattn.architectures.s6 import s6_core
from unilinattn.call import Call, host_function
from unilinattn.mixers import ScalarDecay
from unilinattn.operator.flow import Flow, silu
from unilinattn.registry import register_architecture

_ACTIVATIONS = {"gelu": "gelu_pytorch_tanh"}
"""Activation names of flash-linear-attention that name another function elsewhere."""


@register_architecture("fla.layers.mamba.Mamba", name="fla_mamba", kind="Mamba-1 (S6)", extra_outputs=2)
def mamba(call: Call) -> Flow:
    """S6 of Mamba in flash-linear-attention: each channel is a head; the mask applies after the input projection.

    HMA ACL Eq. 6-9 and 14. delta, B and C are functions of the convolved input and are frozen with it.
    """
    host, mask, tensor = call.host, padding(call), call.tensor
    inner, rank, state = host.intermediate_size, host.dt_rank, host.ssm_state_size
    projection = call.affine(host.in_proj)
    flow = Flow(call.input).matrix(*projection[:inner], role="input")
    flow.scale(mask, role="input").conv(*call.affine(host.conv1d))
    flow.activation(_ACTIVATIONS.get(host.activation, host.activation)).scale(mask, role="act")
    factors = functional.linear(flow.value, tensor(host.x_proj.weight)).split([rank, state, state], dim=-1)
    step, key, query = (factor.unsqueeze(2) for factor in factors)
    delta = functional.softplus(call.affine(host.dt_proj)(step.squeeze(2)))
    flow.core(s6_core(call, delta, key, query, host.A_log), skip=tensor(host.D))
    flow.gate(elementwise(call, call.host.activation)(projection[inner:](call.input)))
    return flow.matrix(*call.affine(host.out_proj), role="output")


@register_architecture("fla.layers.mamba2.Mamba2", name="fla_mamba2", kind="Mamba-2 (SSD)", extra_outputs=2)
def mamba2(call: Call) -> Flow:
    """SSD of Mamba-2 in flash-linear-attention: the gate stands before or after the norm, or the norm is absent.

    LaTIM Eq. 13-14 and 24-25. In plain torch, head h reads query C and key B of group h modulo the number of groups;
    in mamba-ssm's kernels, consecutive heads share a group.
    """
    host, mask, tensor = call.host, padding(call), call.tensor
    inner, state = host.intermediate_size, host.ssm_state_size
    projection, conv = call.affine(host.in_proj), call.affine(host.conv1d)
    sizes = [inner, inner, host.conv_dim - inner, host.num_heads]
    gate, _, side, step = projection(masked(call.input, mask)).split(sizes, dim=-1)
    activation = _ACTIVATIONS.get(host.activation, host.activation)

    # B and C pass the same convolution and activation as x, in a separate flow that is frozen.
    frozen = Flow(masked(side, mask)).conv(*conv[inner:])
    frozen.activation(activation).scale(mask, role="act")
    key, query = (factor.unflatten(-1, (host.n_groups, state)) for factor in frozen.value.chunk(2, dim=-1))
    if not (host_function(call.module, "is_fast_path_available") and host.in_proj.weight.is_cuda):
        key, query = (factor.repeat(1, 1, host.num_heads // host.n_groups, 1) for factor in (key, query))
    delta = functional.softplus(step + tensor(host.dt_bias)).clamp(*host.dt_limit)
    decay = -torch.exp(tensor(host.A_log)) * delta

    flow = Flow(call.input).scale(mask, role="input")
    flow.matrix(*projection[inner : 2 * inner], role="input")
    flow.scale(mask, role="input").conv(*conv[:inner])
    flow.activation(activation).scale(mask, role="act")
    flow.core(ScalarDecay(query, key, decay, key_scale=delta), skip=tensor(host.D))
    _norm_and_gate(call, flow, gate)
    return flow.matrix(*call.affine(host.out_proj), role="output")


def _norm_and_gate(call: Call, flow: Flow, gate: Tensor) -> None:
    norm = call.host.norm
    if norm is None:
        flow.gate(elementwise(call, call.host.activation)(gate))
        return
    if not norm.norm_before_gate:
        flow.gate(silu(gate))
    groups = call.host.intermediate_size // (norm.group_size or call.host.intermediate_size)
    flow.rms_norm(call.tensor(norm.weight), norm.eps, groups=groups)
    if norm.norm_before_gate:
        flow.gate(silu(gate))
