"""Delta rules of flash-linear-attention by name, RWKV-7 among them."""

import torch
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.mixers import DeltaRule, LowRankUpdate, ScalarDecay
from unilinattn.operator.flow import Flow
from unilinattn.scans.fla import fla_memory


@fla_memory(
    "fla.ops.delta_rule.chunk_delta_rule",
    "fla.ops.delta_rule.fused_chunk_delta_rule",
    "fla.ops.delta_rule.fused_recurrent_delta_rule",
)
def delta_rule(q: Tensor, k: Tensor, beta: Tensor) -> DeltaRule:
    """The delta rule without decay (Yang et al., NeurIPS 2024)."""
    return DeltaRule(q, k, _one_per_head(beta))


@fla_memory(
    "fla.ops.gated_delta_rule.chunk_gated_delta_rule",
    "fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule",
    refused=("initial_state", "gv", "cp_context"),
)
def gated_delta_rule(
    q: Tensor, k: Tensor, g: Tensor | None = None, gk: Tensor | None = None, beta: Tensor | None = None
) -> DeltaRule:
    """The delta rule with a decay per head, or per key coordinate (Yang, Kautz and Hatamizadeh, ICLR 2025)."""
    strength = q.new_ones(q.shape[:3]) if beta is None else beta
    decay = g if gk is None else gk if g is None else g.unsqueeze(-1) + gk
    return DeltaRule(q, k, _one_per_head(strength), decay)


@fla_memory("fla.ops.kda.chunk_kda", "fla.ops.kda.fused_recurrent_kda", refused=("initial_state", "cp_context"))
def kda(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> DeltaRule:
    """Kimi delta attention: a decay per key coordinate (Kimi Linear, 2025)."""
    return DeltaRule(q, k, _one_per_head(beta), g)


@fla_memory(
    "fla.ops.gated_delta_product.chunk_gated_delta_product",
    refused=("initial_state", "cp_context"),
    steps="num_householder",
)
def gated_delta_product(q: Tensor, k: Tensor, beta: Tensor, num_householder: int, g: Tensor | None = None) -> DeltaRule:
    """Several delta rule steps per token, decayed before the first (Siems et al., NeurIPS 2025)."""
    decay = None
    if g is not None:
        decay = torch.stack([g, *[torch.zeros_like(g)] * (num_householder - 1)], dim=2).flatten(1, 2)
    return DeltaRule(q.repeat_interleave(num_householder, 1), k, beta, decay)


@fla_memory("fla.ops.comba.chunk_comba", "fla.ops.comba.fused_recurrent_comba")
def comba(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor) -> LowRankUpdate:
    """Comba: a separate key p reads the erased value, before the decay (Hu et al., 2025)."""
    write = k.repeat_interleave(v.shape[2] // k.shape[2], 2) * beta.unsqueeze(-1)
    return LowRankUpdate(q, write, g, p, -write)


@fla_memory("fla.ops.gdn2.chunk_gdn2", "fla.ops.gdn2.fused_recurrent_gdn2", refused=("initial_state", "cp_context"))
def gdn2(flow: Flow, q: Tensor, k: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Flow:
    """A delta rule with gates of what is erased, by key coordinate, and of what is written, by channel."""
    # The decayed memory is erased, and the mixer erases the memory before its decay.
    return flow.scale(w.flatten(2), role="gate").core(LowRankUpdate(q, k, g, b * k * g.exp(), -k))


@fla_memory(
    "fla.ops.precond_gated_delta_rule.chunk_precond_gated_delta_rule",
    "fla.ops.precond_gated_delta_rule.fused_recurrent_precond_gated_delta_rule",
    "fla.ops.precond_gated_delta_rule.naive_recurrent_precond_gated_delta_rule",
    "fla.ops.precond_kda.chunk_precond_kda",
    "fla.ops.precond_kda.fused_recurrent_precond_kda",
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
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
) -> LowRankUpdate:
    """A delta rule whose written keys are divided by a power of their squashed running mean square."""
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
    return LowRankUpdate(q, written, g, k * decay.exp(), -written)


@fla_memory("fla.ops.rwkv7.chunk_rwkv7", "fla.ops.rwkv7.fused_recurrent_rwkv7")
def rwkv7(r: Tensor, w: Tensor, k: Tensor, a: Tensor, b: Tensor) -> LowRankUpdate:
    """RWKV-7: a decayed memory with a generalised delta rule (Peng et al., 2025)."""
    return LowRankUpdate(r, k, w, a, b)


@fla_memory("fla.ops.rwkv7.fused_mul_recurrent_rwkv7")
def fused_rwkv7(r: Tensor, w: Tensor, k: Tensor, kk: Tensor, a: Tensor) -> LowRankUpdate:
    """RWKV-7 with its erased keys and rates."""
    return LowRankUpdate(r, k, w, -kk, kk * a)


def _one_per_head(beta: Tensor) -> Tensor:
    if beta.ndim != 3:
        raise UncoveredError("its strengths differ by channel")
    return beta
