"""Chunked torch implementation of the decayed memory: linear in length, differentiable, one chunk in memory at a time.

All exponents are sums of log-decays, hence never positive: nothing overflows, and terms that underflow are negligible.
Masks apply to the exponents, before the exponential, so gradients stay finite.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Inexact
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from unilinattn.kernels.groups import of_heads, repeat_groups
from unilinattn.kernels.scan.memories import ALL, Diagonal, Scalar
from unilinattn.kernels.scan.pairs import fading, from_token, to_token
from unilinattn.kernels.subnormal import decays, flushed, flushed_

CHUNK = 64
"""Tokens per chunk, for which the quadratic chunk and the state between chunks cost about the same."""

STEPS = 16
"""Tokens whose states are in memory at a time for a diagonal decay, so that they stay in cache."""

STATES = 5
"""Number of (token, head, state) arrays in a recurrence: decay, its running product, key, state and product."""

KEPT = 512
"""Longest pass, in tokens, that stores all its states for its gradient."""

GROUP = 256
"""Tokens of a longer pass whose states are recomputed together for its gradient."""


def recur(
    state: Float[Tensor, "#batch #head #state #channel"],
    decay: Float[Tensor, "batch length head state #channel"],
    increment: Float[Tensor, "batch length #head state #channel"],
    room: Tensor | None = None,
) -> Float[Tensor, "batch length head state anychannel"]:
    """Return all states of S_t = decay_t S_{t-1} + increment_t after `state`, in `room` if given."""
    if is_differentiated(state, decay, increment):
        return _Recurrence.apply(state, decay, increment, False)
    return _states(state, decay.unbind(1), increment, range(decay.shape[1]), room)


def recur_back(
    state: Float[Tensor, "#batch #head #state #channel"],
    decay: Float[Tensor, "batch length head state #channel"],
    later: Float[Tensor, "#batch #head #state #channel"],
    increment: Float[Tensor, "batch length #head state #channel"],
    room: Tensor | None = None,
) -> Float[Tensor, "batch length head state anychannel"]:
    """Return all states of S_t = decay_{t+1} S_{t+1} + increment_t before `state`, whose decay is `later`."""
    if is_differentiated(state, decay, later, increment):
        crossed = torch.cat([decay[:, 1:], later.expand(decay[:, 0].shape).unsqueeze(1)], 1)
        return _Recurrence.apply(state, crossed, increment, True)
    return _states(state, (*decay.unbind(1)[1:], later), increment, range(decay.shape[1] - 1, -1, -1), room)


def state_elements(batch: int, length: int, channels: int, state: int) -> int:
    """Elements of the saved states and decays of a differentiated scan, and of a recurrence of `STEPS` tokens."""
    saved = length if length <= KEPT else GROUP
    return batch * channels * state * (2 * saved + STATES * min(length, STEPS))


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Return whether gradients with respect to one of the tensors are recorded."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _states(
    state: Tensor, crossed: Sequence[Tensor], increment: Tensor, order: range, room: Tensor | None = None
) -> Tensor:
    """Run S = crossed_t S + increment_t over tokens in `order`, and store each state at its token.

    `room` may be the storage of the decays: a token's state then overwrites the decay that it has crossed.
    """
    increments = increment.unbind(1)
    if room is None:
        shape = torch.broadcast_shapes(state.shape, increments[0].shape, crossed[0].shape, crossed[-1].shape)
        room = increment.new_empty(shape[0], len(order), *shape[1:])
    states = room[:, : len(order)]
    slots = states.unbind(1)
    for t in order:
        state = torch.addcmul(increments[t], crossed[t], state, out=slots[t])
    return flushed_(states)


class _Recurrence(torch.autograd.Function):
    """`_states` with its gradient by the reversed recurrence, which stores two tensors instead of a node per token."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, crossed: Tensor, increment: Tensor, backward_in_time: bool) -> Tensor:
        length = crossed.shape[1]
        order = range(length - 1, -1, -1) if backward_in_time else range(length)
        states = _states(state, crossed.unbind(1), increment, order)
        ctx.save_for_backward(state, crossed, states)
        ctx.order, ctx.increment_shape = order, increment.shape
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        state, crossed, states = ctx.saved_tensors
        first, length = ctx.order[0], len(ctx.order)
        forwards = first == 0
        # A state's gradient arrives through the next step in the order; the last state has none from there.
        steps = crossed.unbind(1)
        # The recurrence multiplies zero by the decay at its end, whatever that is: any tensor of its shape will do.
        passed = (*steps[1:], steps[0]) if forwards else (steps[-1], *steps[:-1])
        flow = _states(grad.new_zeros(()).expand_as(state), passed, grad, ctx.order[::-1])
        crossed_grad = torch.empty_like(flow)
        here, before = (
            (slice(1, length), slice(0, length - 1)) if forwards else (slice(0, length - 1), slice(1, length))
        )
        torch.mul(flow[:, here], states[:, before], out=crossed_grad[:, here])
        crossed_grad[:, first] = flow[:, first] * state
        state_grad = (crossed[:, first] * flow[:, first]).sum_to_size(state.shape)
        return state_grad, crossed_grad.sum_to_size(crossed.shape), flow.sum_to_size(ctx.increment_shape), None


