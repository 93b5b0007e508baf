"""The linear-time passes on a GPU: parallel segments of tokens, states in registers; see README.md."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.launch import Precision, on, power
from unilinattn.kernels.scan.triton_diagonal_pass import DiagonalScan
from unilinattn.kernels.scan.triton_launch import (
    CHUNK,
    block_columns,
    carry_over,
    cast_like,
    same_groups,
    segment_length,
)
from unilinattn.kernels.scan.triton_scalar import scalar_decay_gradient, scalar_segments


def diagonal_scan(
    query: Float[Tensor, "batch length groupq state"],
    key: Float[Tensor, "batch length groupk state"],
    log_decay: Float[Tensor, "batch length head staten"],
    key_scale: Float[Tensor, "batch length head"] | None,
    rate: Float[Tensor, "head state"] | None,
    reset: Bool[Tensor, "batch length"] | None,
    value: Float[Tensor, "batch length head channel"],
) -> Float[Tensor, "batch length head channel"]:
    """Run S_t = exp(g_t) S_{t-1} + k_t v_t^T forward in time and read y_t = S_t^T q_t; differentiable once."""
    query, key = same_groups(query, key, log_decay.shape[2])
    return DiagonalScan.apply(query, key, log_decay, key_scale, rate, reset, value, False)


def diagonal_scan_adjoint(
    query: Float[Tensor, "batch length groupq state"],
    key: Float[Tensor, "batch length groupk state"],
    log_decay: Float[Tensor, "batch length head staten"],
    key_scale: Float[Tensor, "batch length head"] | None,
    rate: Float[Tensor, "head state"] | None,
    reset: Bool[Tensor, "batch length"] | None,
    grad: Float[Tensor, "batch length head channel"],
) -> Float[Tensor, "batch length head channel"]:
    """Apply the transpose of `diagonal_scan`'s matrix, backward in time; differentiable once."""
    query, key = same_groups(query, key, log_decay.shape[2])
    return DiagonalScan.apply(query, key, log_decay, key_scale, rate, reset, grad, True)


def scalar_scan(
    query: Float[Tensor, "batch length group state"],
    key: Float[Tensor, "batch length group state"],
    log_decay: Float[Tensor, "batch length head"],
    value: Float[Tensor, "batch length head channel"],
    *,
    precision: Precision = "ieee",
) -> Float[Tensor, "batch length head channel"]:
    """Apply tril (q_i . k_j) exp(G_i - G_j) to values, chunk by chunk; differentiable once."""
    return _ScalarScan.apply(query, key, log_decay, value, False, precision)


def scalar_scan_adjoint(
    query: Float[Tensor, "batch length group state"],
    key: Float[Tensor, "batch length group state"],
    log_decay: Float[Tensor, "batch length head"],
    grad: Float[Tensor, "batch length head channel"],
    *,
    precision: Precision = "ieee",
) -> Float[Tensor, "batch length head channel"]:
    """Apply the transpose of `scalar_scan`'s matrix; differentiable once."""
    return _ScalarScan.apply(query, key, log_decay, grad, True, precision)


