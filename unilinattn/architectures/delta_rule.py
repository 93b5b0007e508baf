"""Gated delta rule: a memory that corrects its values, between a short convolution and a gated norm."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.call import Call, Host, refusing, unmasked_leak
from unilinattn.call.stored import Stored
from unilinattn.errors import UncoveredError, nearest
from unilinattn.mixers import DeltaRule
from unilinattn.operator.flow import Flow, silu
from unilinattn.registry import register_architecture

_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "swish": silu, "sigmoid": torch.sigmoid}


@register_architecture(
    "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet",
    name="qwen3_next",
    kind="gated DeltaNet",
    padding_leak=unmasked_leak,
    check=refusing("cache_params", "cu_seq_lens_q"),
)
def qwen3_next(call: Call) -> Flow:
    """Gated delta rule of Qwen3-Next: two fused projections, whose rows are grouped by key head.

    Yang, Kautz and Hatamizadeh, ICLR 2025. Queries and keys are frozen unit vectors; the values carry.
    """
    host, x = call.host, _masked(call)
    groups = host.num_k_heads
    keys, values = host.key_dim // groups, host.value_dim // groups
    sizes = [keys, keys, values, values]
    query, key, value, gate = (
        call.stored(rows).then(_flat)
        for rows in host.in_proj_qkvz.weight.unflatten(0, (groups, -1)).split(sizes, dim=1)
    )
    gates = call.tensor(host.in_proj_ba.weight).unflatten(0, (groups, -1)).chunk(2, dim=1)
    strength, step = (functional.linear(x, rows.flatten(0, 1)) for rows in gates)
    return _delta_rule(
        call,
        weights=((query, key), value),
        kernel=host.conv1d.weight,
        state=host.head_k_dim,
        strength=torch.sigmoid(strength),
        log_decay=_head_decay(call, step),
        gate=functional.linear(x, gate()),
        norm=host.norm,
        output=host.out_proj,
    )


@register_architecture(
    "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
    name="qwen3_5",
    kind="gated DeltaNet",
    padding_leak=unmasked_leak,
    check=refusing("cache_params", "cu_seq_lens_q"),
)
def qwen3_5(call: Call) -> Flow:
    """Gated delta rule of Qwen3.5: one projection for queries, keys and values, one each for strength, decay and gate.

    Yang, Kautz and Hatamizadeh, ICLR 2025. Queries and keys are frozen unit vectors; the values carry.
    """
    host, x = call.host, _masked(call)
    projection = call.stored(host.in_proj_qkv.weight)
    return _delta_rule(
        call,
        weights=((projection[: 2 * host.key_dim],), projection[2 * host.key_dim :]),
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
    padding_leak=unmasked_leak,
    check=refusing("cache_params", "cu_seq_lens_q"),
)
def olmo_hybrid(call: Call) -> Flow:
    """Gated delta rule of OlmoHybrid: separate projections, and strengths up to 2 (negative eigenvalues).

    Yang, Kautz and Hatamizadeh, ICLR 2025. Queries and keys are frozen unit vectors; the values carry.
    """
    host, x = call.host, _masked(call)
    # The first version convolves queries, keys and values separately; later ones have one convolution for all.
    separate = hasattr(call.module, "v_conv1d")
    convolutions = [host.q_conv1d, host.k_conv1d, host.v_conv1d] if separate else [host.conv1d]
    return _delta_rule(
        call,
        weights=_separate(call),
        kernel=torch.cat([convolution.weight for convolution in convolutions]),
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
    padding_leak=unmasked_leak,
    check=refusing("cache_params", "cu_seq_lens_q"),
)
def kimi_delta(call: Call) -> Flow:
    """Kimi delta attention: a delta rule with one decay per key coordinate, and a sigmoid output gate.

    Kimi Linear, 2025. Queries and keys are frozen unit vectors; the values carry. A host with a lower bound on the
    log-decay computes it as the bound times a sigmoid, other hosts as minus a softplus.
    """
    host, x = call.host, _masked(call)
    module = host.forget_gate
    forget = Host(module, f"{call.name}.forget_gate")
    rate = torch.exp(call.tensor(forget.A_log)).view(-1, 1)
    step = (_perhaps_low_rank(call, x, module, "f") + call.tensor(forget.dt_bias)).unflatten(-1, (host.num_heads, -1))
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
    weights: tuple[Sequence[Stored], Stored],
    kernel: Tensor,
    state: int,
    strength: Tensor,
    log_decay: Tensor,
    gate: Tensor,
    norm: Any,
    output: Any,
) -> Flow:
    """Build the layer around the delta rule.

    `weights`: the projections to queries with keys and to values. `kernel`: the short convolution over all three.
    `state`: size of a query and key head. `norm`: the RMS norm over each value head, before `gate` and `output`.

    Raises `UncoveredError` if the activation of the output gate is unknown.
    """
    # The first versions convolve by the causal-conv1d package; without it, by torch and always with SiLU.
    by_torch = getattr(call.module, "causal_conv1d_fn", ...) is None
    activation = "silu" if by_torch else getattr(call.module, "activation", "silu")
    frozen, carried = call.tensor(kernel).split([sum(map(len, weights[0])), len(weights[1])])

    projected = torch.cat([functional.linear(_masked(call), rows()) for rows in weights[0]], -1)
    side = Flow(projected).conv(frozen).activation(activation)
    query, key = (_unit(half.unflatten(-1, (-1, state))) for half in side.value.chunk(2, dim=-1))
    core = DeltaRule(query * state**-0.5, key, strength, log_decay)

    flow = Flow(call.input).scale(_mask(call), role="input").matrix(weights[1], role="input")
    flow.conv(carried).activation(activation).core(core)
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    flow.rms_norm(call.tensor(norm.weight).repeat(core.heads), epsilon, groups=core.heads)
    gating = getattr(norm, "activation", "silu")
    if gating not in _GATES:
        accepted = nearest(gating, _GATES)
        raise UncoveredError(f"{call.name}: the output gate's activation {gating!r} is not covered{accepted}")
    flow.gate(_GATES[gating](gate))
    return flow.matrix(*call.affine(output), role="output")


def _mask(call: Call) -> Tensor | None:
    return call.padding_scale(call.arguments.get("attention_mask"))


def _masked(call: Call) -> Tensor:
    mask = _mask(call)
    return call.input if mask is None else call.input * mask


def _linear(call: Call, x: Tensor, projection: nn.Linear) -> Tensor:
    return call.affine(projection)(x)


def _perhaps_low_rank(call: Call, x: Tensor, module: nn.Module, name: str) -> Tensor:
    """Apply the module's `{name}_proj`, or `{name}_a_proj` followed by `{name}_b_proj`."""
    steps = ("_a_proj", "_b_proj") if hasattr(module, f"{name}_a_proj") else ("_proj",)
    for step in steps:
        x = _linear(call, x, getattr(module, name + step))
    return x


def _separate(call: Call) -> tuple[Sequence[Stored], Stored]:
    query, key, value = (call.stored(p.weight) for p in (call.host.q_proj, call.host.k_proj, call.host.v_proj))
    return (query, key), value


def _flat(rows: Tensor) -> Tensor:
    return rows.flatten(0, 1)


def _head_decay(call: Call, step: Tensor) -> Tensor:
    rate = torch.exp(call.tensor(call.host.A_log))
    return -rate * functional.softplus(step + call.tensor(call.host.dt_bias))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
