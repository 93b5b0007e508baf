"""Attentions of flash-linear-attention and flash-attn by name, each a matrix that is computed from its definition.

The matrices take memory and time that are quadratic in the number of tokens.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from unilinattn.mixers import Dense
from unilinattn.rules.mixing_functions import register_mixing_function
from unilinattn.scans.fla import fla_memory

Matrix = Float[Tensor, "batch head query key"]

FLASH = ("alibi_slopes", "block_table")
"""Arguments of flash-attn that are not covered."""


@register_mixing_function("flash_attn.flash_attn_func", carried="v", refused=FLASH)
def flash_attention(
    q: Tensor,
    k: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Tensor | None = None,
) -> Dense:
    """Softmax attention, optionally in a window of (earlier, later) keys."""
    scores = products(q, k, softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return Dense(_softmax(scores, _visible(scores, window_size, causal=causal, mask=mask)))


register_mixing_function(
    "flash_attn.flash_attn_varlen_func", carried="v", tokens=0, packed="cu_seqlens_k", refused=FLASH
)(flash_attention)


@register_mixing_function("fla.ops.attn.parallel_attn", "fla.ops.attn.parallel.parallel_attn", carried="v")
@register_mixing_function(
    "fla.ops.forgetting_attn.parallel_forgetting_attn",
    "fla.ops.forgetting_attn.parallel.parallel_forgetting_attn",
    carried="v",
)
def forgetting_attention(
    q: Tensor,
    k: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    sink_bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Dense:
    """Softmax attention whose old scores a forget gate lowers (Lin et al., ICLR 2025), optionally with a sink."""
    scores = products(q, k, scale)
    scores = scores if g is None else scores + _fading(g)
    return Dense(_softmax(scores, _visible(scores, _window(window_size), mask=mask), sink_bias))


@register_mixing_function(
    "fla.ops.wall_attn.parallel_wall_attn", "fla.ops.wall_attn.parallel.parallel_wall_attn", carried="v"
)
def wall_attention(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    g_scalar: Tensor | None = None,
    sink_bias: Tensor | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    mask: Tensor | None = None,
) -> Dense:
    """Softmax attention whose keys decay coordinate by coordinate."""
    key = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    total = g.cumsum(1)
    # Keys of later tokens, which are hidden, would grow.
    decay = (total.unsqueeze(2) - total.unsqueeze(1)).clamp_max(0).exp()
    scores = torch.einsum("bihn,bjhn,bijhn->bhij", q, key, decay)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if g_scalar is None else scores + _fading(g_scalar)
    return Dense(_softmax(scores, _visible(scores, _window(window_size), mask=mask), sink_bias))


@register_mixing_function("fla.ops.parallax.parallel_parallax", carried="v")
def parallax(
    q: Tensor,
    r: Tensor,
    k: Tensor,
    scale: float | None = None,
    window_size: int | None = None,
    mask: Tensor | None = None,
) -> Dense:
    """Softmax attention times a first-order correction: p_ij (1 + sum_m p_im s_im - s_ij) with s = r . k."""
    scores, correction = products(q, k, scale), products(r, k, 1.0)
    weights = _softmax(scores, _visible(scores, _window(window_size), mask=mask))
    return Dense(weights * (1 + (weights * correction).sum(-1, keepdim=True) - correction))


@register_mixing_function("fla.ops.stickbreaking_attn.parallel_stickbreaking_attn", carried="v", extra_outputs=1)
def stickbreaking(
    q: Tensor, k: Tensor, scale: float | None = None, attend_current: bool = False, mask: Tensor | None = None
) -> Dense:
    """Each key, the nearest first, takes a sigmoid share of what later keys left: a product of logistic gates."""
    scores = products(q, k, scale)
    visible = _visible(scores, mask=mask)
    if not attend_current:
        visible = visible & ~torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    left = functional.logsigmoid(-scores).masked_fill(~visible, 0.0)
    later = left.flip(-1).cumsum(-1).flip(-1) - left
    return Dense((functional.logsigmoid(scores) + later).masked_fill(~visible, -torch.inf).exp())


@register_mixing_function("fla.ops.path_attn.parallel_path_attn", carried="v", extra_outputs=1)
@register_mixing_function("fla.ops.path_attn.parallel.parallel_path_attn", carried="v", extra_outputs=1)
def path_attention(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Dense:
    """Softmax attention to keys that each later token reflects: k_j <- (I - beta_t w_t w_t^T) k_j for t > j."""
    keys, rows = torch.zeros_like(k), []
    for t in range(q.shape[1]):
        direction = w[:, t].unsqueeze(1)
        keys = keys - beta[:, t, :, None].unsqueeze(1) * (keys * direction).sum(-1, keepdim=True) * direction
        keys[:, t] = k[:, t]
        rows.append(products(q[:, t : t + 1], keys, 1.0))
    scores = torch.cat(rows, 2)
    scores = (scores if g is None else scores + _fading(g)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return Dense(_softmax(scores, _visible(scores, mask=mask)))


@register_mixing_function("fla.ops.deltaformer.deltaformer_attn", carried="v", refused=("attention_mask",))
def deltaformer(q: Tensor, k: Tensor, beta: Tensor | None = None, mask: Tensor | None = None) -> Dense:
    """Softmax attention to values from which a share of their attention to earlier ones is subtracted, each in turn."""
    scores = products(q, k, None)
    visible = _visible(scores, mask=mask)
    earlier = _softmax(scores, visible & ~torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device))
    earlier = earlier if beta is None else earlier * beta.transpose(1, 2).unsqueeze(-1)
    system = torch.eye(earlier.shape[-1], dtype=earlier.dtype, device=earlier.device) + earlier
    weights = _softmax(scores, visible)
    return Dense(torch.linalg.solve_triangular(system, weights, upper=False, left=False, unitriangular=True))


@register_mixing_function("fla.ops.based.parallel_based", carried="v")
def based(q: Tensor, k: Tensor, scale: float | None = None, use_norm: bool = True) -> Dense:
    """Causal weights 1 + s + s^2 / 2, divided by their sum (Arora et al., 2024)."""
    scores = products(q, k, scale)
    return _normalised(1 + scores + scores.square() / 2, 1e-6 if use_norm else None)


@register_mixing_function("fla.ops.rebased.parallel_rebased", carried="v")
def rebased(q: Tensor, k: Tensor, eps: float = 1e-5, use_scale: bool = True, use_normalize: bool = True) -> Dense:
    """Causal weights s^2, divided by their sum (Aksenov et al., 2024)."""
    scores = products(q, k, None if use_scale else 1.0)
    return _normalised(scores.square(), eps if use_normalize else None)


@register_mixing_function("fla.ops.log_linear_attn.chunk.chunk_log_linear_attn", carried="v", extra_outputs=1)
def log_linear(q: Tensor, k: Tensor, g: Tensor, level_scales: Tensor, scale: float | None = 1.0) -> Dense:
    """Decayed linear attention in which each query weighs the blocks of a Fenwick tree by level (Guo et al., 2025)."""
    length, heads = g.shape[1:]
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    scores = products(query, key, scale)
    position = torch.arange(length, device=q.device)
    differs = position[:, None] ^ position
    # The level of two tokens is the size of the smallest aligned block of 2^level tokens with both of them.
    level = torch.zeros_like(differs)
    for bit in range(length.bit_length()):
        level = torch.where(differs >> bit > 0, bit + 1, level)
    scales = level_scales.permute(0, 2, 1, 3).gather(
        3, level.clamp_max(level_scales.shape[3] - 1).expand(level_scales.shape[0], heads, -1, -1)
    )
    weights = scores * _fading(g).clamp_max(0).exp() * scales
    return Dense(weights.tril())


@fla_memory(
    "fla.ops.momentum_delta_rule.chunk_momentum_delta_rule",
    "fla.ops.momentum_delta_rule.fused_recurrent_momentum_delta_rule",
)
def momentum_delta_rule(
    q: Tensor,
    k: Tensor,
    log_alpha: Tensor,
    log_mu: Tensor,
    p: Tensor | None = None,
    beta: Tensor | None = None,
    eta: Tensor | None = None,
    use_p_times_alpha: bool = True,
) -> Dense:
    """A delta rule whose updates have momentum: M = mu M - eta k (v - S^T p)^T, S = alpha S - beta M."""
    p = k if p is None else p
    ones = torch.ones_like(log_alpha)
    alpha, mu = log_alpha.exp(), log_mu.exp()
    beta, eta = (ones if x is None else x for x in (beta, eta))
    p = p * alpha.unsqueeze(-1) if use_p_times_alpha else p
    memory = momentum = q.new_zeros(*q.shape[:1], *q.shape[2:], 1)

    def step(t: int, value: Tensor) -> Tensor:
        nonlocal memory, momentum
        missed = value - (p[:, t].unsqueeze(-1) * memory).sum(-2)
        written = (eta[:, t, :, None] * k[:, t]).unsqueeze(-1) * missed.unsqueeze(-2)
        momentum = mu[:, t, :, None, None] * momentum - written
        memory = alpha[:, t, :, None, None] * memory - beta[:, t, :, None, None] * momentum
        return (q[:, t].unsqueeze(-1) * memory).sum(-2)

    return _impulses(step, q)


@register_mixing_function("fla.ops.moba.parallel_moba", carried="v")
def moba(q: Tensor, k: Tensor, chunk_size: int, topk: int, mask: Tensor | None = None) -> Dense:
    """Softmax attention to a query's own chunk and to earlier chunks whose mean keys are nearest (Lu et al., 2025)."""
    length = q.shape[1]
    scores = products(q, k, None)
    chunk = torch.arange(length, device=q.device) // chunk_size
    # The last chunk, or one that is not full, is read by its own queries only.
    full = (length - 1) // chunk_size
    visible = (chunk[:, None] == chunk) & _visible(scores, mask=mask)
    count = min(topk - 1, full)
    if count > 0:
        centres = k[:, : full * chunk_size].unflatten(1, (full, chunk_size)).mean(2)
        gate = products(q, centres, 1.0)
        hidden = chunk[:, None] <= torch.arange(full, device=q.device)
        marked = torch.zeros_like(gate, dtype=torch.bool)
        marked.scatter_(3, gate.masked_fill(hidden, -torch.inf).topk(count, 3).indices, True)
        selected = (marked & ~hidden).repeat_interleave(chunk_size, 3)
        visible = visible | functional.pad(selected, (0, length - full * chunk_size))
    return Dense(_softmax(scores, visible))


