"""Chunked torch forms of the decayed memory: linear in length, differentiable, a chunk of memory at a time.

All exponents are sums of log-decays, hence never positive: nothing overflows, and what underflows is negligible.
Masks are applied to the exponents, before the exponential, so that gradients stay finite.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Inexact
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from unilinattn.kernels.scan.pairs import fading, from_token, to_token

ALL = slice(None)

CHUNK = 64
"""Tokens a chunk: the quadratic part within a chunk and the state between chunks then cost about the same."""

STEPS = 16
"""Tokens whose states of a diagonal decay are held at once: few, so that they stay in cache."""

KEPT = 512
"""Tokens up to which a pass that will be differentiated keeps all of its states."""

GROUP = 256
"""Tokens of a longer pass whose states are made again together when its gradient is taken."""


def recur(
    state: Float[Tensor, "#batch #head #state #channel"],
    decay: Float[Tensor, "batch length head state #channel"],
    increment: Float[Tensor, "batch length #head state #channel"],
    room: Tensor | None = None,
) -> Float[Tensor, "batch length head state anychannel"]:
    """Return every state of S_t = decay_t S_{t-1} + increment_t after a given first one, in a given room if any."""
    if _differentiated(state, decay, increment):
        return _Recurrence.apply(state, decay, increment, False)
    return _states(state, decay.unbind(1), increment, range(decay.shape[1]), room)


def recur_back(
    state: Float[Tensor, "#batch #head #state #channel"],
    decay: Float[Tensor, "batch length head state #channel"],
    later: Float[Tensor, "#batch #head #state #channel"],
    increment: Float[Tensor, "batch length #head state #channel"],
    room: Tensor | None = None,
) -> Float[Tensor, "batch length head state anychannel"]:
    """Return every state of S_t = decay_{t+1} S_{t+1} + increment_t before a given last one, `later` its own decay."""
    if _differentiated(state, decay, later, increment):
        crossed = torch.cat([decay[:, 1:], later.expand(decay[:, 0].shape).unsqueeze(1)], 1)
        return _Recurrence.apply(state, crossed, increment, True)
    return _states(state, (*decay.unbind(1)[1:], later), increment, range(decay.shape[1] - 1, -1, -1), room)


def _differentiated(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _states(
    state: Tensor, crossed: Sequence[Tensor], increment: Tensor, order: range, room: Tensor | None = None
) -> Tensor:
    """Run S = crossed_t S + increment_t over tokens in an order, and put every state in its token's place.

    `room` may be where the decays stand: the state of a token then takes the place of the one that it has crossed.
    """
    increments = increment.unbind(1)
    if room is None:
        shape = torch.broadcast_shapes(state.shape, increments[0].shape, crossed[0].shape, crossed[-1].shape)
        room = increment.new_empty(shape[0], len(order), *shape[1:])
    found = room[:, : len(order)]
    places = found.unbind(1)
    for t in order:
        state = torch.addcmul(increments[t], crossed[t], state, out=places[t])
    return found


class _Recurrence(torch.autograd.Function):
    """`_states` with a gradient by the same recurrence run the other way: two tensors are kept, not a node a token."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, crossed: Tensor, increment: Tensor, backward_in_time: bool) -> Tensor:
        length = crossed.shape[1]
        order = range(length - 1, -1, -1) if backward_in_time else range(length)
        found = _states(state, crossed.unbind(1), increment, order)
        ctx.save_for_backward(state, crossed, found)
        ctx.order, ctx.increment_shape = order, increment.shape
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        state, crossed, found = ctx.saved_tensors
        first, length = ctx.order[0], len(ctx.order)
        forwards = first == 0
        # What reaches a state passes the step that reads it, the next in the order; to the last one comes nothing.
        steps = crossed.unbind(1)
        passed = (*steps[1:], steps[0]) if forwards else (steps[-1], *steps[:-1])
        flow = _states(grad.new_zeros(()).expand_as(state), passed, grad, ctx.order[::-1])
        own = torch.empty_like(flow)
        here, before = (
            (slice(1, length), slice(0, length - 1)) if forwards else (slice(0, length - 1), slice(1, length))
        )
        torch.mul(flow[:, here], found[:, before], out=own[:, here])
        own[:, first] = flow[:, first] * state
        begun = (crossed[:, first] * flow[:, first]).sum_to_size(state.shape)
        return begun, own.sum_to_size(crossed.shape), flow.sum_to_size(ctx.increment_shape), None


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
    written = value.transpose(2, 3) if value.shape[3] == 1 else value
    query, key, log_decay, key_scale, rate = _laid_out(query, key, log_decay, key_scale, rate, value.shape[3])
    state = value.new_zeros(1, 1, 1, 1)
    outputs = []
    kept = _differentiated(query, key, log_decay, key_scale, rate, written)
    held = GROUP if kept and value.shape[1] > KEPT else value.shape[1]
    for parts in cut(held, query, key, log_decay, key_scale, reset, written):
        if held < value.shape[1]:
            # The states of a long pass are made again when its gradient needs them: vectors alone are kept.
            found, state = checkpoint(_group, state, rate, *parts, use_reentrant=False)
        else:
            found, state = _group(state, rate, *parts)
        outputs.append(found)
    return _back(torch.cat(outputs, dim=1), value)


