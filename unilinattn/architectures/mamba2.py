"""Mamba-2 and its relatives: the state-space dual, one decay a head, with a gated norm before the output projection."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.architectures.call import Call, masks_by_function, package_version, projection_leak
from unilinattn.errors import UncoveredError
from unilinattn.flow import Flow, silu
from unilinattn.mixers import ScalarDecay
from unilinattn.registry import register_architecture


@register_architecture(
    "transformers.models.mamba2.modeling_mamba2.Mamba2Mixer",
    "transformers.models.bamba.modeling_bamba.BambaMixer",
    "transformers.models.granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridMambaLayer",
    name="mamba2",
    kind="Mamba-2 (SSD)",
    leak=projection_leak,
)
def mamba2(call: Call) -> Flow:
    """SSD as transformers runs it: groups of heads share query C and key B, gate first, then a grouped RMS norm.

    LaTIM Eq. 13-14 and 24-25. One convolution runs over x, B and C; only its x slice carries, B and C are frozen.
    """
    return _gated_norm(call, call.host.time_step_limit)


@register_architecture(
    "transformers.models.zamba2.modeling_zamba2.Zamba2MambaMixer",
    "transformers.models.nemotron_h.modeling_nemotron_h.NemotronHMamba2Mixer",
    name="mamba2_floor",
    kind="Mamba-2 (SSD)",
    leak=projection_leak,
)
def mamba2_floor(call: Call) -> Flow:
    """SSD whose steps are limited from below alone, as Zamba2 and NemotronH run it.

    LaTIM Eq. 13-14 and 24-25.
    """
    host, length = call.host, call.input.shape[1]
    if masks_by_function(call.module):
        return _gated_norm(call, host.time_step_limit)
    if length > host.chunk_size:
        raise UncoveredError(
            f"{call.name} ({type(call.module).__name__} of {package_version(call.module)}) hands the wrong states from "
            f"chunk to chunk: {length} tokens with chunk_size {host.chunk_size}. Trace at most chunk_size tokens, or "
            "use a newer version."
        )
    return _gated_norm(call, (host.time_step_min, torch.inf))


@register_architecture(
    "transformers.models.falcon_h1.modeling_falcon_h1.FalconH1Mixer",
    name="falcon_h1",
    kind="Mamba-2 (SSD), multipliers",
    leak=projection_leak,
)
def falcon_h1(call: Call) -> Flow:
    """SSD with multipliers on the input and on each part of its projection; norm and gate in either order.

    LaTIM Eq. 13-14 and 24-25; the multipliers are folded into the projection, and the norm may be missing.
    """
    host, weight = call.host, call.weight
    if call.output is not None and call.output.shape[1] != call.input.shape[1]:
        raise UncoveredError(
            f"{call.name} ({type(call.module).__name__} of {package_version(call.module)}) returns "
            f"{call.output.shape[1]} tokens for {call.input.shape[1]}. Trace several tokens, or use a newer version."
        )
    multipliers, bias = weight(host.mup_vector).flatten(), call.cast(host.in_proj.bias)
    projection = weight(host.in_proj.weight) * host.ssm_in_multiplier * multipliers[:, None]
    flow, gate = _mixed(call, projection, None if bias is None else bias * multipliers, host.time_step_limit)
    norm = host.norm if host.mamba_rms_norm else None
    if norm is None or not norm.norm_before_gate:
        flow.gate(gate)
    if norm is not None:
        flow.rms_norm(weight(norm.weight), norm.variance_epsilon, groups=norm.n_groups)
    if norm is not None and norm.norm_before_gate:
        flow.gate(gate)
    return flow.matrix(weight(host.out_proj.weight), call.cast(host.out_proj.bias), role="output")


def _gated_norm(call: Call, limit: tuple[float, float]) -> Flow:
    """Run SSD, then the gate, then the norm, as most hosts do."""
    host, weight = call.host, call.weight
    flow, gate = _mixed(call, weight(host.in_proj.weight), call.cast(host.in_proj.bias), limit)
    # Before groups came to transformers' norm it normalised over all channels at once.
    groups = host.intermediate_size // getattr(host.norm, "group_size", host.intermediate_size)
    flow.gate(gate).rms_norm(weight(host.norm.weight), host.norm.variance_epsilon, groups=groups)
    return flow.matrix(weight(host.out_proj.weight), call.cast(host.out_proj.bias), role="output")


def _mixed(
    call: Call, projection: Tensor, bias: Tensor | None, limit: tuple[float, float]
) -> tuple[Flow, Callable[[], Tensor]]:
    """Return the flow up to the core and its skip, and what makes the frozen gate."""
    host, weight = call.host, call.weight
    call.refuse("seq_idx")
    inner, heads, groups, state = host.intermediate_size, host.num_heads, host.n_groups, host.ssm_state_size
    mask = call.padding_scale(call.arguments.get("attention_mask"))
    flow = Flow(call.input).scale(mask, role="input")
    entering = flow.value

    def projected(part: slice) -> Tensor:
        return functional.linear(entering, projection[part], None if bias is None else bias[part])

    frozen, step = projected(slice(2 * inner, None)).split([host.conv_dim - inner, heads], dim=-1)
    kernel, kernel_bias = weight(host.conv1d.weight), call.cast(host.conv1d.bias)

    # B and C go through the same convolution and activation as x, in a flow of their own that nothing carries.
    side = Flow(frozen).conv(kernel[inner:], None if kernel_bias is None else kernel_bias[inner:])
    side.activation(host.activation).scale(mask, role="act")
    key, query = (part.unflatten(-1, (groups, state)) for part in side.value.chunk(2, dim=-1))
    delta = functional.softplus(step + weight(host.dt_bias)).clamp(*limit)
    decay = -torch.exp(weight(host.A_log)) * delta

    flow.matrix(projection[inner : 2 * inner], None if bias is None else bias[inner : 2 * inner], role="input")
    flow.conv(kernel[:inner], None if kernel_bias is None else kernel_bias[:inner]).activation(host.activation)
    flow.scale(mask, role="act")
    flow.core(ScalarDecay(query, key, decay, key_scale=delta), skip=weight(host.D))
    return flow, lambda: silu(projected(slice(inner)))
