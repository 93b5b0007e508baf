"""Scans of flash-linear-attention by name: decayed memories, slots, RWKV-6, and short convolutions."""

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import UncoveredError
from unilinattn.mixers import DiagonalDecay, ExclusiveBonus, ScalarDecay, Toeplitz
from unilinattn.operator.flow import Flow
from unilinattn.operator.stages import Mix
from unilinattn.rules.mixing_functions import StagesOf, register_mixing_function


@register_mixing_function(
    "fla.modules.causal_conv1d.ops.causal_conv1d",
    "fla.modules.causal_conv1d.causal_conv1d",
    carried="x",
    extra_outputs=1,
    refused=("initial_state", "residual", "cp_context"),
)
def causal_conv1d(
    flow: Flow, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, mask: Tensor | None = None
) -> Flow:
    """The short convolution of each channel, and its activation."""
    flow.conv(weight.unsqueeze(1), bias)
    return flow if activation is None else flow.activation(activation)


@register_mixing_function("fla.modules.token_shift.token_shift", carried="x", refused=("cache",))
def token_shift(flow: Flow, output_cache: bool = False) -> Flow:
    """The previous token minus the current one (RWKV)."""
    value = flow.value
    kernel = value.new_tensor([[-1.0, 1.0]])
    return flow.stage(Mix("shift", Toeplitz(kernel, batch=value.shape[0], length=value.shape[1])))


OPTIONS = (
    "reverse",
    "use_qk_l2norm_in_kernel",
    "scale",
    "use_gate_in_kernel",
    "A_log",
    "dt_bias",
    "lower_bound",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
)
"""Arguments of the package that change queries, keys, log-decays and strengths before a memory reads them."""


def fla_memory(*functions: str, extra_outputs: Any = 1, **registered: Any) -> Callable[[StagesOf], StagesOf]:
    """Register functions by `register_mixing_function` with stages that get the factors after `OPTIONS` apply."""

    def decorate(stages: StagesOf) -> StagesOf:
        def with_options(**arguments: Any) -> Any:
            return stages(**_after_options(arguments))

        options = [Parameter(name, Parameter.KEYWORD_ONLY) for name in OPTIONS]
        parameters = [*signature(stages).parameters.values(), *options]
        with_options.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        register_mixing_function(*functions, carried="v", extra_outputs=extra_outputs, **registered)(with_options)
        return stages

    return decorate


def _after_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the factors that a memory reads, without `OPTIONS`; raise `UncoveredError` for a scan backward in time."""
    factors = {name: value for name, value in arguments.items() if name not in OPTIONS}
    query, gate, strength = "q" if "q" in factors else "r", factors.get("g"), factors.get("beta")
    if arguments.get("reverse"):
        raise UncoveredError("it runs backward in time")
    if arguments.get("use_qk_l2norm_in_kernel"):
        factors |= {name: unit(factors[name]) for name in ("q", "k", "p") if factors.get(name) is not None}
    if "scale" in arguments:
        factors[query] = scaled(factors[query], arguments["scale"])
    if gate is not None and arguments.get("use_gate_in_kernel"):
        factors["g"] = _log_decay(gate, *(arguments.get(name) for name in ("A_log", "dt_bias", "lower_bound")))
    if strength is not None and arguments.get("use_beta_sigmoid_in_kernel"):
        factors["beta"] = torch.sigmoid(strength)
    if strength is not None and arguments.get("allow_neg_eigval"):
        factors["beta"] = 2 * factors["beta"]
    return factors


def _log_decay(g: Tensor, rate: Tensor | None, bias: Tensor | None, bound: float | None) -> Tensor:
    """Return the log-decay: minus a softplus, or with a lower bound the bound times a sigmoid."""
    if g.ndim == 3:
        return _log_decay(g.unsqueeze(-1), rate, bias, bound).squeeze(-1)
    size = g.shape[-2]
    step = g if bias is None else g + bias.view(size, -1)
    factor = 1.0 if rate is None else rate.view(size, 1).to(g).exp()
    return -factor * functional.softplus(step) if bound is None else bound * torch.sigmoid(factor * step)


def scaled(query: Tensor, scale: float | None) -> Tensor:
    """Return queries times the scale, by default one over the root of their size."""
    return query * (query.shape[-1] ** -0.5 if scale is None else scale)


def unit(x: Tensor) -> Tensor:
    """Return unit vectors, with the epsilon of the kernels."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@fla_memory(
    "fla.ops.gla.chunk_gla",
    "fla.ops.gla.fused_chunk_gla",
    "fla.ops.gla.fused_recurrent_gla",
    refused=("initial_state", "gv"),
)
def gla(q: Tensor, k: Tensor, g: Tensor | None = None, gk: Tensor | None = None) -> DiagonalDecay:
    """Gated linear attention: one decay per key coordinate (Yang et al., ICML 2024)."""
    decay = g if gk is None else gk
    assert decay is not None
    return DiagonalDecay(q, k, decay)


