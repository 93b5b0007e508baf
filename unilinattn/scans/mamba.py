"""Scans of Mamba by name: those of mamba-ssm and causal-conv1d, and the functions of transformers that replace them."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import UncoveredError
from unilinattn.mixers import DeltaRule, DiagonalDecay, ScalarDecay
from unilinattn.operator.flow import Flow, silu
from unilinattn.rules.mixing_functions import register_mixing_function

SELECTIVE = "mamba_ssm.ops.selective_scan_interface"
COMBINED = "mamba_ssm.ops.triton.ssd_combined"
HUGGING_FACE = "transformers.models.*"
UNCOVERED = ("initial_states", "initial_state", "seq_idx", "cu_seqlens")
"""Arguments that must be None."""

Limits = tuple[float, float]


@register_mixing_function(
    "causal_conv1d.causal_conv1d_fn",
    "causal_conv1d.causal_conv1d_interface.causal_conv1d_ref",
    carried="x",
    tokens=-1,
    extra_outputs="return_final_states",
    refused=UNCOVERED,
)
@register_mixing_function(f"{HUGGING_FACE}.causal_conv1d_fn", carried="hidden_states", tokens=-1, refused=UNCOVERED)
def causal_conv1d(flow: Flow, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Flow:
    """The short convolution of each channel, and its activation."""
    flow.conv(weight.view(len(weight), 1, -1), bias)
    return flow if activation is None else flow.activation(activation)


@register_mixing_function(
    f"{HUGGING_FACE}.mamba_selective_scan",
    carried="hidden_states",
    tokens=-1,
    extra_outputs="return_last_state",
    refused=UNCOVERED,
)
@register_mixing_function(
    f"{SELECTIVE}.selective_scan_fn",
    f"{SELECTIVE}.selective_scan_ref",
    carried="u",
    tokens=-1,
    extra_outputs="return_last_state",
)
def selective_scan(
    flow: Flow,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta: Tensor | None = None,
    dt: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> Flow:
    """S6: one decay per channel and state coordinate, the skip, and the gate (HMA ACL Eq. 6-9)."""
    # transformers names the steps `dt`.
    delta = dt if delta is None else delta
    assert delta is not None
    delta = delta if delta_bias is None else delta + delta_bias.to(delta).unsqueeze(-1)
    step = (functional.softplus(delta) if delta_softplus else delta).transpose(1, 2)
    return s6(flow, step, _by_group(B, step), _by_group(C, step), A, D, z)


def s6(
    flow: Flow,
    step: Float[Tensor, "batch length channel"],
    key: Float[Tensor, "batch length group state"],
    query: Float[Tensor, "batch length group state"],
    rate: Float[Tensor, "channel state"],
    skip: Tensor | None,
    gate: Float[Tensor, "batch channel length"] | None,
) -> Flow:
    """Append S6, its skip and its gate."""
    if rate.is_complex():
        raise UncoveredError("its decays are complex")
    core = DiagonalDecay(query, key, step.unsqueeze(-1), key_scale=step, rate=rate.to(step))
    flow.core(core, skip=None if skip is None else skip.to(step))
    return flow if gate is None else flow.gate(silu(gate.transpose(1, 2)))


@register_mixing_function(f"{SELECTIVE}.mamba_inner_fn", f"{SELECTIVE}.mamba_inner_ref", carried="xz", tokens=(-1, 1))
def mamba_inner(
    flow: Flow,
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Flow:
    """A whole layer of Mamba after its input projection."""
    inner, state = xz.shape[1] // 2, A.shape[-1]
    select = torch.eye(inner, 2 * inner, dtype=xz.dtype, device=xz.device)
    causal_conv1d(flow.matrix(select, role="input"), conv1d_weight, conv1d_bias, "silu")
    sizes = [delta_proj_weight.shape[1], *(state if x is None else 0 for x in (B, C))]
    low, *sides = functional.linear(flow.value, x_proj_weight).split(sizes, -1)
    delta = _perhaps_normed(functional.linear(low, delta_proj_weight), dt_rms_weight, b_c_dt_rms_eps)
    delta = delta if delta_bias is None else delta + delta_bias.to(delta)
    step = functional.softplus(delta) if delta_softplus else delta
    factors: list[Tensor] = []
    options = (B, B_proj_bias, b_rms_weight), (C, C_proj_bias, c_rms_weight)
    for side, (fixed, bias, weight) in zip(sides, options, strict=True):
        factor = side.unsqueeze(2) if fixed is None else _by_group(fixed, step)
        factor = factor if bias is None or fixed is not None else factor + bias
        factors.append(_perhaps_normed(factor, weight, b_c_dt_rms_eps))
    key, query = factors
    return s6(flow, step, key, query, A, D, xz[:, inner:]).matrix(out_proj_weight, out_proj_bias, role="output")


@register_mixing_function(
    f"{HUGGING_FACE}.mamba2_chunk_scan",
    carried="hidden_states",
    extra_outputs="return_final_states",
    refused=UNCOVERED,
)
@register_mixing_function(
    f"{COMBINED}.mamba_chunk_scan_combined", carried="x", extra_outputs="return_final_states", refused=UNCOVERED
)
@register_mixing_function(
    f"{COMBINED}.mamba_chunk_scan",
    f"{COMBINED}.ssd_chunk_scan_combined_ref",
    f"{COMBINED}.ssd_selective_scan",
    carried="x",
)
def chunk_scan(
    flow: Flow,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Limits = (0.0, float("inf")),
) -> Flow:
    """SSD: one decay per head, the skip, and the gate (LaTIM Eq. 13-14 and 24-25)."""
    if dt.ndim > 3 or A.ndim > 1:
        raise UncoveredError("its steps or decays differ by channel")
    step = dt if dt_bias is None else dt + dt_bias.to(dt)
    step = (functional.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    skip = None if D is None else D.to(step).flatten()
    flow.core(ScalarDecay(C, B, A.to(step) * step, key_scale=step), skip=skip)
    return flow if z is None else flow.gate(silu(z.flatten(2)))


@register_mixing_function(
    f"{COMBINED}.mamba_split_conv1d_scan_combined",
    carried="zxbcdt",
    extra_outputs="return_final_states",
    refused=UNCOVERED,
)
def split_conv1d_scan(
    flow: Flow,
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    dt_limit: Limits = (0.0, float("inf")),
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Flow:
    """A whole layer of Mamba-2 after its input projection."""
    inner = D.numel() if headdim is None else len(D) * headdim
    state = (zxbcdt.shape[-1] - 2 * inner - len(A)) // (2 * ngroups)
    z, _, side, dt = zxbcdt.split([inner, inner, 2 * ngroups * state, len(A)], -1)
    channels = torch.eye(zxbcdt.shape[-1], dtype=zxbcdt.dtype, device=zxbcdt.device)[inner : 2 * inner]
    bias = (None, None) if conv1d_bias is None else (conv1d_bias[:inner], conv1d_bias[inner:])
    frozen = causal_conv1d(Flow(side), conv1d_weight[inner:], bias[1], activation).value
    key, query = (half.unflatten(-1, (ngroups, state)) for half in frozen.chunk(2, -1))
    causal_conv1d(flow.matrix(channels, role="input"), conv1d_weight[:inner], bias[0], activation)
    chunk_scan(flow, dt, A, key, query, D, None, dt_bias, dt_softplus=True, dt_limit=dt_limit)
    if rmsnorm_weight is None or not norm_before_gate:
        flow.gate(silu(z))
    if rmsnorm_weight is not None:
        flow.rms_norm(rmsnorm_weight, rmsnorm_eps, groups=ngroups)
        if norm_before_gate:
            flow.gate(silu(z))
    return flow if outproj_weight is None else flow.matrix(outproj_weight, outproj_bias, role="output")


@register_mixing_function(
    f"{HUGGING_FACE}.torch_chunk_gated_delta_rule",
    f"{HUGGING_FACE}.torch_recurrent_gated_delta_rule",
    f"{HUGGING_FACE}.chunk_kimi_delta_attention",
    f"{HUGGING_FACE}.recurrent_kimi_delta_attention",
    carried="value",
    extra_outputs=1,
)
def gated_delta_rule(
    query: Tensor, key: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False
) -> DeltaRule:
    """The gated delta rule of transformers, with a decay per head or per key coordinate."""
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    return DeltaRule(query * query.shape[-1] ** -0.5, key, beta, g)


def _by_group(
    factor: Float[Tensor, "..."], step: Float[Tensor, "batch length channel"]
) -> Float[Tensor, "batch length group state"]:
    """Return a key or query of S6, (channel, state) for every token or (batch, *group, state, length), by group."""
    if factor.ndim == 2:
        return factor.to(step).expand(*step.shape[:2], -1, -1)
    grouped = factor.unsqueeze(1) if factor.ndim == 3 else factor
    return grouped.permute(0, 3, 1, 2).to(step)


def _perhaps_normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else functional.rms_norm(x, x.shape[-1:], weight, eps)