def diagonal_scan(
    memory: Diagonal, value: Inexact[Tensor, "batch length head channel"]
) -> Inexact[Tensor, "batch length head channel"]:
    """Run a memory forward in time on values and read it at each token."""
    written = value.transpose(2, 3) if value.shape[3] == 1 else value
    memory, length = _laid_out(memory, value.shape[3]), value.shape[1]
    state = value.new_zeros(1, 1, 1, 1)
    outputs = []
    group = GROUP if is_differentiated(*memory, written) and length > KEPT else length
    for chunk, vectors in _cut_memory(group, memory, written):
        if group < length:
            # A long pass stores only vectors and recomputes its states for the gradient.
            output, state = checkpoint(_group, state, chunk, vectors, use_reentrant=False)
        else:
            output, state = _group(state, chunk, vectors)
        outputs.append(output)
    return _back(torch.cat(outputs, dim=1), value)


def _group(state: Tensor, memory: Diagonal, value: Tensor) -> tuple[Tensor, Tensor]:
    """Run `diagonal_scan` from a state over some tokens; return their outputs and the last state."""
    outputs = []
    decay_room, room = _rooms(memory, value)
    for chunk, v in _cut_memory(STEPS, memory, value):
        v = v if chunk.key_scale is None else v * chunk.key_scale
        states = recur(state, _step_decays(chunk, decay_room), chunk.key * v.unsqueeze(3), room)
        outputs.append(_read(states, chunk.query))
        # The next tokens reuse the same buffer.
        state = states[:, -1] if room is None else states[:, -1].clone()
    return torch.cat(outputs, dim=1), state


def diagonal_scan_adjoint(
    memory: Diagonal, grad: Inexact[Tensor, "batch length head channel"]
) -> Inexact[Tensor, "batch length head channel"]:
    """Apply the transpose of `diagonal_scan`'s matrix: backward in time, queries write and keys read."""
    # A write that all heads share is computed once.
    upstream = grad[:, :, :1] if grad.stride(2) == 0 else grad
    upstream = upstream.transpose(2, 3) if grad.shape[3] == 1 else upstream
    memory = _laid_out(memory, grad.shape[3])
    state = grad.new_zeros(1, 1, 1, 1)
    later = grad.new_ones(1, memory.log_decay.shape[2], 1, memory.log_decay.shape[4])
    outputs = []
    decay_room, room = _rooms(memory, upstream)
    for chunk, y in reversed(_cut_memory(STEPS, memory, upstream)):
        step_decays = _step_decays(chunk, decay_room)
        written = chunk.query * y.unsqueeze(3)
        states = recur_back(state, step_decays, later, written, None if room is None else room[:, 1:])
        output = _read(states, chunk.key)
        outputs.append(output if chunk.key_scale is None else output * chunk.key_scale)
        # The next tokens reuse the same buffer.
        state, later = (t if room is None else t.clone() for t in (states[:, 0], step_decays[:, 0]))
    return _back(torch.cat(outputs[::-1], dim=1), grad)


def _laid_out(memory: Diagonal, channels: int) -> Diagonal:
    """Return the factors as (batch, length, head, state, channel), with size 1 along shared axes.

    With one channel per head, the head axis takes the place of the channel axis, as in the values, so that the
    innermost axis in memory is long. A key's scale has the axes of the values.
    """
    query, key, log_decay, scale, rate, reset = memory
    query, key = (of_heads(factor, ALL, log_decay.shape[2]) for factor in (query, key))
    scale = None if scale is None else scale.unsqueeze(3)
    if channels > 1:
        query, key, log_decay = (factor.unsqueeze(4) for factor in (query, key, log_decay))
        return Diagonal(query, key, log_decay, scale, None if rate is None else rate.unsqueeze(2), reset)
    query, key, log_decay = (factor.transpose(2, 3).unsqueeze(2) for factor in (query, key, log_decay))
    scale = None if scale is None else scale.transpose(2, 3)
    return Diagonal(query, key, log_decay, scale, None if rate is None else rate.T.contiguous().unsqueeze(0), reset)


def _cut_memory(size: int, memory: Diagonal, vectors: Tensor) -> list[tuple[Diagonal, Tensor]]:
    """Split a memory and its values or gradients into parts of `size` tokens."""
    by_token = memory._replace(rate=None)
    return [(Diagonal(*factors)._replace(rate=memory.rate), chunk) for *factors, chunk in cut(size, *by_token, vectors)]


