"""Delta rules of flash-linear-attention by name, RWKV-7 among them."""

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.architectures.fla_scans import forward_only, scaled, unit, units
from unilinattn.errors import UncoveredError
from unilinattn.mixers import DeltaRule, LowRankUpdate, ScalarDecay
from unilinattn.operator.flow import Flow
from unilinattn.rules.mixing_functions import register_mixing_function


@register_mixing_function(
    "fla.ops.delta_rule.chunk_delta_rule",
    "fla.ops.delta_rule.fused_chunk_delta_rule",
    "fla.ops.delta_rule.fused_recurrent_delta_rule",
    carried="v",
    extra_outputs=1,
)
def delta_rule(
    q: Tensor, k: Tensor, beta: Tensor, scale: float | None = None, use_qk_l2norm_in_kernel: bool = False
) -> DeltaRule:
    """The delta rule without decay (Yang et al., NeurIPS 2024)."""
    q, k = units(q, k, use_qk_l2norm_in_kernel)
    return DeltaRule(scaled(q, scale), k, _one_per_head(beta))


@register_mixing_function(
    "fla.ops.gated_delta_rule.chunk_gated_delta_rule",
    "fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule",
    carried="v",
    extra_outputs=1,
    refused=("initial_state", "gv", "cp_context"),
)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> DeltaRule:
    """The delta rule with a decay per head, or per key coordinate (Yang, Kautz and Hatamizadeh, ICLR 2025)."""
    q, k = units(q, k, use_qk_l2norm_in_kernel)
    strength = (
        q.new_ones(q.shape[:3]) if beta is None else _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    )
    if g is not None and use_gate_in_kernel:
        assert A_log is not None
        g = -A_log.to(g).exp() * functional.softplus(g if dt_bias is None else g + dt_bias)
    decay = g if gk is None else gk if g is None else g.unsqueeze(-1) + gk
    return DeltaRule(scaled(q, scale), k, _one_per_head(strength), decay)


