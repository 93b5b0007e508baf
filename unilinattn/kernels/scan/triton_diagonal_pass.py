"""The diagonal memory's pass and its gradients on a GPU; see README.md."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unilinattn.kernels.launch import on, power
from unilinattn.kernels.scan.triton_diagonal import diagonal_gradients, diagonal_segments
from unilinattn.kernels.scan.triton_launch import carry_over, cast_like, segment_length

TOKENS = 16
"""Tokens per block of a diagonal memory's program."""

HELD = 2048
"""Elements (token, row, state) of such a block: a few registers per thread."""


class Diagonal(NamedTuple):
    """The factors of a diagonal memory; queries and keys have the same groups."""

    query: Tensor
    key: Tensor
    log_decay: Tensor
    key_scale: Tensor | None
    rate: Tensor | None
    reset: Tensor | None

    def options(self) -> dict[str, bool]:
        """Return the compile-time flags of the factors that are given."""
        return {
            "RATE": self.rate is not None,
            "SCALE": self.key_scale is not None,
            "RESET": self.reset is not None,
        }

    def strided(self) -> tuple[Tensor, tuple[int, ...], Tensor, tuple[int, ...], Tensor, tuple[int, ...], Tensor, Any]:
        """Return log-decay, rate, scale and reset, each followed by its strides; missing ones are not read."""
        decay = self.log_decay.expand(*self.log_decay.shape[:3], self.query.shape[3])
        rate, scale, reset = (decay if t is None else t for t in (self.rate, self.key_scale, self.reset))
        return decay, decay.stride(), rate, rate.stride()[:2], scale, scale.stride()[:3], reset, reset.stride()[:2]


