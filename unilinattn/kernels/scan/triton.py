"""The linear-time passes on a GPU: parallel segments of tokens, states in registers; see README.md."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.launch import Precision, factor, on, power
from unilinattn.kernels.scan.triton_diagonal_pass import DiagonalScan
from unilinattn.kernels.scan.triton_launch import (
    CHUNK,
    block_columns,
    carry_over,
    cast_like,
    same_groups,
    segment_length,
)
from unilinattn.kernels.scan.triton_scalar import Sizes, scalar_decay_gradient, scalar_segments


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


class _Scalar(NamedTuple):
    """A scalar memory or its transpose: its factors, direction and precision."""

    query: Tensor
    key: Tensor
    log_decay: Tensor
    reverse: bool
    precision: Precision

    def sizes(self, value: Tensor, segment: int) -> Sizes:
        """Return the kernels' sizes for values (batch, length, head, channel) in segments of `segment` tokens."""
        _, length, heads, columns = value.shape
        groups, states = self.query.shape[2:]
        return Sizes(length, heads, columns, states, heads // groups, -(-length // segment), segment)

    def options(self, columns: int) -> dict[str, Any]:
        """Compile-time constants of the kernels, and the size of their programs."""
        sizes = {"CHUNK": CHUNK, "COLUMNS": block_columns(columns), "STATES": power(self.query.shape[3], 16)}
        return {"PRECISION": self.precision, **sizes, "num_warps": 8, "num_stages": 1}


def _run_scalar(memory: _Scalar, value: Tensor) -> Tensor:
    """Apply a scalar memory or its transpose; returns float32."""
    batch, length, heads, columns = value.shape
    segment = segment_length(length, batch * heads * -(-columns // block_columns(columns)), value, CHUNK)
    entering = _scalar_states(memory, value, segment) if segment < length else None
    out = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    _scalar_pass(memory, value, segment, entering=entering, out=out)
    return out


def _scalar_states(memory: _Scalar, value: Tensor, segment: int) -> Tensor:
    """Return the initial state of each segment (batch, segment, head, channel, state)."""
    batch, length, heads, columns = value.shape
    count, states = -(-length // segment), memory.query.shape[3]
    leaving = torch.empty(batch, count, heads, columns, states, dtype=torch.float32, device=value.device)
    total = leaving.new_empty(batch, count, heads, 1)
    _scalar_pass(memory, value, segment, leaving=leaving, total=total)
    carry_over(leaving, total)
    return leaving


def _scalar_pass(memory: _Scalar, value: Tensor, segment: int, **states: Tensor | None) -> None:
    """Run `scalar_segments` with some of `entering`, `leaving`, `total` and `out`."""
    batch, _, heads, columns = value.shape
    read, write = (memory.key, memory.query) if memory.reverse else (memory.query, memory.key)
    sizes = memory.sizes(value, segment)
    with on(value):
        scalar_segments[(batch * heads * -(-columns // block_columns(columns)) * sizes.segments,)](
            factor(read),
            factor(write),
            factor(memory.log_decay, "batch token head"),
            factor(value),
            **{"entering": None, "leaving": None, "total": None, "out": None, **states},
            sizes=sizes,
            REVERSE=memory.reverse,
            **memory.options(columns),
        )


def _scalar_gradients(memory: _Scalar, value: Tensor, grad: Tensor) -> Iterator[Tensor]:
    """Yield the gradients of <grad, A value> by query, key and log-decay, for the matrix A that runs forward in time.

    By the queries it is the memory of the values, read by `grad` and applied to the keys; by the keys its transpose.
    """
    batch, length, heads, columns = value.shape
    query, key, log_decay, _, precision = memory
    groups = query.shape[2]
    for other, reverse in ((key, False), (query, True)):
        each = _run_scalar(_Scalar(grad, value, log_decay, reverse, precision), repeat_groups(other, heads, 2))
        yield each.unflatten(2, (groups, -1)).sum(3)
    before = _scalar_states(memory._replace(reverse=False), value, CHUNK)
    after = _scalar_states(memory._replace(reverse=True), grad, CHUNK)
    by_decay = before.new_empty(batch, length, heads)
    with on(before):
        scalar_decay_gradient[(batch * heads * before.shape[1],)](
            factor(query),
            factor(key),
            factor(log_decay, "batch token head"),
            factor(value),
            factor(grad),
            before,
            after,
            by_decay,
            memory.sizes(value, CHUNK),
            **memory.options(columns),
        )
    yield by_decay


class _ScalarScan(torch.autograd.Function):
    """A scalar memory or its transpose, with the gradients of both."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Run the kernels on the factors, the values, the direction and the precision."""
        query, key, log_decay, value, ctx.reverse, ctx.precision = arguments
        ctx.save_for_backward(query, key, log_decay, value)
        return _run_scalar(_Scalar(query, key, log_decay, ctx.reverse, ctx.precision), value).to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Run the other direction for the values, and memories of the same decays for the factors."""
        query, key, log_decay, value = ctx.saved_tensors
        memory = _Scalar(query, key, log_decay, ctx.reverse, ctx.precision)
        gradients: tuple[Tensor | None, ...] = (None,) * 3
        if any(ctx.needs_input_grad[:3]):
            entered, read = (upstream, value) if ctx.reverse else (value, upstream)
            gradients = tuple(_scalar_gradients(memory, entered, read))
        by_value = None
        if ctx.needs_input_grad[3]:
            by_value = _run_scalar(memory._replace(reverse=not ctx.reverse), upstream)
        return tuple(cast_like((*gradients, by_value, None, None), [query, key, log_decay, value, None, None]))