@register_mixing_function(
    "fla.ops.kda.chunk_kda",
    "fla.ops.kda.fused_recurrent_kda",
    carried="v",
    extra_outputs=1,
    refused=("initial_state", "cp_context"),
)
def kda(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> DeltaRule:
    """Kimi delta attention: a decay per key coordinate (Kimi Linear, 2025)."""
    q, k = units(q, k, use_qk_l2norm_in_kernel)
    if use_gate_in_kernel:
        g = kda_gate(g, A_log, dt_bias, lower_bound)
    strength = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return DeltaRule(scaled(q, scale), k, _one_per_head(strength), g)


def kda_gate(g: Tensor, rate: Tensor | None, bias: Tensor | None, bound: float | None) -> Tensor:
    """Return the log-decay: minus a softplus, or with a lower bound the bound times a sigmoid."""
    size = g.shape[-2]
    step = g if bias is None else g + bias.view(size, -1)
    factor = 1.0 if rate is None else rate.view(size, 1).to(g).exp()
    return -factor * functional.softplus(step) if bound is None else bound * torch.sigmoid(factor * step)


@register_mixing_function(
    "fla.ops.gated_delta_product.chunk_gated_delta_product",
    carried="v",
    extra_outputs=1,
    refused=("initial_state", "cp_context"),
    steps="num_householder",
)
def gated_delta_product(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    num_householder: int,
    g: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> DeltaRule:
    """Several delta rule steps per token, decayed before the first (Siems et al., NeurIPS 2025)."""
    q, k = units(q, k, use_qk_l2norm_in_kernel)
    decay = None
    if g is not None:
        decay = torch.stack([g, *[torch.zeros_like(g)] * (num_householder - 1)], dim=2).flatten(1, 2)
    return DeltaRule(scaled(q, scale).repeat_interleave(num_householder, 1), k, beta, decay)


@register_mixing_function(
    "fla.ops.comba.chunk_comba",
    "fla.ops.comba.fused_recurrent_comba",
    carried="v",
    extra_outputs=1,
)
def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> LowRankUpdate:
    """Comba: a separate key p reads the erased value, before the decay (Hu et al., 2025)."""
    if use_qk_l2norm_in_kernel:
        q, k, p = (unit(x) for x in (q, k, p))
    write = k.repeat_interleave(v.shape[2] // k.shape[2], 2) * beta.unsqueeze(-1)
    return LowRankUpdate(scaled(q, scale), write, g, p, -write)


@register_mixing_function(
    "fla.ops.gdn2.chunk_gdn2",
    "fla.ops.gdn2.fused_recurrent_gdn2",
    carried="v",
    extra_outputs=1,
    refused=("initial_state", "cp_context"),
)
def gdn2(
    flow: Flow,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Flow:
    """A delta rule with gates of what is erased, by key coordinate, and of what is written, by channel."""
    q, k = units(q, k, use_qk_l2norm_in_kernel)
    g = kda_gate(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
    # The decayed memory is erased, and the mixer erases the memory before its decay.
    return flow.scale(w.flatten(2), role="gate").core(LowRankUpdate(scaled(q, scale), k, g, b * k * g.exp(), -k))


@register_mixing_function(
    "fla.ops.precond_gated_delta_rule.chunk_precond_gated_delta_rule",
    "fla.ops.precond_gated_delta_rule.fused_recurrent_precond_gated_delta_rule",
    "fla.ops.precond_gated_delta_rule.naive_recurrent_precond_gated_delta_rule",
    "fla.ops.precond_kda.chunk_precond_kda",
    "fla.ops.precond_kda.fused_recurrent_precond_kda",
    carried="v",
    extra_outputs=2,
    refused=("initial_state", "initial_A_state", "gk", "gv", "cp_context"),
)
def preconditioned_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_atk: Tensor,
    beta: Tensor,
    beta_atk: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
) -> LowRankUpdate:
    """A delta rule whose written keys are divided by a power of their squashed running mean square."""
    q, k = units(q, k, use_qk_l2norm_in_kernel)
    g = kda_gate(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
    ones = torch.ones_like(k[..., :1])
    square = ScalarDecay(ones, ones, g_atk).apply(beta_atk.unsqueeze(-1) * k.square())
    centre = -0.2 if log_atk_scale is None else log_atk_scale.to(k).view(-1, 1)
    distance = torch.log(square + eps) - centre
    written = k * torch.exp(
        -torch.log(torch.tensor(x, dtype=torch.float64, device="cpu")).to(k) * distance / (1 + distance.abs())
    )
    groups = v.shape[2] // k.shape[2]
    q, k, written = (side.repeat_interleave(groups, 2) for side in (q, k, written))
    written = written * beta.unsqueeze(-1)
    decay = g if g.ndim == 4 else g.unsqueeze(-1)
    return LowRankUpdate(scaled(q, scale), written, g, k * decay.exp(), -written)


@register_mixing_function(
    "fla.ops.rwkv7.chunk_rwkv7", "fla.ops.rwkv7.fused_recurrent_rwkv7", carried="v", extra_outputs=1
)
def rwkv7(r: Tensor, w: Tensor, k: Tensor, a: Tensor, b: Tensor, scale: float | None = None) -> LowRankUpdate:
    """RWKV-7: a decayed memory with a generalised delta rule (Peng et al., 2025)."""
    return LowRankUpdate(scaled(r, scale), k, w, a, b)


@register_mixing_function("fla.ops.rwkv7.fused_mul_recurrent_rwkv7", carried="v", extra_outputs=1)
def fused_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, kk: Tensor, a: Tensor, scale: float | None = None, reverse: bool = False
) -> LowRankUpdate:
    """RWKV-7 with its erased keys and rates."""
    forward_only(reverse)
    return LowRankUpdate(scaled(r, scale), k, w, -kk, kk * a)


def _strength(beta: Tensor, sigmoid: bool, doubled: bool) -> Tensor:
    return (torch.sigmoid(beta) if sigmoid else beta) * (2 if doubled else 1)


def _one_per_head(beta: Tensor) -> Tensor:
    if beta.ndim != 3:
        raise UncoveredError("its strengths differ by channel")
    return beta