def _group(
    state: Tensor,
    rate: Tensor | None,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    key_scale: Tensor | None,
    reset: Tensor | None,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run `diagonal_scan` from a state over some tokens; return what they read and the last state."""
    outputs = []
    kept_room, room = _rooms(query, key, log_decay, key_scale, rate, value)
    for q, k, g, scale, begins, v in cut(STEPS, query, key, log_decay, key_scale, reset, value):
        v = v if scale is None else v * scale
        states = recur(state, _kept(g, rate, begins, kept_room), k * v.unsqueeze(3), room)
        outputs.append(_read(states, q))
        # The next tokens take the same room.
        state = states[:, -1] if room is None else states[:, -1].clone()
    return torch.cat(outputs, dim=1), state


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
    # What is the same for every head is written for one.
    given = grad[:, :, :1] if grad.stride(2) == 0 else grad
    given = given.transpose(2, 3) if grad.shape[3] == 1 else given
    query, key, log_decay, key_scale, rate = _laid_out(query, key, log_decay, key_scale, rate, grad.shape[3])
    state, later = grad.new_zeros(1, 1, 1, 1), grad.new_ones(1, log_decay.shape[2], 1, log_decay.shape[4])
    outputs = []
    kept_room, room = _rooms(query, key, log_decay, key_scale, rate, given)
    for q, k, g, scale, begins, y in reversed(cut(STEPS, query, key, log_decay, key_scale, reset, given)):
        kept = _kept(g, rate, begins, kept_room)
        states = recur_back(state, kept, later, q * y.unsqueeze(3), None if room is None else room[:, 1:])
        found = _read(states, k)
        outputs.append(found if scale is None else found * scale)
        # The next tokens take the same room.
        state, later = (t if room is None else t.clone() for t in (states[:, 0], kept[:, 0]))
    return _back(torch.cat(outputs[::-1], dim=1), grad)


def _laid_out(
    query: Tensor, key: Tensor, log_decay: Tensor, key_scale: Tensor | None, rate: Tensor | None, channels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the factors as (batch, length, head, state, channel), of size one where they are the same.

    Where each head carries a single channel the heads take the channels' place, as they do in the values: what is
    innermost in memory is long. A key's scale has the axes of the values.
    """
    heads = log_decay.shape[2]
    query, key = (of_heads(factor, ALL, heads) for factor in (query, key))
    scale = None if key_scale is None else key_scale.unsqueeze(3)
    if channels > 1:
        query, key, log_decay = (factor.unsqueeze(4) for factor in (query, key, log_decay))
        return query, key, log_decay, scale, None if rate is None else rate.unsqueeze(2)
    query, key, log_decay = (factor.transpose(2, 3).unsqueeze(2) for factor in (query, key, log_decay))
    scale = None if scale is None else scale.transpose(2, 3)
    return query, key, log_decay, scale, None if rate is None else rate.T.contiguous().unsqueeze(0)


def _back(
    found: Inexact[Tensor, "batch length any other"], value: Inexact[Tensor, "batch length head channel"]
) -> Inexact[Tensor, "batch length head channel"]:
    """Return what was read of the states with the axes of the values."""
    return found if value.shape[3] > 1 else found.transpose(2, 3)


def _read(
    states: Inexact[Tensor, "batch token head state channel"],
    by: Inexact[Tensor, "batch token #head state #channel"],
) -> Inexact[Tensor, "batch token head channel"]:
    """Return sum_n by_n S_np: by products where a vector serves all channels."""
    if by.shape[4] == 1:
        return (by.transpose(3, 4) @ states).squeeze(3)
    return (by * states).sum(3)


def _kept(
    log_decay: Inexact[Tensor, "batch token head #state #channel"],
    rate: Inexact[Tensor, "#head state #channel"] | None,
    reset: Bool[Tensor, "batch token"] | None,
    room: Tensor | None = None,
) -> Inexact[Tensor, "batch token head state channel"]:
    """Return what each step keeps of the state: exp(g), nothing where a segment begins."""
    out = None if room is None else room[:, : log_decay.shape[1]]
    kept = torch.exp(log_decay, out=out) if rate is None else torch.mul(log_decay, rate, out=out).exp_()
    return kept if reset is None else kept.masked_fill(reset[..., None, None, None], 0)


def _rooms(
    query: Tensor, key: Tensor, log_decay: Tensor, key_scale: Tensor | None, rate: Tensor | None, value: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return places for what some tokens keep and for their states, used again for the next: memory stays in cache.

    One and the same where both have a size. There is a place more than tokens: backward in time a state takes the
    place of what the token after it keeps. None where gradients need all of them.
    """
    if _differentiated(query, key, log_decay, key_scale, rate, value):
        return None, None
    kept = torch.broadcast_shapes(log_decay.shape, () if rate is None else rate.shape)
    each = torch.broadcast_shapes(kept, query.shape, key.shape, (*value.shape[:3], 1, value.shape[3]))
    steps = min(STEPS, value.shape[1]) + 1
    room = log_decay.new_empty(each[0], steps, *each[2:])
    return room if kept == each else log_decay.new_empty(kept[0], steps, *kept[2:]), room


def cut(size: int, *tensors: Tensor | None) -> list[tuple[Any, ...]]:
    """Cut tensors into some tokens at a time: at once, since the gradient of each single slice is as long as all."""
    count = next(-(-t.shape[1] // size) for t in tensors if t is not None)
    return list(zip(*([None] * count if t is None else t.split(size, dim=1) for t in tensors), strict=True))


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
    return to_token(decay).exp().squeeze(-1), from_token(decay).exp().squeeze(-1), fading(log_decay)