def _back(
    outputs: Inexact[Tensor, "batch length any other"], value: Inexact[Tensor, "batch length head channel"]
) -> Inexact[Tensor, "batch length head channel"]:
    """Return outputs read from the states with the axes of the values."""
    return outputs if value.shape[3] > 1 else outputs.transpose(2, 3)


def _read(
    states: Inexact[Tensor, "batch token head state channel"],
    by: Inexact[Tensor, "batch token #head state #channel"],
) -> Inexact[Tensor, "batch token head channel"]:
    """Return sum_n by_n S_np, by matrix products if one vector serves all channels."""
    if by.shape[4] == 1:
        return (by.transpose(3, 4) @ states).squeeze(3)
    return (by * states).sum(3)


def _step_decays(memory: Diagonal, room: Tensor | None) -> Inexact[Tensor, "batch token head state channel"]:
    """Return the share of the state that each step keeps: exp(g), and 0 where a segment begins."""
    out = None if room is None else room[:, : memory.log_decay.shape[1]]
    exponent = memory.log_decay if memory.rate is None else torch.mul(memory.log_decay, memory.rate, out=out)
    step_decays = decays(exponent, out)
    return step_decays if memory.reset is None else step_decays.masked_fill(memory.reset[..., None, None, None], 0)


def _rooms(memory: Diagonal, value: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return buffers for the decays and the states of some tokens, reused for the next tokens to stay in cache.

    Both are one buffer if they have the same size. It has one entry more than tokens: backward in time a state
    overwrites the decay of the next token. None if gradients need all of them.
    """
    if is_differentiated(*memory, value):
        return None, None
    query, key, log_decay, _, rate, _ = memory
    decay_shape = torch.broadcast_shapes(log_decay.shape, () if rate is None else rate.shape)
    state_shape = torch.broadcast_shapes(decay_shape, query.shape, key.shape, (*value.shape[:3], 1, value.shape[3]))
    steps = min(STEPS, value.shape[1]) + 1
    room = log_decay.new_empty(state_shape[0], steps, *state_shape[2:])
    return room if decay_shape == state_shape else log_decay.new_empty(decay_shape[0], steps, *decay_shape[2:]), room


def cut(size: int, *tensors: Tensor | None) -> list[tuple[Any, ...]]:
    """Split tensors into parts of `size` tokens, in one operation: a slice's gradient would have full length."""
    count = next(-(-t.shape[1] // size) for t in tensors if t is not None)
    return list(zip(*([None] * count if t is None else t.split(size, dim=1) for t in tensors), strict=True))


def scalar_scan(
    memory: Scalar, value: Float[Tensor, "batch length head channel"]
) -> Float[Tensor, "batch length head channel"]:
    """Apply tril (q_i . k_j) exp(G_i - G_j) s_j to values, chunk by chunk (state-space duality's block form)."""
    return _scalar_pass(memory, memory.scaled(value), reverse=False)


def scalar_scan_adjoint(
    memory: Scalar, grad: Float[Tensor, "batch length head channel"]
) -> Float[Tensor, "batch length head channel"]:
    """Apply the transpose of `scalar_scan`'s matrix: the same chunks, from the last to the first."""
    return memory.scaled(_scalar_pass(memory, grad, reverse=True))


def _scalar_pass(memory: Scalar, vectors: Tensor, *, reverse: bool) -> Tensor:
    query, key, log_decay, _ = memory
    order = -1 if reverse else 1
    state: Tensor | None = None
    outputs: list[Tensor] = []
    chunks = cut(CHUNK, query, key, log_decay, flushed(vectors))[::order]
    for q, k, g, v in chunks:
        products = torch.einsum("bign,bjgn->bgij", q, k).unsqueeze(2)
        scores = flushed_(products * fading(g).unflatten(1, (q.shape[2], -1))).flatten(1, 2)
        output = torch.einsum("bhij,bjhp->bihp", scores.mT if reverse else scores, v)
        # The queries face the chunk's start and the keys its end; backward in time, keys read and queries write.
        reading, writing = [(q, to_token), (k, from_token)][::order]
        # No state enters the first chunk, and no chunk reads the state after the last one.
        if state is not None:
            output = output + torch.einsum("bihn,bhnp->bihp", _facing(*reading, g), state)
        outputs.append(output)
        if len(outputs) < len(chunks):
            entering = torch.einsum("bjhn,bjhp->bhnp", _facing(*writing, g), v)
            passed = 0 if state is None else decays(g.sum(1))[..., None, None] * state
            state = flushed_(entering + passed)
    return torch.cat(outputs[::order], dim=1)


def _facing(
    factor: Float[Tensor, "batch length group state"],
    until: Callable[[Tensor], Tensor],
    log_decay: Float[Tensor, "batch length head"],
) -> Float[Tensor, "batch length head state"]:
    """Return a factor for each head, decayed from each token to an end of the chunk by the exponents of `until`."""
    return flushed_(repeat_groups(factor, log_decay.shape[2], 2) * decays(until(log_decay.unsqueeze(-1))))