@register_mixing_function("fla.ops.nsa.parallel.parallel_nsa", "fla.ops.nsa.parallel_nsa", carried="v")
def nsa(
    q: Tensor,
    k: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
) -> Dense:
    """Attention to means of blocks, to the tokens of selected blocks, and in a window, each with a gate (NSA, 2025)."""
    length, heads = q.shape[1], k.shape[2]
    scores, causal = products(q, k, scale), torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    blocks = -(-length // block_size)
    position, block = (torch.arange(size, device=q.device) for size in (length, blocks))
    # Means over the tokens of each block; the last one may have fewer.
    pool = (position // block_size == block[:, None]).to(q)
    pool = pool / pool.sum(1, keepdim=True)
    total = torch.zeros_like(scores)
    past = (block + 1) * block_size - 1 <= position[:, None]
    compressed = _softmax(products(q, torch.einsum("cj,bjhn->bchn", pool, k), scale), past)
    if g_cmp is not None:
        total = total + (compressed @ pool) * _by_query(g_cmp)
    if block_indices is None:
        current = position[:, None] // block_size
        forced = (block == current) | (block == 0) | (block == current - 1)
        rank = compressed.unflatten(1, (heads, -1)).mean(2).masked_fill(forced, 1.0)
        rank = rank.masked_fill(~(past | forced), -1.0)
        best = rank.topk(min(block_counts, blocks), 3)
        marked = torch.zeros_like(rank, dtype=torch.bool).scatter_(3, best.indices, best.values >= 0)
    else:
        index = block_indices.transpose(1, 2)
        marked = (index.unsqueeze(-1) == block).any(3)
    selected = marked.repeat_interleave(q.shape[2] // heads, 1).repeat_interleave(block_size, 3)[..., :length]
    weights = _softmax(scores, selected & causal)
    total = total + (weights if g_slc is None else weights * _by_query(g_slc))
    if window_size > 0 and g_swa is not None:
        near = causal & (position[:, None] - position < window_size)
        total = total + _softmax(scores, near) * _by_query(g_swa)
    return Dense(total)


def products(
    q: Float[Tensor, "batch query head state"], k: Float[Tensor, "batch key group state"], scale: float | None
) -> Matrix:
    """Return the scaled products of queries and of the keys that they share."""
    key = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bihn,bjhn->bhij", q, key) * (q.shape[-1] ** -0.5 if scale is None else scale)


def _visible(
    scores: Matrix, window: tuple[int, int] = (-1, -1), *, causal: bool = True, mask: Tensor | None = None
) -> Bool[Tensor, "*batch query key"]:
    """Return which keys a query reads; a padded query reads itself."""
    position = torch.arange(scores.shape[-1], device=scores.device)
    distance = position[:, None] - position
    visible = (distance >= 0) | torch.tensor(not causal, device="cpu")
    before, after = window
    visible = visible if before < 0 else visible & (distance <= before)
    visible = visible if after < 0 else visible & (-distance <= after)
    return visible if mask is None else (visible & mask[:, None, None, :]) | (distance == 0)


def _window(size: int | None) -> tuple[int, int]:
    return (-1 if size is None else size - 1, -1)


def _fading(g: Float[Tensor, "batch length head"]) -> Matrix:
    """Return the sums of log-decays from each key, which is left out, to each query."""
    # In float32 the difference of two sums over thousands of tokens would cancel to few digits.
    total = g.double().cumsum(1).transpose(1, 2)
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).to(g)


def _softmax(scores: Matrix, visible: Tensor, sink: Float[Tensor, " head"] | None = None) -> Matrix:
    """Return the weights of the keys that are read, zero for a query that reads none; a sink takes a share."""
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        column = sink.to(scores)[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return scores.softmax(-1).nan_to_num(nan=0.0)


def _normalised(weights: Matrix, eps: float | None) -> Dense:
    weights = weights.tril()
    return Dense(weights if eps is None else weights / (weights.sum(-1, keepdim=True) + eps))


def _by_query(gate: Float[Tensor, "batch query head"]) -> Float[Tensor, "batch head query 1"]:
    return gate.transpose(1, 2).unsqueeze(-1)


def _impulses(step: Callable[[int, Tensor], Tensor], like: Float[Tensor, "batch length head state"]) -> Dense:
    """Return the matrix of a recurrence, whose `step(t, values)` returns the output of token t, from unit vectors."""
    batch, length, heads, _ = like.shape
    units = torch.eye(length, dtype=like.dtype, device=like.device)
    rows = [step(t, units[t].expand(batch, heads, length)) for t in range(length)]
    return Dense(torch.stack(rows, 2))
