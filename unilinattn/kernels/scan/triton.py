"""The linear-time passes on a GPU: segments of tokens side by side, states in registers; see README.md."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from unilinattn.kernels.launch import Precision, on, power
from unilinattn.kernels.scan.tiled import spread
from unilinattn.kernels.scan.triton_diagonal import carry, diagonal_gradients, diagonal_segments
from unilinattn.kernels.scan.triton_scalar import scalar_decay_gradient, scalar_segments

TOKENS = 16
"""Tokens that a diagonal memory's program holds at once."""

HELD = 2048
"""Numbers (token, row, state) of one such block: a few registers of each thread."""

CHUNK = 32
"""Tokens, and most columns, of a scalar memory's products: larger ones with 128 states leave the registers."""

LEAST = 64
"""Tokens of the shortest segment, so that the states between segments stay few beside the tokens."""

PROGRAMS = 8
"""Programs for each multiprocessor that the segments are cut for."""


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
    query, key = _same_groups(query, key, log_decay.shape[2])
    return _DiagonalScan.apply(query, key, log_decay, key_scale, rate, reset, value, False)


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
    query, key = _same_groups(query, key, log_decay.shape[2])
    return _DiagonalScan.apply(query, key, log_decay, key_scale, rate, reset, grad, True)


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


class _Diagonal(NamedTuple):
    """A diagonal memory's factors, queries and keys in the same groups."""

    query: Tensor
    key: Tensor
    log_decay: Tensor
    key_scale: Tensor | None
    rate: Tensor | None
    reset: Tensor | None

    def options(self) -> dict[str, bool]:
        return {
            "RATE": self.rate is not None,
            "SCALE": self.key_scale is not None,
            "RESET": self.reset is not None,
        }

    def strided(self) -> tuple[Tensor, tuple[int, ...], Tensor, tuple[int, ...], Tensor, tuple[int, ...], Tensor, Any]:
        """Return log-decay, rate, scale and reset, each before its strides; one that is absent is not read."""
        decay = self.log_decay.expand(*self.log_decay.shape[:3], self.query.shape[3])
        rate, scale, reset = (decay if t is None else t for t in (self.rate, self.key_scale, self.reset))
        return decay, decay.stride(), rate, rate.stride()[:2], scale, scale.stride()[:3], reset, reset.stride()[:2]


class _Rows(NamedTuple):
    """How a program's rows are cut from heads and columns."""

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


def _run_diagonal(given: _Diagonal, value: Tensor, reverse: bool) -> Tensor:
    """Apply a diagonal memory or its transpose."""
    batch, length, heads, columns = value.shape
    rows = _Rows.of(given.query.shape[2], heads, columns, given.query.shape[3])
    segment = _segment(length, batch * rows.groups * rows.blocks, value, TOKENS)
    entering = _diagonal_states(given, value, reverse, segment, rows) if segment < length else None
    out = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    _diagonal_pass(given, value, reverse, segment, rows, entering, None, out)
    return out.to(value.dtype)


