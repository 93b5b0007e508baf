"""Mamba-1 and its relatives: the selective state space S6 between a short convolution and a gate.

All adapters build one layer, y = W_out ((S6 u + D u) * act(W_z x)) with u = act(conv(W_x x)). They differ in how they
compute the step delta, the key B and the query C from u, and in the row order of the projection [W_x; W_z].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.s6 import s6_core
from unilinattn.call import Call, masks_by_function, projection_leak, refusing
from unilinattn.mixers import DiagonalDecay
from unilinattn.operator.flow import Flow, silu
from unilinattn.registry import register_architecture


def leak(module: nn.Module, mask: Tensor) -> str | None:
    """Return the reason why padding leaks into real tokens, or None if it does not.

    transformers < 5.17 masks after the projection, so the projection's bias cannot leak.
    """
    return projection_leak(module, mask) if masks_by_function(module) else None


@register_architecture(
    "transformers.models.mamba.modeling_mamba.MambaMixer",
    name="mamba",
    kind="Mamba-1 (S6)",
    padding_leak=leak,
    check=refusing("seq_idx"),
)
def mamba(call: Call) -> Flow:
    """S6 of Mamba in transformers: each channel is a head, and all heads share the query C and the key B.

    HMA ACL Eq. 6-9 and 14. delta, B and C are functions of the convolved input and are frozen with it.
    """
    return _layer(call, lambda u: _selective(call, *_split(call, u)))


@register_architecture(
    "transformers.models.falcon_mamba.modeling_falcon_mamba.FalconMambaMixer",
    name="falcon_mamba",
    kind="Mamba-1 (S6), normalised",
    padding_leak=leak,
    check=refusing("seq_idx"),
)
def falcon_mamba(call: Call) -> Flow:
    """S6 of FalconMamba: the step, key and query pass an RMS norm without weights, which is frozen with them.

    HMA ACL Eq. 6-9 and 14, with B, C and the low-rank step normalised.
    """
    eps = call.host.rms_eps
    return _layer(call, lambda u: _selective(call, *(Flow(x).rms_norm(None, eps).value for x in _split(call, u))))


@register_architecture(
    "transformers.models.jamba.modeling_jamba.JambaMambaMixer",
    name="jamba",
    kind="Mamba-1 (S6), normalised",
    padding_leak=leak,
    check=refusing("seq_idx"),
)
def jamba(call: Call) -> Flow:
    """S6 of Jamba: the step, key and query pass one weighted RMS norm each, which is frozen with them.

    HMA ACL Eq. 6-9 and 14, with B, C and the low-rank step normalised.
    """
    host = call.host
    norms = (host.dt_layernorm, host.b_layernorm, host.c_layernorm)

    def core(u: Tensor) -> DiagonalDecay:
        normalised = (
            Flow(x).rms_norm(call.tensor(norm.weight), norm.variance_epsilon).value
            for x, norm in zip(_split(call, u), norms, strict=True)
        )
        return _selective(call, *normalised)

    return _layer(call, core)


@register_architecture(
    "transformers.models.zamba.modeling_zamba.ZambaMambaMixer",
    name="zamba",
    kind="Mamba-1 (S6), several Mamba heads",
    padding_leak=leak,
    check=refusing("seq_idx"),
)
def zamba(call: Call) -> Flow:
    """S6 of Zamba in several Mamba heads: each projects its step, key and query from its channels only.

    HMA ACL Eq. 6-9 and 14 for each Mamba head. The input projection interleaves the rows of values and gates.
    """
    host, tensor = call.host, call.tensor
    rank, state = host.time_step_rank, host.ssm_state_size

    def core(u: Tensor) -> DiagonalDecay:
        heads = u.unflatten(2, (host.n_mamba_heads, -1))
        projected = torch.einsum("blhp,hrp->blhr", heads, tensor(host.x_proj_weight))
        step, key, query = projected.split([rank, state, state], dim=-1)
        step = torch.einsum("blhr,hpr->blhp", step, tensor(host.dt_proj_weight)) + tensor(host.dt_proj_bias)
        return s6_core(call, functional.softplus(step).flatten(2), key, query, host.A_log)

    return _layer(call, core, carries=slice(0, None, 2), gates=slice(1, None, 2))


def _layer(
    call: Call, core: Callable[[Tensor], DiagonalDecay], *, carries: slice | None = None, gates: slice | None = None
) -> Flow:
    """Build the layer: input projection, short convolution, activation, core with skip, gate, output projection.

    `core` maps the convolved input (batch, length, channel) to S6. `carries` and `gates` are the rows of the input
    projection that produce the values and the gate; by default its first and its second half.
    """
    host, tensor, inner = call.host, call.tensor, call.host.intermediate_size
    carries, gates = carries or slice(inner), gates or slice(inner, None)
    projection = call.affine(host.in_proj)
    mask = call.padding_scale(call.arguments.get("attention_mask"))
    # transformers < 5.17 masks after the projection and gates by `host.act`; later versions mask the layer's input
    # and always gate by SiLU.
    masks_input = masks_by_function(call.module)
    flow = Flow(call.input).scale(mask if masks_input else None, role="input")
    gate_input = flow.value
    flow.matrix(*projection[carries], role="input")
    flow.scale(None if masks_input else mask, role="input")
    flow.conv(*call.affine(host.conv1d)).activation(host.activation)
    flow.scale(mask, role="act")
    flow.core(core(flow.value), skip=tensor(host.D).flatten())
    activation = silu if masks_input else host.act
    flow.gate(lambda: activation(projection[gates](gate_input)))
    return flow.matrix(*call.affine(host.out_proj), role="output")


def _split(call: Call, u: Tensor) -> tuple[Tensor, ...]:
    """Project the convolved input to the low-rank step, the key and the query, which all channels share."""
    rank, state = call.host.time_step_rank, call.host.ssm_state_size
    return call.affine(call.host.x_proj)(u).split([rank, state, state], dim=-1)


def _selective(call: Call, step: Tensor, key: Tensor, query: Tensor) -> DiagonalDecay:
    """Return S6 for a low-rank step (batch, length, rank), a key and a query (batch, length, state)."""
    # A quantised host calls `dt_proj`; any other multiplies by `dt_proj.weight`, so LoRA on `dt_proj` has no effect.
    quantised = hasattr(getattr(call.module, "config", None), "_is_quantized")
    layer: Any = call.host.dt_proj if quantised else call.module.dt_proj
    delta = functional.softplus(call.affine(layer)(step))
    return s6_core(call, delta, key.unsqueeze(2), query.unsqueeze(2), call.host.A_log)
