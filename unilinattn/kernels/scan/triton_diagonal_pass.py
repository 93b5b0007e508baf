"""The diagonal memory's pass and its gradients on a GPU; see README.md."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unilinattn.kernels.launch import Factor, factor, on, power
from unilinattn.kernels.scan.triton_diagonal import Sizes, diagonal_gradients, diagonal_segments
from unilinattn.kernels.scan.triton_launch import carry_over, cast_like, segment_length

TOKENS = 16
"""Tokens per block of a diagonal memory's program."""

BLOCK_ELEMENTS = 2048
"""Elements (token, row, state) of such a block: a few registers per thread."""


class Diagonal(NamedTuple):
    """The factors of a diagonal memory; queries and keys have the same groups."""

    query: Tensor
    key: Tensor
    log_decay: Tensor
    key_scale: Tensor | None
    rate: Tensor | None
    reset: Tensor | None

    def in_kernel(self) -> dict[str, Factor | None]:
        """Return log-decay, rate, scale and reset as the kernels take them."""
        return {
            "decay": factor(self.log_decay.expand(*self.log_decay.shape[:3], self.query.shape[3])),
            "rate": None if self.rate is None else factor(self.rate, "head last"),
            "scale": None if self.key_scale is None else factor(self.key_scale, "batch token head"),
            "reset": None if self.reset is None else factor(self.reset, "batch token"),
        }