def _diagonal_states(given: _Diagonal, value: Tensor, reverse: bool, segment: int, rows: _Rows) -> Tensor:
    """Return the state that each segment begins with: (batch, segment, head, channel, state)."""
    batch, length, heads, columns = value.shape
    count, states = -(-length // segment), given.query.shape[3]
    left = torch.empty(batch, count, heads, columns, states, dtype=torch.float32, device=value.device)
    total = left.new_empty(batch, count, heads, states)
    _diagonal_pass(given, value, reverse, segment, rows, left, total, left)
    _carry(left, total)
    return left


def _diagonal_pass(
    given: _Diagonal,
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


def _diagonal_gradients(given: _Diagonal, value: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of <grad, A value> by query, key, log-decay, scale, rate and value."""
    batch, length, heads, columns = value.shape
    groups, states = given.query.shape[2:]
    rows = _Rows.of(groups, heads, columns, states)
    before = _diagonal_states(given, value, False, TOKENS, rows)
    after = _diagonal_states(given, grad, True, TOKENS, rows)
    tiles = before.shape[1]
    # What several programs have a part in is written part by part and summed: no atomic, the same sum every time.
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


class _DiagonalScan(torch.autograd.Function):
    """A diagonal memory or its transpose, with the gradients of both."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Run the kernels on the factors, the values and the direction."""
        *factors, value, reverse = given
        ctx.reverse = reverse
        ctx.save_for_backward(*factors, value)
        return _run_diagonal(_Diagonal(*factors), value, reverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Run the other direction for the values, and all states once more for the factors."""
        *factors, value = ctx.saved_tensors
        given, reverse = _Diagonal(*factors), ctx.reverse
        found: tuple[Tensor | None, ...] = (None,) * 6
        by_value = None
        if any(ctx.needs_input_grad[:5]):
            # <upstream, A value>, or <upstream, A^T value> = <value, A upstream>.
            pair = (upstream, value) if reverse else (value, upstream)
            found = _diagonal_gradients(given, *pair)
            by_value = None if reverse else found[5]
        if by_value is None and ctx.needs_input_grad[6]:
            by_value = _run_diagonal(given, upstream, not reverse)
        query, key, decay, scale, rate, _ = found
        return tuple(_cast((query, key, decay, scale, rate, None, by_value, None), [*factors, value, None]))


def _run_scalar(
    query: Tensor, key: Tensor, log_decay: Tensor, value: Tensor, reverse: bool, precision: Precision
) -> Tensor:
    """Apply a scalar memory or its transpose; returns float32."""
    batch, length, heads, columns = value.shape
    width = _columns(columns)
    segment = _segment(length, batch * heads * -(-columns // width), value, CHUNK)
    entering = None
    if segment < length:
        entering = _scalar_states(query, key, log_decay, value, reverse, precision, segment)
    out = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    _scalar_pass(query, key, log_decay, value, reverse, precision, segment, entering, None, out)
    return out


def _scalar_states(
    query: Tensor, key: Tensor, log_decay: Tensor, value: Tensor, reverse: bool, precision: Precision, segment: int
) -> Tensor:
    """Return the state that each segment begins with: (batch, segment, head, channel, state)."""
    batch, length, heads, columns = value.shape
    count = -(-length // segment)
    left = torch.empty(batch, count, heads, columns, query.shape[3], dtype=torch.float32, device=value.device)
    total = left.new_empty(batch, count, heads, 1)
    _scalar_pass(query, key, log_decay, value, reverse, precision, segment, left, total, left)
    _carry(left, total)
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
    width = _columns(columns)
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

    By the queries it is a memory again, that of values read by `grad`, applied to the keys; by the keys its transpose.
    """
    batch, length, heads, columns = value.shape
    groups, states = query.shape[2:]
    for factor, reverse in ((key, False), (query, True)):
        each = _run_scalar(grad, value, log_decay, spread(factor, heads, 2), reverse, precision)
        yield each.unflatten(2, (groups, -1)).sum(3)
    width = _columns(columns)
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
        found: tuple[Tensor | None, ...] = (None,) * 3
        if any(ctx.needs_input_grad[:3]):
            entered, read = (upstream, value) if ctx.reverse else (value, upstream)
            found = tuple(_scalar_gradients(query, key, log_decay, entered, read, ctx.precision))
        by_value = None
        if ctx.needs_input_grad[3]:
            by_value = _run_scalar(query, key, log_decay, upstream, not ctx.reverse, ctx.precision)
        return tuple(_cast((*found, by_value, None, None), [query, key, log_decay, value, None, None]))


def _carry(states: Float[Tensor, "batch segment head channel state"], total: Tensor) -> None:
    """Turn what each segment leaves into the state that it begins with, in place."""
    batch, segments, heads, columns, width = states.shape
    size = heads * columns * width
    block = min(256, power(size))
    with on(states):
        carry[(-(-size // block), batch)](states, total, segments, size, columns, width, total.shape[3], SIZE=block)


def _segment(length: int, programs: int, like: Tensor, unit: int) -> int:
    """Return the tokens of a segment, a multiple of `unit`: short enough to fill the device, no shorter."""
    wanted = max(1, PROGRAMS * _processors(like.device) // programs)
    return -(-max(LEAST, -(-length // wanted)) // unit) * unit


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1 << 20


def _columns(columns: int) -> int:
    return min(power(columns, 16), CHUNK)


def _same_groups(query: Tensor, key: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    if query.shape[2] == key.shape[2]:
        return query, key
    return spread(query, heads, 2), spread(key, heads, 2)


def _cast(found: tuple[Tensor | None, ...], like: list[Tensor | None]) -> Iterator[Tensor | None]:
    for gradient, factor in zip(found, like, strict=True):
        yield None if gradient is None or factor is None else gradient.to(factor.dtype)
