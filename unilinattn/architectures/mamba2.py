"""Mamba-2: the state-space dual, one decay a head, with a gated norm before the output projection."""

import torch
from torch.nn import functional

from unilinattn.architectures.call import Call, projection_leak
from unilinattn.flow import Flow, silu
from unilinattn.mixers import ScalarDecay
from unilinattn.registry import register_architecture


@register_architecture(
    "transformers.models.mamba2.modeling_mamba2.Mamba2Mixer",
    name="mamba2",
    kind="Mamba-2 (SSD)",
    leak=projection_leak,
)
def mamba2(call: Call) -> Flow:
    """SSD as transformers runs it: groups of heads share query C and key B, gate first, then a grouped RMS norm.

    LaTIM Eq. 13-14 and 24-25. One convolution runs over x, B and C; only its x slice carries, B and C are frozen.
    """
    host, weight = call.host, call.weight
    inner, heads, groups, state = host.intermediate_size, host.num_heads, host.n_groups, host.ssm_state_size
    mask = call.padding_scale(call.arguments.get("attention_mask"))
    projection, bias = weight(host.in_proj.weight), call.cast(host.in_proj.bias)
    masked = call.input if mask is None else call.input * mask
    gate, _, frozen, step = functional.linear(masked, projection, bias).split(
        [inner, inner, host.conv_dim - inner, heads], dim=-1
    )
    kernel, kernel_bias = weight(host.conv1d.weight), call.cast(host.conv1d.bias)

    # B and C go through the same convolution and activation as x, in a flow of their own that nothing carries.
    side = Flow(frozen).conv(kernel[inner:], None if kernel_bias is None else kernel_bias[inner:])
    side.activation(host.activation).scale(mask, role="act")
    key, query = (part.unflatten(-1, (groups, state)) for part in side.value.chunk(2, dim=-1))
    delta = functional.softplus(step + weight(host.dt_bias)).clamp(*host.time_step_limit)
    decay = -torch.exp(weight(host.A_log)) * delta

    flow = Flow(call.input).scale(mask, role="input")
    flow.matrix(projection[inner : 2 * inner], None if bias is None else bias[inner : 2 * inner], role="input")
    flow.conv(kernel[:inner], None if kernel_bias is None else kernel_bias[:inner]).activation(host.activation)
    flow.scale(mask, role="act")
    flow.core(ScalarDecay(query, key, decay, key_scale=delta), skip=weight(host.D)).gate(silu(gate))
    # Before groups came to transformers' norm it normalised over all channels at once.
    norm_groups = inner // getattr(host.norm, "group_size", inner)
    flow.rms_norm(weight(host.norm.weight), host.norm.variance_epsilon, groups=norm_groups)
    return flow.matrix(weight(host.out_proj.weight), call.cast(host.out_proj.bias), role="output")
