"""Chunked torch forms of the decayed memory: linear in length, differentiable, a chunk of memory at a time.

All exponents are sums of log-decays, hence never positive: nothing overflows, and what underflows is negligible.
Masks are applied to the exponents, before the exponential, so that gradients stay finite.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.scan.pairs import between, from_token, to_token

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
