"""Gated delta rule: a memory that corrects itself, between a short convolution and a gated norm."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.architectures.call import Call, Host, unmasked_leak
from unilinattn.errors import UncoveredError, nearest
from unilinattn.flow import Flow, silu
from unilinattn.mixers import DeltaRule
from unilinattn.registry import register_architecture

_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "swish": silu, "sigmoid": torch.sigmoid}


@register_architecture(
    "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet",
    name="qwen3_next",
    kind="gated DeltaNet",
    leak=unmasked_leak,
)
def qwen3_next(call: Call) -> Flow:
    """Gated delta rule as Qwen3-Next runs it: two fused projections, their rows grouped by key head.

    Yang, Kautz and Hatamizadeh, ICLR 2025. Queries and keys are unit vectors; only the values carry.
    """
    host, x = call.host, _masked(call)
    groups = host.num_k_heads
    keys, values = host.key_dim // groups, host.value_dim // groups
    fused = call.weight(host.in_proj_qkvz.weight).unflatten(0, (groups, -1)).split([keys, keys, values, values], dim=1)
    query, key, value, gate = (rows.flatten(0, 1) for rows in fused)
    both = call.weight(host.in_proj_ba.weight).unflatten(0, (groups, -1)).chunk(2, dim=1)
    strength, step = (functional.linear(x, rows.flatten(0, 1)) for rows in both)
    return _delta_rule(
        call,
        weights=(torch.cat([query, key]), value),
        kernel=host.conv1d.weight,
        state=host.head_k_dim,
        strength=torch.sigmoid(strength),
        log_decay=_head_decay(call, step),
        gate=functional.linear(x, gate),
        norm=host.norm,
        output=host.out_proj,
    )


@register_architecture(
    "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
    name="qwen3_5",
    kind="gated DeltaNet",
    leak=unmasked_leak,
)
def qwen3_5(call: Call) -> Flow:
    """Gated delta rule as Qwen3.5 runs it: queries, keys and values from one projection, the rest from one each.

    Yang, Kautz and Hatamizadeh, ICLR 2025. Queries and keys are unit vectors; only the values carry.
    """
    host, x = call.host, _masked(call)
    query_key, value = call.weight(host.in_proj_qkv.weight).split([2 * host.key_dim, host.value_dim])
    return _delta_rule(
        call,
        weights=(query_key, value),
        kernel=host.conv1d.weight,
        state=host.head_k_dim,
        strength=torch.sigmoid(_linear(call, x, host.in_proj_b)),
        log_decay=_head_decay(call, _linear(call, x, host.in_proj_a)),
        gate=_linear(call, x, host.in_proj_z),
        norm=host.norm,
        output=host.out_proj,
    )


@register_architecture(
    "transformers.models.olmo_hybrid.modeling_olmo_hybrid.OlmoHybridGatedDeltaNet",
    name="olmo_hybrid",
    kind="gated DeltaNet",
    leak=unmasked_leak,
)
def olmo_hybrid(call: Call) -> Flow:
    """Gated delta rule as OlmoHybrid runs it: a projection each, strengths up to 2 (negative eigenvalues).

    Yang, Kautz and Hatamizadeh, ICLR 2025. Queries and keys are unit vectors; only the values carry.
    """
    host, x = call.host, _masked(call)
    # Its first version has a convolution each for queries, keys and values instead of one over all of them.
    each = [host.q_conv1d, host.k_conv1d, host.v_conv1d] if hasattr(call.module, "v_conv1d") else [host.conv1d]
    return _delta_rule(
        call,
        weights=_separate(call),
        kernel=torch.cat([convolution.weight for convolution in each]),
        state=host.head_k_dim,
        strength=torch.sigmoid(_linear(call, x, host.b_proj)) * (2 if host.allow_neg_eigval else 1),
        log_decay=_head_decay(call, _linear(call, x, host.a_proj)),
        gate=_linear(call, x, host.g_proj),
        norm=host.o_norm,
        output=host.o_proj,
    )


@register_architecture(
    "transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearDeltaAttention",
    "transformers.models.bailing_hybrid.modeling_bailing_hybrid.BailingHybridDeltaAttention",
    "transformers.models.glm5_next.modeling_glm5_next.Glm5NextTextLinearAttention",
    name="kimi_delta",
    kind="Kimi delta attention (KDA)",
    leak=unmasked_leak,
)
def kimi_delta(call: Call) -> Flow:
    """Kimi delta attention: a delta rule whose memory decays coordinate by coordinate, and a sigmoid output gate.

    Kimi Linear, 2025. Queries and keys are unit vectors; only the values carry. Where a host bounds its log-decay
    from below, that is the bound times a sigmoid instead of a softplus.
    """
    host, x = call.host, _masked(call)
    module = host.forget_gate
    forget = Host(module, f"{call.name}.forget_gate")
    rate = torch.exp(call.weight(forget.A_log)).view(-1, 1)
    step = (_perhaps_low_rank(call, x, module, "f") + call.weight(forget.dt_bias)).unflatten(-1, (host.num_heads, -1))
    bound = getattr(module, "safe_gate_lower_bound", None)
    if getattr(module, "safe_gate", False):
        bound = forget.lower_bound
    return _delta_rule(
        call,
        weights=_separate(call),
        kernel=host.conv1d.weight,
        state=host.head_dim,
        strength=torch.sigmoid(_linear(call, x, host.b_proj)),
        log_decay=-rate * functional.softplus(step) if bound is None else bound * torch.sigmoid(rate * step),
        gate=_perhaps_low_rank(call, x, call.module, "g"),
        norm=host.o_norm,
        output=host.o_proj,
    )


def _delta_rule(
    call: Call,
    *,
    weights: tuple[Tensor, Tensor],
    kernel: Tensor,
    state: int,
    strength: Tensor,
    log_decay: Tensor,
    gate: Tensor,
    norm: Any,
    output: Any,
) -> Flow:
    """Build what the hosts share: `weights` into queries with keys and into values, one `kernel` over all of them."""
    call.refuse("cache_params", "cu_seq_lens_q")
    # The first versions convolve by a function of another package, or by torch and then always with SiLU.
    by_torch = getattr(call.module, "causal_conv1d_fn", ...) is None
    activation = "silu" if by_torch else getattr(call.module, "activation", "silu")
    frozen, carried = call.weight(kernel).split([len(rows) for rows in weights])

    side = Flow(_masked(call)).matrix(weights[0], role="input").conv(frozen).activation(activation)
    query, key = (_unit(part.unflatten(-1, (-1, state))) for part in side.value.chunk(2, dim=-1))
    core = DeltaRule(query * state**-0.5, key, strength, log_decay)

    flow = Flow(call.input).scale(_mask(call), role="input").matrix(weights[1], role="input")
    flow.conv(carried).activation(activation).core(core)
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    flow.rms_norm(call.weight(norm.weight).repeat(core.heads), epsilon, groups=core.heads)
    gating = getattr(norm, "activation", "silu")
    if gating not in _GATES:
        accepted = nearest(gating, _GATES)
        raise UncoveredError(f"{call.name}: the output gate's activation {gating!r} is not covered{accepted}")
    flow.gate(_GATES[gating](gate))
    return flow.matrix(call.weight(output.weight), call.cast(output.bias), role="output")


def _mask(call: Call) -> Tensor | None:
    return call.padding_scale(call.arguments.get("attention_mask"))


def _masked(call: Call) -> Tensor:
    mask = _mask(call)
    return call.input if mask is None else call.input * mask


def _linear(call: Call, x: Tensor, projection: nn.Linear) -> Tensor:
    return functional.linear(x, call.weight(projection.weight), call.cast(projection.bias))


def _perhaps_low_rank(call: Call, x: Tensor, module: nn.Module, name: str) -> Tensor:
    """Project by the module's `{name}_proj`, or by `{name}_a_proj` and then `{name}_b_proj`."""
    steps = ("_a_proj", "_b_proj") if hasattr(module, f"{name}_a_proj") else ("_proj",)
    for step in steps:
        x = _linear(call, x, getattr(module, name + step))
    return x


def _separate(call: Call) -> tuple[Tensor, Tensor]:
    query, key, value = (call.weight(p.weight) for p in (call.host.q_proj, call.host.k_proj, call.host.v_proj))
    return torch.cat([query, key]), value


def _head_decay(call: Call, step: Tensor) -> Tensor:
    rate = torch.exp(call.weight(call.host.A_log))
    return -rate * functional.softplus(step + call.weight(call.host.dt_bias))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