@fla_memory(
    "fla.ops.simple_gla.chunk_simple_gla",
    "fla.ops.simple_gla.fused_chunk_simple_gla",
    "fla.ops.simple_gla.fused_recurrent_simple_gla",
    "fla.ops.lightning_attn.chunk_lightning_attn",
)
def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None) -> ScalarDecay:
    """Linear attention with one decay per head, which may be the same for every token."""
    decay = v.new_zeros(v.shape[:3]) if g is None else g
    decay = decay if g_gamma is None else decay + g_gamma.to(decay)
    return ScalarDecay(q, k, decay)


@fla_memory(
    "fla.ops.retention.chunk_retention",
    "fla.ops.retention.fused_chunk_retention",
    "fla.ops.retention.fused_recurrent_retention",
    "fla.ops.retention.parallel_retention",
)
def retention(q: Tensor, k: Tensor) -> ScalarDecay:
    """Retention: the decays 1 - 2^(-5 - h) are the same for every token (Sun et al., 2023)."""
    # The package computes them in float32 for tensors in bfloat16.
    exponent = torch.arange(q.shape[2], device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
    decay = (1 - 2.0 ** (-5.0 - exponent)).log().to(q).expand(q.shape[:3])
    return ScalarDecay(q, k, decay)


@fla_memory(
    "fla.ops.linear_attn.chunk_linear_attn",
    "fla.ops.linear_attn.fused_chunk_linear_attn",
    "fla.ops.linear_attn.fused_recurrent_linear_attn",
    extra_outputs=((None, None),),
)
def linear_attention(q: Tensor, k: Tensor, normalize: bool = True) -> ScalarDecay:
    """Linear attention without decay, with a frozen normaliser (Katharopoulos et al., ICML 2020)."""
    if normalize:
        q = q / ((q * k.cumsum(1)).sum(-1, keepdim=True) + 1e-10)
    return ScalarDecay(q, k, torch.zeros_like(q[..., 0]))


@register_mixing_function("fla.ops.hgrn.chunk_hgrn", "fla.ops.hgrn.fused_recurrent_hgrn", carried="x", extra_outputs=1)
def hgrn(g: Tensor) -> DiagonalDecay:
    """A gated recurrence of each channel (Qin, Yang and Zhong, NeurIPS 2023)."""
    ones = torch.ones_like(g[..., None, :1])
    return DiagonalDecay(ones, ones, g.unsqueeze(-1))


@fla_memory("fla.ops.gsa.chunk_gsa", "fla.ops.gsa.fused_recurrent_gsa")
def gsa(q: Tensor, k: Tensor, s: Tensor, g: Tensor | None = None) -> DiagonalDecay:
    """Gated slots: a frozen softmax over slots between two gated passes (Zhang et al., NeurIPS 2024)."""
    if g is None:
        s, g = _cumulative(s)
    groups = q.shape[2] // s.shape[2]
    key, slots, decay = (x.repeat_interleave(groups, 2) for x in (k, s, g))
    # Each slot is a head of the first pass, with one channel.
    read = ScalarDecay(q, key, decay.flatten(2)).apply(slots.flatten(2).unsqueeze(-1))
    return DiagonalDecay(read.reshape_as(slots).softmax(-1), slots, decay)


@fla_memory(
    "fla.ops.lightnet.chunk_lightnet",
    "fla.ops.lightnet.fused_recurrent_lightnet",
    extra_outputs=((None, None),),
)
def lightnet(q: Tensor, k: Tensor, mask: Tensor | None = None) -> DiagonalDecay:
    """Keys that are a running softmax over time, one per coordinate (Qin et al., 2024)."""
    key, decay = _cumulative(k, mask)
    return DiagonalDecay(q, key, decay)


@fla_memory("fla.ops.rwkv6.chunk_rwkv6", "fla.ops.rwkv6.fused_recurrent_rwkv6")
def rwkv6(r: Tensor, k: Tensor, w: Tensor, u: Tensor) -> ExclusiveBonus:
    """RWKV-6: a decayed memory that is read before each write, and a bonus (Peng et al., 2024)."""
    return ExclusiveBonus(r, k, w, u)


@fla_memory("fla.ops.abc.chunk_abc", "fla.ops.abc.chunk.chunk_abc")
def abc(q: Tensor, k: Tensor, s: Tensor) -> DiagonalDecay:
    """Slots that keys and values are written to with a running softmax over time (Peng et al., ACL 2022)."""
    return gsa(scaled(q, None), k, s)


@fla_memory("fla.ops.mesa_net.chunk_mesa_net", extra_outputs=2, refused=("h_kk_init", "h_kv_init"))
def mesa_net(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, lamb: Tensor, max_CG_iteration: int = 30) -> ScalarDecay:
    """Linear attention whose queries are divided by the memory of the keys, in steps of conjugate gradients.

    von Oswald et al., 2025. The solution is frozen.
    """
    written, ones = k * beta.unsqueeze(-1), torch.ones_like(k[..., :1])
    outer = (written.unsqueeze(-1) * k.unsqueeze(-2)).flatten(3)
    memory = ScalarDecay(ones, ones, g).apply(outer).unflatten(3, (k.shape[-1], -1))
    return ScalarDecay(_solved(memory + torch.diag_embed(lamb.to(k)), q, max_CG_iteration), written, g)


def _solved(matrix: Tensor, target: Tensor, steps: int) -> Tensor:
    """Return an approximate solution of matrix x = target by conjugate gradients from zero."""
    solution, rest = torch.zeros_like(target), target
    direction, size = rest, rest.square().sum(-1, keepdim=True)
    for _ in range(steps):
        image = (matrix @ direction.unsqueeze(-1)).squeeze(-1)
        # The package adds this number to its denominators.
        length = size / ((direction * image).sum(-1, keepdim=True) + 1e-5)
        solution, rest = solution + length * direction, rest - length * image
        next_size = rest.square().sum(-1, keepdim=True)
        direction, size = rest + next_size / (size + 1e-5) * direction, next_size
    return solution


@register_mixing_function("fla.ops.cyfa.chunk.chunk_cyfa", carried="v", extra_outputs=1)
@register_mixing_function("fla.ops.cyfa.fused_recurrent.fused_recurrent_cyfa", carried="v", extra_outputs=1)
def cyfa(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    delta: Tensor,
    beta: Tensor,
    readout: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    q_norm_eps: float,
    k_norm_eps: float,
    scale: float | None = None,
) -> ScalarDecay:
    """Slots on a circle that turns with the tokens: keys and values are written to cosines and sines of the angle."""
    q, k = (
        functional.rms_norm(x, x.shape[-1:], weight.to(x), eps)
        for x, weight, eps in ((q, q_norm_weight, q_norm_eps), (k, k_norm_weight, k_norm_eps))
    )
    period = readout.shape[-1]
    slot = torch.arange(period + 1, device=q.device)
    cosine, pair = slot % 2 == 0, slot // 2
    mate = torch.where(cosine, slot + 1, slot - 1).clamp(0, period)
    phase = (delta.cumsum(1).unsqueeze(-1) * pair).remainder(period) * (2 * torch.pi / period)
    c, s = phase.cos(), phase.sin()
    size = (torch.where(pair == 0, 1.0, 2.0).to(q) / period).sqrt()
    written = beta.unsqueeze(-1) * size * torch.where(cosine, c, -s)
    logits = ScalarDecay(scaled(q, scale), k, g).apply(written)
    turned = c * logits + torch.where(cosine, -s, s) * logits[..., mate]
    angle = torch.arange(period, device=q.device).to(q)[:, None] * pair * (2 * torch.pi / period)
    basis = size * torch.where(cosine, angle.cos(), torch.where(pair == 0, 0.0, angle.sin()))
    table = readout.to(q) @ basis
    weights = torch.einsum("hrm,blhr->blhm", table, torch.einsum("hrm,blhm->blhr", table, turned).softmax(-1))
    read = c * weights + torch.where(cosine, s, -s) * weights[..., mate]
    return ScalarDecay(read, written, g)


def _cumulative(logits: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return exp(x_j - z_j) and z_{j-1} - z_j with z_j = log sum_{i <= j} exp(x_i), the sum over real tokens."""
    begun = torch.ones_like(logits, dtype=torch.bool)
    if mask is not None:
        real = mask[(..., *[None] * (logits.ndim - 2))]
        logits = logits.masked_fill(~real, torch.finfo(logits.dtype).min)
        begun = (real.cumsum(1) > 0).expand_as(logits)
    # Before the first real token the sum is empty, and there is no memory to decay.
    total = logits.logcumsumexp(1).masked_fill(~begun, 0)
    fading = (total[:, :-1] - total[:, 1:]).masked_fill(~begun[:, :-1], 0)
    return (logits - total).exp(), torch.cat([torch.zeros_like(total[:, :1]), fading], dim=1)