class _Rows(NamedTuple):
    """The division of heads and columns into the rows of programs."""

    groups: int
    blocks: int
    per_group: int
    one_head: bool
    size: int
    states: int

    @classmethod
    def of(cls, groups: int, heads: int, columns: int, states: int) -> "_Rows":
        one_head, per_group = columns > 1, heads // groups
        padded = power(states)
        size = min(power(columns if one_head else per_group), max(1, BLOCK_ELEMENTS // (TOKENS * padded)))
        blocks = per_group * -(-columns // size) if one_head else -(-per_group // size)
        return cls(groups, blocks, per_group, one_head, size, padded)

    def sizes(self, value: Tensor, states: int, segment: int) -> Sizes:
        """Return the kernels' sizes for values (batch, length, head, column) in segments of `segment` tokens."""
        batch, length, heads, columns = value.shape
        memory = (batch, length, heads, columns, states)
        return Sizes(*memory, self.groups, self.per_group, self.blocks, -(-length // segment), segment)

    @property
    def options(self) -> dict[str, int]:
        """Compile-time constants of the kernels."""
        return {"ONE_HEAD": self.one_head, "TOKENS": TOKENS, "ROWS": self.size, "STATES": self.states}


def _run_diagonal(memory: Diagonal, value: Tensor, reverse: bool) -> Tensor:
    """Apply a diagonal memory or its transpose."""
    batch, length, heads, columns = value.shape
    rows = _Rows.of(memory.query.shape[2], heads, columns, memory.query.shape[3])
    segment = segment_length(length, batch * rows.groups * rows.blocks, value, TOKENS)
    entering = _diagonal_states(memory, value, reverse, segment, rows) if segment < length else None
    out = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    _diagonal_pass(memory, value, reverse, rows, segment, entering=entering, out=out)
    return out.to(value.dtype)


def _diagonal_states(memory: Diagonal, value: Tensor, reverse: bool, segment: int, rows: _Rows) -> Tensor:
    """Return the initial state of each segment (batch, segment, head, channel, state)."""
    batch, length, heads, columns = value.shape
    count, states = -(-length // segment), memory.query.shape[3]
    leaving = torch.empty(batch, count, heads, columns, states, dtype=torch.float32, device=value.device)
    total = leaving.new_empty(batch, count, heads, states)
    _diagonal_pass(memory, value, reverse, rows, segment, leaving=leaving, total=total)
    carry_over(leaving, total)
    return leaving


def _diagonal_pass(
    memory: Diagonal, value: Tensor, reverse: bool, rows: _Rows, segment: int, **states: Tensor | None
) -> None:
    """Run `diagonal_segments` with some of `entering`, `leaving`, `total` and `out`."""
    read, write = (memory.key, memory.query) if reverse else (memory.query, memory.key)
    sizes = rows.sizes(value, read.shape[3], segment)
    with on(value):
        diagonal_segments[(sizes.batches * sizes.groups * sizes.blocks * sizes.segments,)](
            factor(read),
            factor(write),
            **memory.in_kernel(),
            value=factor(value),
            **{"entering": None, "leaving": None, "total": None, "out": None, **states},
            sizes=sizes,
            REVERSE=reverse,
            **rows.options,
        )


def _diagonal_gradients(memory: Diagonal, value: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of <grad, A value> by query, key, log-decay, scale, rate and value."""
    batch, length, heads, columns = value.shape
    groups, states = memory.query.shape[2:]
    rows = _Rows.of(groups, heads, columns, states)
    before = _diagonal_states(memory, value, False, TOKENS, rows)
    after = _diagonal_states(memory, grad, True, TOKENS, rows)
    sizes = rows.sizes(value, states, TOKENS)
    # Programs write their parts of a shared gradient separately; summing these without atomics is deterministic.
    slots = -(-columns // rows.size) if rows.one_head else 1
    narrow = memory.log_decay.shape[3] == 1
    by_query = before.new_empty(rows.blocks, batch, length, groups, states)
    by_key = torch.empty_like(by_query)
    by_decay = before.new_empty(slots, batch, length, heads, *([] if narrow else [states]))
    by_rate = None if memory.rate is None else before.new_empty(slots, batch, sizes.segments, heads, states)
    by_scale = None if memory.key_scale is None else before.new_empty(slots, batch, length, heads)
    by_value = before.new_empty(value.shape)
    with on(before):
        diagonal_gradients[(batch * groups * rows.blocks * sizes.segments,)](
            factor(memory.query),
            factor(memory.key),
            **memory.in_kernel(),
            value=factor(value),
            grad=factor(grad),
            before=before,
            after=after,
            query_grad=by_query,
            key_grad=by_key,
            decay_grad=by_decay,
            rate_grad=by_rate,
            scale_grad=by_scale,
            value_grad=by_value,
            sizes=sizes,
            NARROW=narrow,
            **rows.options,
        )
    return (
        by_query.sum(0),
        by_key.sum(0),
        by_decay.sum(0).unsqueeze(-1) if narrow else by_decay.sum(0),
        None if by_scale is None else by_scale.sum(0),
        None if by_rate is None else by_rate.sum((0, 1, 2)),
        by_value,
    )


class DiagonalScan(torch.autograd.Function):
    """A diagonal memory or its transpose, with the gradients of both."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Run the kernels on the factors, the values and the direction."""
        *factors, value, reverse = arguments
        ctx.reverse = reverse
        ctx.save_for_backward(*factors, value)
        return _run_diagonal(Diagonal(*factors), value, reverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Run the other direction for the values, and recompute all states for the factors."""
        *factors, value = ctx.saved_tensors
        memory, reverse = Diagonal(*factors), ctx.reverse
        gradients: tuple[Tensor | None, ...] = (None,) * 6
        by_value = None
        if any(ctx.needs_input_grad[:5]):
            # <upstream, A value>, or <upstream, A^T value> = <value, A upstream>.
            pair = (upstream, value) if reverse else (value, upstream)
            gradients = _diagonal_gradients(memory, *pair)
            by_value = None if reverse else gradients[5]
        if by_value is None and ctx.needs_input_grad[6]:
            by_value = _run_diagonal(memory, upstream, not reverse)
        query, key, decay, scale, rate, _ = gradients
        return tuple(cast_like((query, key, decay, scale, rate, None, by_value, None), [*factors, value, None]))
