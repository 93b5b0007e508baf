"""The diagonal memory's pass and its gradients on a GPU; see README.md."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unilinattn.kernels.launch import Factor, factor, on, power
from unilinattn.kernels.scan.memories import Diagonal
from unilinattn.kernels.scan.triton_diagonal import Sizes, diagonal_gradients, diagonal_segments
from unilinattn.kernels.scan.triton_launch import Memory, States

TOKENS = 16
"""Tokens per block of a diagonal memory's program."""

BLOCK_ELEMENTS = 2048
"""Elements (token, row, state) of such a block: a few registers per thread."""


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


class DiagonalMemory(Memory):
    """A memory with a decay for each coordinate; queries and keys have the same groups."""

    unit = TOKENS

    def __init__(self, *factors: Tensor | None, reverse: bool) -> None:
        super().__init__(reverse=reverse)
        self.factors = Diagonal(*factors)  # type: ignore[arg-type]  # the first three are tensors

    @property
    def widths(self) -> tuple[int, int]:
        """A decay for each coordinate."""
        states = self.factors.query.shape[3]
        return states, states

    def rows(self, value: Tensor) -> _Rows:
        """Return the division of heads and columns into the rows of programs."""
        groups, states = self.factors.query.shape[2:]
        return _Rows.of(groups, value.shape[2], value.shape[3], states)

    def programs(self, value: Tensor) -> int:
        """Number of programs that run one segment."""
        rows = self.rows(value)
        return value.shape[0] * rows.groups * rows.blocks

    def in_kernel(self) -> dict[str, Factor | None]:
        """Return log-decay, rate, scale and reset as the kernels take them."""
        query, _, log_decay, key_scale, rate, reset = self.factors
        return {
            "decay": factor(log_decay.expand(*log_decay.shape[:3], query.shape[3])),
            "rate": None if rate is None else factor(rate, "head last"),
            "scale": None if key_scale is None else factor(key_scale, "batch token head"),
            "reset": None if reset is None else factor(reset, "batch token"),
        }

    def launch(self, value: Tensor, segment: int, states: States) -> None:
        """Run `diagonal_segments`."""
        query, key, *_ = self.factors
        read, write = (key, query) if self.reverse else (query, key)
        rows = self.rows(value)
        sizes = rows.sizes(value, read.shape[3], segment)
        with on(value):
            diagonal_segments[(sizes.batches * sizes.groups * sizes.blocks * sizes.segments,)](
                factor(read),
                factor(write),
                **self.in_kernel(),
                value=factor(value),
                **states._asdict(),
                sizes=sizes,
                REVERSE=self.reverse,
                **rows.options,
            )

    def gradients(self, value: Tensor, grad: Tensor) -> Sequence[Tensor | None]:
        """Return the gradients by each factor and by the value, from the states before and after each block."""
        query, key, log_decay, key_scale, rate, _ = self.factors
        batch, length, heads, columns = value.shape
        groups, states = query.shape[2:]
        rows = self.rows(value)
        before = self.states(value, TOKENS)
        after = DiagonalMemory(*self.factors, reverse=True).states(grad, TOKENS)
        sizes = rows.sizes(value, states, TOKENS)
        # Programs write their parts of a shared gradient separately; summing these without atomics is deterministic.
        slots = -(-columns // rows.size) if rows.one_head else 1
        narrow = log_decay.shape[3] == 1
        by_query = before.new_empty(rows.blocks, batch, length, groups, states)
        by_key = torch.empty_like(by_query)
        by_decay = before.new_empty(slots, batch, length, heads, *([] if narrow else [states]))
        by_rate = None if rate is None else before.new_empty(slots, batch, sizes.segments, heads, states)
        by_scale = None if key_scale is None else before.new_empty(slots, batch, length, heads)
        by_value = before.new_empty(value.shape)
        with on(before):
            diagonal_gradients[(batch * groups * rows.blocks * sizes.segments,)](
                factor(query),
                factor(key),
                **self.in_kernel(),
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
            None,
            by_value,
        )