class _Rows(NamedTuple):
    """The division of heads and columns into the rows of programs."""

    groups: int
    blocks: int
    per_group: int
    one: bool
    size: int
    states: int

    @classmethod
    def of(cls, groups: int, heads: int, columns: int, states: int) -> "_Rows":
        one, per_group = columns > 1, heads // groups
        padded = power(states)
        size = min(power(columns if one else per_group), max(1, HELD // (TOKENS * padded)))
        blocks = per_group * -(-columns // size) if one else -(-per_group // size)
        return cls(groups, blocks, per_group, one, size, padded)


def _run_diagonal(given: Diagonal, value: Tensor, reverse: bool) -> Tensor:
    """Apply a diagonal memory or its transpose."""
    batch, length, heads, columns = value.shape
    rows = _Rows.of(given.query.shape[2], heads, columns, given.query.shape[3])
    segment = segment_length(length, batch * rows.groups * rows.blocks, value, TOKENS)
    entering = _diagonal_states(given, value, reverse, segment, rows) if segment < length else None
    out = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    _diagonal_pass(given, value, reverse, segment, rows, entering, None, out)
    return out.to(value.dtype)


def _diagonal_states(given: Diagonal, value: Tensor, reverse: bool, segment: int, rows: _Rows) -> Tensor:
    """Return the initial state of each segment (batch, segment, head, channel, state)."""
    batch, length, heads, columns = value.shape
    count, states = -(-length // segment), given.query.shape[3]
    left = torch.empty(batch, count, heads, columns, states, dtype=torch.float32, device=value.device)
    total = left.new_empty(batch, count, heads, states)
    _diagonal_pass(given, value, reverse, segment, rows, left, total, left)
    carry_over(left, total)
    return left


def _diagonal_pass(
    given: Diagonal,
    value: Tensor,
    reverse: bool,
    segment: int,
    rows: _Rows,
    entering: Tensor | None,
    total: Tensor | None,
    out: Tensor,
) -> None:
    batch, length, heads, columns = value.shape
    read, write = (given.key, given.query) if reverse else (given.query, given.key)
    decay, decay_strides, rate, rate_strides, scale, scale_strides, reset, reset_strides = given.strided()
    segments = -(-length // segment)
    with on(out):
        diagonal_segments[(batch * rows.groups * rows.blocks * segments,)](
            read,
            write,
            decay,
            rate,
            scale,
            reset,
            value,
            out if entering is None else entering,
            out if total is None else total,
            out,
            length,
            segments * segment,
            segments,
            segment,
            rows.groups,
            rows.blocks,
            rows.per_group,
            heads,
            columns,
            read.shape[3],
            *read.stride(),
            *write.stride(),
            *decay_strides,
            *rate_strides,
            *scale_strides,
            *reset_strides,
            *value.stride(),
            **given.options(),
            ENTERS=entering is not None and total is None,
            LEAVES=total is not None,
            REVERSE=reverse,
            ONE=rows.one,
            TOKENS=TOKENS,
            ROWS=rows.size,
            STATES=rows.states,
        )


def _diagonal_gradients(given: Diagonal, value: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of <grad, A value> by query, key, log-decay, scale, rate and value."""
    batch, length, heads, columns = value.shape
    groups, states = given.query.shape[2:]
    rows = _Rows.of(groups, heads, columns, states)
    before = _diagonal_states(given, value, False, TOKENS, rows)
    after = _diagonal_states(given, grad, True, TOKENS, rows)
    tiles = before.shape[1]
    # Programs write their parts of a shared gradient separately; summing these without atomics is deterministic.
    parts = -(-columns // rows.size) if rows.one else 1
    narrow = given.log_decay.shape[3] == 1
    by_query = before.new_empty(rows.blocks, batch, length, groups, states)
    by_key = torch.empty_like(by_query)
    by_decay = before.new_empty(parts, batch, length, heads, *([] if narrow else [states]))
    by_rate = before.new_empty(parts, batch, tiles, heads, states) if given.rate is not None else before
    by_scale = before.new_empty(parts, batch, length, heads) if given.key_scale is not None else before
    by_value = before.new_empty(value.shape)
    decay, decay_strides, rate, rate_strides, scale, scale_strides, reset, reset_strides = given.strided()
    with on(before):
        diagonal_gradients[(batch * groups * rows.blocks * tiles,)](
            given.query,
            given.key,
            decay,
            rate,
            scale,
            reset,
            value,
            grad,
            before,
            after,
            by_query,
            by_key,
            by_decay,
            by_rate,
            by_scale,
            by_value,
            length,
            tiles,
            groups,
            rows.blocks,
            rows.per_group,
            heads,
            columns,
            states,
            batch,
            *given.query.stride(),
            *given.key.stride(),
            *decay_strides,
            *rate_strides,
            *scale_strides,
            *reset_strides,
            *value.stride(),
            *grad.stride(),
            **given.options(),
            NARROW=narrow,
            ONE=rows.one,
            TOKENS=TOKENS,
            ROWS=rows.size,
            STATES=rows.states,
        )
    return (
        by_query.sum(0),
        by_key.sum(0),
        by_decay.sum(0).unsqueeze(-1) if narrow else by_decay.sum(0),
        None if given.key_scale is None else by_scale.sum(0),
        None if given.rate is None else by_rate.sum((0, 1, 2)),
        by_value,
    )


class DiagonalScan(torch.autograd.Function):
    """A diagonal memory or its transpose, with the gradients of both."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Run the kernels on the factors, the values and the direction."""
        *factors, value, reverse = given
        ctx.reverse = reverse
        ctx.save_for_backward(*factors, value)
        return _run_diagonal(Diagonal(*factors), value, reverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Run the other direction for the values, and recompute all states for the factors."""
        *factors, value = ctx.saved_tensors
        given, reverse = Diagonal(*factors), ctx.reverse
        gradients: tuple[Tensor | None, ...] = (None,) * 6
        by_value = None
        if any(ctx.needs_input_grad[:5]):
            # <upstream, A value>, or <upstream, A^T value> = <value, A upstream>.
            pair = (upstream, value) if reverse else (value, upstream)
            gradients = _diagonal_gradients(given, *pair)
            by_value = None if reverse else gradients[5]
        if by_value is None and ctx.needs_input_grad[6]:
            by_value = _run_diagonal(given, upstream, not reverse)
        query, key, decay, scale, rate, _ = gradients
        return tuple(cast_like((query, key, decay, scale, rate, None, by_value, None), [*factors, value, None]))
