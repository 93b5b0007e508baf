"""Chunked torch forms of the decayed memory: linear in length, differentiable, a chunk of memory at a time.

All exponents are sums of log-decays, hence never positive: nothing overflows, and what underflows is negligible.
Masks are applied to the exponents, before the exponential, so that gradients stay finite.
"""

import torch
from jaxtyping import Bool, Float, Inexact
from torch import Tensor

ALL = slice(None)

CHUNK = 64
"""Tokens a chunk: the quadratic part within a chunk and the state between chunks then cost about the same."""


def recur(
    state: Float[Tensor, "#batch #head #state #channel"],
    decay: Float[Tensor, "batch length head state"],
    increment: Float[Tensor, "batch length head state channel"],
) -> Float[Tensor, "batch length head state channel"]:
    """Return every state of S_t = decay_t S_{t-1} + increment_t after a given first one.

    The time axis is unbound once, so that the backward pass costs one stack and not one zero-filled copy a token.
    """
    states = []
    for a, b in zip(decay.unsqueeze(-1).unbind(1), increment.unbind(1), strict=True):
        state = torch.addcmul(b, a, state)
        states.append(state)
    return torch.stack(states, dim=1)


def diagonal_factors(
    query: Inexact[Tensor, "batch length groupq state"],
    key: Inexact[Tensor, "batch length groupk state"],
    log_decay: Inexact[Tensor, "batch length head staten"],
    key_scale: Inexact[Tensor, "batch length head"] | None = None,
    rate: Inexact[Tensor, "head state"] | None = None,
    reset: Bool[Tensor, "batch length"] | None = None,
    tokens: slice = ALL,
    heads: slice = ALL,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, scaled key, log-decay of some tokens and heads, broadcastable to (batch, token, head, state).

    The log-decay is -inf where a segment begins.
    """
    total = log_decay.shape[2]
    query, key = (_of_heads(factor[:, tokens], heads, total) for factor in (query, key))
    decay = log_decay[:, tokens, heads]
    if key_scale is not None:
        key = key * key_scale[:, tokens, heads, None]
    if rate is not None:
        decay = decay * rate[heads]
    if reset is not None:
        decay = decay.masked_fill(reset[:, tokens, None, None], -torch.inf)
    return query, key, decay


def diagonal_scan(
    query: Inexact[Tensor, "batch length groupq state"],
    key: Inexact[Tensor, "batch length groupk state"],
    log_decay: Inexact[Tensor, "batch length head staten"],
    key_scale: Inexact[Tensor, "batch length head"] | None,
    rate: Inexact[Tensor, "head state"] | None,
    reset: Bool[Tensor, "batch length"] | None,
    value: Inexact[Tensor, "batch length head channel"],
) -> Inexact[Tensor, "batch length head channel"]:
    """Run S_t = exp(g_t) S_{t-1} + k_t v_t^T forward in time and read y_t = S_t^T q_t."""
    state = value.new_zeros(1, 1, 1, 1)
    outputs = []
    for tokens in _chunks(value.shape[1]):
        q, k, g = diagonal_factors(query, key, log_decay, key_scale, rate, reset, tokens)
        states = recur(state, g.exp(), k.unsqueeze(-1) * value[:, tokens].unsqueeze(-2))
        outputs.append((q.unsqueeze(-2) @ states).squeeze(-2))
        state = states[:, -1]
    return torch.cat(outputs, dim=1)


def diagonal_scan_adjoint(
    query: Inexact[Tensor, "batch length groupq state"],
    key: Inexact[Tensor, "batch length groupk state"],
    log_decay: Inexact[Tensor, "batch length head staten"],
    key_scale: Inexact[Tensor, "batch length head"] | None,
    rate: Inexact[Tensor, "head state"] | None,
    reset: Bool[Tensor, "batch length"] | None,
    grad: Inexact[Tensor, "batch length head channel"],
) -> Inexact[Tensor, "batch length head channel"]:
    """Apply the transpose of `diagonal_scan`'s matrix: backward in time, reading with keys what queries wrote."""
    state = grad.new_zeros(1, 1, 1, 1)
    later = log_decay.new_ones(1, 1, 1, 1)
    outputs = []
    for tokens in reversed(_chunks(grad.shape[1])):
        q, k, g = diagonal_factors(query, key, log_decay, key_scale, rate, reset, tokens)
        kept = g.exp()
        first, rest = kept[:, :1], kept[:, 1:]
        reverse = torch.cat([rest, later.expand_as(first)], dim=1).flip(1)
        states = recur(state, reverse, (q.unsqueeze(-1) * grad[:, tokens].unsqueeze(-2)).flip(1))
        outputs.append((k.unsqueeze(-2) @ states.flip(1)).squeeze(-2))
        state, later = states[:, -1], first
    return torch.cat(outputs[::-1], dim=1)


def _chunks(length: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]


def _of_heads(factor: Inexact[Tensor, "batch token group state"], heads: slice, total: int) -> Tensor:
    """Pick a factor's heads, of which each group serves consecutive ones; one group is left to broadcast."""
    groups = factor.shape[2]
    if groups == 1:
        return factor
    if groups == total:
        return factor[:, :, heads]
    return factor[:, :, torch.arange(total, device=factor.device)[heads] // (total // groups)]


def decay_within(log_decay: Float[Tensor, "batch length head"]) -> Float[Tensor, "batch head query key"]:
    """Return tril exp(G_i - G_j) of one chunk, G the running sum of its log-decays."""
    total = _running(log_decay).transpose(1, 2)
    exponent = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(log_decay.dtype)
    length = exponent.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=exponent.device).triu(1)
    return exponent.masked_fill(future, -torch.inf).exp()


def spread(per_group: Tensor, heads: int, dim: int) -> Tensor:
    """Repeat each group's factor for its consecutive heads (repeat_interleave, never repeat)."""
    groups = per_group.shape[dim]
    return per_group if groups == heads else per_group.repeat_interleave(heads // groups, dim=dim)


def scalar_scan(
    query: Float[Tensor, "batch length group state"],
    key: Float[Tensor, "batch length group state"],
    log_decay: Float[Tensor, "batch length head"],
    value: Float[Tensor, "batch length head channel"],
) -> Float[Tensor, "batch length head channel"]:
    """Apply tril (q_i . k_j) exp(G_i - G_j) to values, chunk by chunk (state-space duality's block form)."""
    heads = log_decay.shape[-1]
    state = value.new_zeros(value.shape[0], heads, query.shape[-1], value.shape[-1])
    outputs = []
    for q, k, g, v in zip(*(t.split(CHUNK, dim=1) for t in (query, key, log_decay, value)), strict=True):
        begun, ahead = _from_start(g), _to_end(g)
        scores = spread(torch.einsum("bign,bjgn->bgij", q, k), heads, 1) * decay_within(g)
        q, k = spread(q, heads, 2), spread(k, heads, 2)
        read = torch.einsum("bihn,bhnp->bihp", q * begun.unsqueeze(-1), state)
        outputs.append(torch.einsum("bhij,bjhp->bihp", scores, v) + read)
        write = k * ahead.unsqueeze(-1)
        state = begun[:, -1, :, None, None] * state + torch.einsum("bjhn,bjhp->bhnp", write, v)
    return torch.cat(outputs, dim=1)


def scalar_scan_adjoint(
    query: Float[Tensor, "batch length group state"],
    key: Float[Tensor, "batch length group state"],
    log_decay: Float[Tensor, "batch length head"],
    grad: Float[Tensor, "batch length head channel"],
) -> Float[Tensor, "batch length head channel"]:
    """Apply the transpose of `scalar_scan`'s matrix: the same chunks, from the last to the first."""
    heads = log_decay.shape[-1]
    state = grad.new_zeros(grad.shape[0], heads, query.shape[-1], grad.shape[-1])
    outputs = []
    chunks = list(zip(*(t.split(CHUNK, dim=1) for t in (query, key, log_decay, grad)), strict=True))
    for q, k, g, y in reversed(chunks):
        begun, ahead = _from_start(g), _to_end(g)
        scores = spread(torch.einsum("bign,bjgn->bgij", q, k), heads, 1) * decay_within(g)
        q, k = spread(q, heads, 2), spread(k, heads, 2)
        write = k * ahead.unsqueeze(-1)
        outputs.append(torch.einsum("bhij,bihp->bjhp", scores, y) + torch.einsum("bjhn,bhnp->bjhp", write, state))
        read = q * begun.unsqueeze(-1)
        state = begun[:, -1, :, None, None] * state + torch.einsum("bihn,bihp->bhnp", read, y)
    return torch.cat(outputs[::-1], dim=1)


def _from_start(log_decay: Float[Tensor, "batch length head"]) -> Float[Tensor, "batch length head"]:
    """Return what is left at each token of the state before the chunk: exp(G_i)."""
    return log_decay.cumsum(1).exp()


def _to_end(log_decay: Float[Tensor, "batch length head"]) -> Float[Tensor, "batch length head"]:
    """Return what is left at the chunk's end of each token's own write: exp(G_last - G_j)."""
    total = _running(log_decay)
    return (total[:, -1:] - total).to(log_decay.dtype).exp()


def _running(log_decay: Float[Tensor, "batch length head"]) -> Float[Tensor, "batch length head"]:
    # In float32 one strong decay leaves no digits for the differences of the sums after it.
    return log_decay.double().cumsum(1)