def _run_scalar(
    query: Tensor, key: Tensor, log_decay: Tensor, value: Tensor, reverse: bool, precision: Precision
) -> Tensor:
    """Apply a scalar memory or its transpose; returns float32."""
    batch, length, heads, columns = value.shape
    width = block_columns(columns)
    segment = segment_length(length, batch * heads * -(-columns // width), value, CHUNK)
    entering = None
    if segment < length:
        entering = _scalar_states(query, key, log_decay, value, reverse, precision, segment)
    out = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    _scalar_pass(query, key, log_decay, value, reverse, precision, segment, entering, None, out)
    return out


def _scalar_states(
    query: Tensor, key: Tensor, log_decay: Tensor, value: Tensor, reverse: bool, precision: Precision, segment: int
) -> Tensor:
    """Return the initial state of each segment (batch, segment, head, channel, state)."""
    batch, length, heads, columns = value.shape
    count = -(-length // segment)
    left = torch.empty(batch, count, heads, columns, query.shape[3], dtype=torch.float32, device=value.device)
    total = left.new_empty(batch, count, heads, 1)
    _scalar_pass(query, key, log_decay, value, reverse, precision, segment, left, total, left)
    carry_over(left, total)
    return left


def _scalar_pass(
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    value: Tensor,
    reverse: bool,
    precision: Precision,
    segment: int,
    entering: Tensor | None,
    total: Tensor | None,
    out: Tensor,
) -> None:
    batch, length, heads, columns = value.shape
    read, write = (key, query) if reverse else (query, key)
    segments = -(-length // segment)
    width = block_columns(columns)
    with on(out):
        scalar_segments[(batch * heads * -(-columns // width) * segments,)](
            read,
            write,
            log_decay,
            value,
            out if entering is None else entering,
            out if total is None else total,
            out,
            length,
            segments * segment,
            segments,
            segment,
            heads,
            heads // read.shape[2],
            columns,
            read.shape[3],
            *read.stride(),
            *write.stride(),
            *log_decay.stride(),
            *value.stride(),
            ENTERS=entering is not None and total is None,
            LEAVES=total is not None,
            REVERSE=reverse,
            PRECISION=precision,
            CHUNK=CHUNK,
            COLUMNS=width,
            STATES=power(read.shape[3], 16),
            num_warps=8,
            num_stages=1,
        )


def _scalar_gradients(
    query: Tensor, key: Tensor, log_decay: Tensor, value: Tensor, grad: Tensor, precision: Precision
) -> Iterator[Tensor]:
    """Yield the gradients of <grad, A value> by query, key and log-decay.

    By the queries it is the memory of the values, read by `grad` and applied to the keys; by the keys its transpose.
    """
    batch, length, heads, columns = value.shape
    groups, states = query.shape[2:]
    for factor, reverse in ((key, False), (query, True)):
        each = _run_scalar(grad, value, log_decay, repeat_groups(factor, heads, 2), reverse, precision)
        yield each.unflatten(2, (groups, -1)).sum(3)
    width = block_columns(columns)
    before = _scalar_states(query, key, log_decay, value, False, precision, CHUNK)
    after = _scalar_states(query, key, log_decay, grad, True, precision, CHUNK)
    by_decay = before.new_empty(batch, length, heads)
    with on(before):
        scalar_decay_gradient[(batch * heads * before.shape[1],)](
            query,
            key,
            log_decay,
            value,
            grad,
            before,
            after,
            by_decay,
            length,
            before.shape[1],
            heads,
            heads // groups,
            columns,
            states,
            *query.stride(),
            *key.stride(),
            *log_decay.stride(),
            *value.stride(),
            *grad.stride(),
            PRECISION=precision,
            CHUNK=CHUNK,
            COLUMNS=width,
            STATES=power(states, 16),
            num_warps=8,
            num_stages=1,
        )
    yield by_decay


class _ScalarScan(torch.autograd.Function):
    """A scalar memory or its transpose, with the gradients of both."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Run the kernels on the factors, the values, the direction and the precision."""
        query, key, log_decay, value, ctx.reverse, ctx.precision = given
        ctx.save_for_backward(query, key, log_decay, value)
        return _run_scalar(query, key, log_decay, value, ctx.reverse, ctx.precision).to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Run the other direction for the values, and memories of the same decays for the factors."""
        query, key, log_decay, value = ctx.saved_tensors
        gradients: tuple[Tensor | None, ...] = (None,) * 3
        if any(ctx.needs_input_grad[:3]):
            entered, read = (upstream, value) if ctx.reverse else (value, upstream)
            gradients = tuple(_scalar_gradients(query, key, log_decay, entered, read, ctx.precision))
        by_value = None
        if ctx.needs_input_grad[3]:
            by_value = _run_scalar(query, key, log_decay, upstream, not ctx.reverse, ctx.precision)
        return tuple(cast_like((*gradients, by_value, None, None), [query, key, log_decay, value, None, None]))
