"""Mamba-1 and its relatives: the selective state space S6 between a short convolution and a gate."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.call import Call, masks_by_function, projection_leak
from unilinattn.flow import Flow, silu
from unilinattn.mixers import DiagonalDecay
from unilinattn.registry import register_architecture


def leak(module: nn.Module, mask: Tensor) -> str | None:
    """Tell how padding leaks: not where the host masks what its projection returned, as it once did."""
    return projection_leak(module, mask) if masks_by_function(module) else None


@register_architecture(
    "transformers.models.mamba.modeling_mamba.MambaMixer", name="mamba", kind="Mamba-1 (S6)", leak=leak
)
def mamba(call: Call) -> Flow:
    """S6 as transformers runs it: one head a channel, query C and key B shared by all of them.

    HMA ACL Eq. 6-9 and 14; delta, B and C are functions of the convolved input and are frozen with it.
    """
    return _layer(call, lambda u: _selective(call, *_split(call, u)))


@register_architecture(
    "transformers.models.falcon_mamba.modeling_falcon_mamba.FalconMambaMixer",
    name="falcon_mamba",
    kind="Mamba-1 (S6), normalised",
    leak=leak,
)
def falcon_mamba(call: Call) -> Flow:
    """S6 whose step, key and query pass an RMS norm without weights, frozen with them.

    HMA ACL Eq. 6-9 and 14, with B, C and the low-rank step normalised.
    """
    eps = call.host.rms_eps
    return _layer(call, lambda u: _selective(call, *(Flow(x).rms_norm(None, eps).value for x in _split(call, u))))


@register_architecture(
    "transformers.models.jamba.modeling_jamba.JambaMambaMixer",
    name="jamba",
    kind="Mamba-1 (S6), normalised",
    leak=leak,
)
def jamba(call: Call) -> Flow:
    """S6 whose step, key and query each pass an RMS norm of their own, frozen with them.

    HMA ACL Eq. 6-9 and 14, with B, C and the low-rank step normalised.
    """
    host = call.host
    norms = (host.dt_layernorm, host.b_layernorm, host.c_layernorm)

    def core(u: Tensor) -> DiagonalDecay:
        normed = (
            Flow(x).rms_norm(call.weight(norm.weight), norm.variance_epsilon).value
            for x, norm in zip(_split(call, u), norms, strict=True)
        )
        return _selective(call, *normed)

    return _layer(call, core)


@register_architecture(
    "transformers.models.zamba.modeling_zamba.ZambaMambaMixer",
    name="zamba",
    kind="Mamba-1 (S6), several Mamba heads",
    leak=leak,
)
def zamba(call: Call) -> Flow:
    """S6 in several Mamba heads: each makes the step, key and query of its channels from these channels alone.

    HMA ACL Eq. 6-9 and 14 for each Mamba head; the input projection interleaves a channel's value and gate.
    """
    host, weight = call.host, call.weight
    rank, state = host.time_step_rank, host.ssm_state_size

    def core(u: Tensor) -> DiagonalDecay:
        parts = torch.einsum("blhp,hrp->blhr", u.unflatten(2, (host.n_mamba_heads, -1)), weight(host.x_proj_weight))
        step, key, query = parts.split([rank, state, state], dim=-1)
        step = torch.einsum("blhr,hpr->blhp", step, weight(host.dt_proj_weight)) + weight(host.dt_proj_bias)
        return _decay(call, functional.softplus(step).flatten(2), key, query)

    return _layer(call, core, carries=slice(0, None, 2), gates=slice(1, None, 2))


def _layer(
    call: Call, core: Callable[[Tensor], DiagonalDecay], *, carries: slice | None = None, gates: slice | None = None
) -> Flow:
    """Put a core, made from the convolved input, between the convolution and the gate.

    `carries` and `gates` are the rows of the input projection, its first and its second half unless told.
    """
    host, weight, inner = call.host, call.weight, call.host.intermediate_size
    call.refuse("seq_idx")
    carries, gates = carries or slice(inner), gates or slice(inner, None)
    in_proj, in_bias = weight(host.in_proj.weight), call.cast(host.in_proj.bias)
    mask = call.padding_scale(call.arguments.get("attention_mask"))
    # Older hosts mask what the projection returned, and gate by the activation they are given, not always by SiLU.
    masks_input = masks_by_function(call.module)
    flow = Flow(call.input).scale(mask if masks_input else None, role="input")
    entering = flow.value
    flow.matrix(in_proj[carries], None if in_bias is None else in_bias[carries], role="input")
    flow.scale(None if masks_input else mask, role="input")
    flow.conv(weight(host.conv1d.weight), call.cast(host.conv1d.bias)).activation(host.activation)
    flow.scale(mask, role="act")
    flow.core(core(flow.value), skip=weight(host.D).flatten())
    activation = silu if masks_input else host.act

    def gate() -> Tensor:
        return activation(functional.linear(entering, in_proj[gates], None if in_bias is None else in_bias[gates]))

    flow.gate(gate)
    return flow.matrix(weight(host.out_proj.weight), call.cast(host.out_proj.bias), role="output")


def _split(call: Call, u: Tensor) -> tuple[Tensor, ...]:
    """Return the low-rank step, key and query that the convolved input makes, shared by all channels."""
    rank, state = call.host.time_step_rank, call.host.ssm_state_size
    return (u @ call.weight(call.host.x_proj.weight).T).split([rank, state, state], dim=-1)


def _selective(call: Call, step: Tensor, key: Tensor, query: Tensor) -> DiagonalDecay:
    host = call.host
    step = functional.linear(step, call.weight(host.dt_proj.weight), call.cast(host.dt_proj.bias))
    return _decay(call, functional.softplus(step), key.unsqueeze(2), query.unsqueeze(2))


def _decay(call: Call, delta: Tensor, key: Tensor, query: Tensor) -> DiagonalDecay:
    rate = -torch.exp(call.weight(call.host.A_log)).flatten(0, -2)
    return DiagonalDecay(query, key, delta.unsqueeze(-1), key_scale=delta, rate=rate)
