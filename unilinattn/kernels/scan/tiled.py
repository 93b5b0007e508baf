"""Chunked torch forms of the decayed memory: linear in length, differentiable, a chunk of memory at a time.

All exponents are sums of log-decays, hence never positive: nothing overflows, and what underflows is negligible.
Masks are applied to the exponents, before the exponential, so that gradients stay finite.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Inexact
from torch import Tensor

from unilinattn.kernels.scan.pairs import between, from_token, to_token

ALL = slice(None)

CHUNK = 64
"""Tokens a chunk: the quadratic part within a chunk and the state between chunks then cost about the same."""

STEPS = 16
"""Tokens whose states of a diagonal decay are held at once: few, so that they stay in cache."""


def recur(
    state: Float[Tensor, "#batch #head #state #channel"],
    decay: Float[Tensor, "batch length head state"],
    increment: Float[Tensor, "batch length #head state channel"],
) -> Float[Tensor, "batch length head state channel"]:
    """Return every state of S_t = decay_t S_{t-1} + increment_t after a given first one."""
    return _states(state, decay.unsqueeze(-1).unbind(1), increment, range(decay.shape[1]))


def recur_back(
    state: Float[Tensor, "#batch #head #state #channel"],
    decay: Float[Tensor, "batch length head state"],
    later: Float[Tensor, "#batch #head #state"],
    increment: Float[Tensor, "batch length #head state channel"],
) -> Float[Tensor, "batch length head state channel"]:
    """Return every state of S_t = decay_{t+1} S_{t+1} + increment_t before a given last one, `later` its own decay."""
    length = decay.shape[1]
    crossed = (*decay.unsqueeze(-1).unbind(1)[1:], later.unsqueeze(-1))
    return _states(state, crossed, increment, range(length - 1, -1, -1))


def _states(state: Tensor, decay: Sequence[Tensor], increment: Tensor, order: range) -> Tensor:
    # The time axis is unbound once, so that the backward pass costs one stack and not one zero-filled copy a token.
    increments = increment.unbind(1)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (state, decay[0], increment)):
        states = {}
        for t in order:
            states[t] = state = torch.addcmul(increments[t], decay[t], state)
        return torch.stack([states[t] for t in range(len(order))], dim=1)
    shape = torch.broadcast_shapes(state.shape, increments[0].shape, decay[0].shape, decay[-1].shape)
    found = increment.new_empty(shape[0], len(order), *shape[1:])
    places = found.unbind(1)
    for t in order:
        state = torch.addcmul(increments[t], decay[t], state, out=places[t])
    return found


def read_states(
    states: Float[Tensor, "batch length head state channel"], by: Float[Tensor, "batch length #head state"]
) -> Float[Tensor, "batch length head channel"]:
    """Return sum_n by_n S_np: as one product a token where a vector serves all heads."""
    if by.shape[2] == 1 and states.shape[-1] == 1:
        return states.squeeze(-1) @ by.transpose(2, 3)
    return (by.unsqueeze(-2) @ states).squeeze(-2)


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
    query, key = (of_heads(factor[:, tokens], heads, total) for factor in (query, key))
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
    heads = log_decay.shape[2]
    written = value if key_scale is None else value * key_scale.unsqueeze(-1)
    state = value.new_zeros(1, 1, 1, 1)
    outputs = []
    for tokens in _steps(value.shape[1]):
        q, k = (of_heads(t[:, tokens], ALL, heads) for t in (query, key))
        kept = _kept(log_decay, rate, reset, tokens)
        states = recur(state, kept, k.unsqueeze(-1) * written[:, tokens].unsqueeze(-2))
        outputs.append(read_states(states, q))
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
    heads = log_decay.shape[2]
    if grad.stride(2) == 0:
        # What is the same for every head is written for one.
        grad = grad[:, :, :1]
    state, later = grad.new_zeros(1, 1, 1, 1), grad.new_ones(1, heads, 1)
    outputs = []
    for tokens in reversed(_steps(grad.shape[1])):
        q, k = (of_heads(t[:, tokens], ALL, heads) for t in (query, key))
        kept = _kept(log_decay, rate, reset, tokens)
        states = recur_back(state, kept, later, q.unsqueeze(-1) * grad[:, tokens].unsqueeze(-2))
        outputs.append(read_states(states, k))
        state, later = states[:, 0], kept[:, 0]
    passed = torch.cat(outputs[::-1], dim=1)
    return passed if key_scale is None else passed * key_scale.unsqueeze(-1)


def _kept(
    log_decay: Inexact[Tensor, "batch length head staten"],
    rate: Inexact[Tensor, "head state"] | None,
    reset: Bool[Tensor, "batch length"] | None,
    tokens: slice,
) -> Inexact[Tensor, "batch token head state"]:
    """Return what each step keeps of the state: exp(g), nothing where a segment begins."""
    decay = log_decay[:, tokens]
    kept = (decay if rate is None else decay * rate).exp()
    return kept if reset is None else kept.masked_fill(reset[:, tokens, None, None], 0)


def _steps(length: int) -> list[slice]:
    return [slice(start, min(start + STEPS, length)) for start in range(0, length, STEPS)]


def of_heads(factor: Inexact[Tensor, "batch token group state"], heads: slice, total: int) -> Tensor:
    """Pick a factor's heads, of which each group serves consecutive ones; one group is left to broadcast."""
    groups = factor.shape[2]
    if groups == 1:
        return factor
    if groups == total:
        return factor[:, :, heads]
    return factor[:, :, torch.arange(total, device=factor.device)[heads] // (total // groups)]


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
        begun, ahead, within = _fading(g)
        scores = spread(torch.einsum("bign,bjgn->bgij", q, k), heads, 1) * within
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
        begun, ahead, within = _fading(g)
        scores = spread(torch.einsum("bign,bjgn->bgij", q, k), heads, 1) * within
        q, k = spread(q, heads, 2), spread(k, heads, 2)
        write = k * ahead.unsqueeze(-1)
        outputs.append(torch.einsum("bhij,bihp->bjhp", scores, y) + torch.einsum("bjhn,bhnp->bjhp", write, state))
        read = q * begun.unsqueeze(-1)
        state = begun[:, -1, :, None, None] * state + torch.einsum("bihn,bihp->bhnp", read, y)
    return torch.cat(outputs[::-1], dim=1)


def _fading(log_decay: Float[Tensor, "batch length head"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is left: at each token of the state before, at the end of each token's write, and between tokens.

    (batch, length, head), the same, and (batch, head, query, key); sums of log-decays, never a difference of two.
    """
    decay = log_decay.unsqueeze(-1)
    within = between(decay).exp().squeeze(-1).permute(0, 3, 1, 2)
    return to_token(decay).exp().squeeze(-1), from_token(decay).exp().squeeze(-1), within
