"""The linear-time passes on a GPU: parallel segments of tokens, states in registers; see README.md."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.launch import Precision, factor, on, power
from unilinattn.kernels.scan.memories import Diagonal, Scalar
from unilinattn.kernels.scan.triton_diagonal_pass import DiagonalMemory
from unilinattn.kernels.scan.triton_launch import Memory, Scan, States
from unilinattn.kernels.scan.triton_scalar import Sizes, scalar_decay_gradient, scalar_segments

CHUNK = 32
"""Tokens, and largest number of columns, of a scalar memory's products; larger ones with 128 states spill registers."""


def diagonal_scan(
    memory: Diagonal, value: Float[Tensor, "batch length head channel"]
) -> Float[Tensor, "batch length head channel"]:
    """Run a memory forward in time on values and read it at each token; differentiable once."""
    return Scan.apply(DiagonalMemory, False, value, *_same_groups(memory))


def diagonal_scan_adjoint(
    memory: Diagonal, grad: Float[Tensor, "batch length head channel"]
) -> Float[Tensor, "batch length head channel"]:
    """Apply the transpose of `diagonal_scan`'s matrix, backward in time; differentiable once."""
    return Scan.apply(DiagonalMemory, True, grad, *_same_groups(memory))


def _same_groups(memory: Diagonal) -> Diagonal:
    """Return a memory whose queries and keys have equally many groups: unchanged, or one per head."""
    query, key, heads = memory.query, memory.key, memory.log_decay.shape[2]
    if query.shape[2] == key.shape[2]:
        return memory
    return memory._replace(query=repeat_groups(query, heads, 2), key=repeat_groups(key, heads, 2))


def scalar_scan(
    memory: Scalar, value: Float[Tensor, "batch length head channel"], *, precision: Precision = "ieee"
) -> Float[Tensor, "batch length head channel"]:
    """Apply tril (q_i . k_j) exp(G_i - G_j) s_j to values, chunk by chunk; differentiable once."""
    return Scan.apply(partial(ScalarMemory, precision), False, memory.scaled(value), *memory[:3])


def scalar_scan_adjoint(
    memory: Scalar, grad: Float[Tensor, "batch length head channel"], *, precision: Precision = "ieee"
) -> Float[Tensor, "batch length head channel"]:
    """Apply the transpose of `scalar_scan`'s matrix; differentiable once."""
    return memory.scaled(Scan.apply(partial(ScalarMemory, precision), True, grad, *memory[:3]))


class ScalarMemory(Memory):
    """A memory with one decay per head, whose chunks are products in a chosen precision."""

    unit = CHUNK

    def __init__(self, precision: Precision, query: Tensor, key: Tensor, log_decay: Tensor, *, reverse: bool) -> None:
        super().__init__(reverse=reverse)
        self.precision, self.query, self.key, self.log_decay = precision, query, key, log_decay

    @property
    def widths(self) -> tuple[int, int]:
        """One decay for all coordinates."""
        return self.query.shape[3], 1

    def programs(self, value: Tensor) -> int:
        """Number of programs that run one segment."""
        batch, _, heads, columns = value.shape
        return batch * heads * -(-columns // _block_columns(columns))

    def sizes(self, value: Tensor, segment: int) -> Sizes:
        """Return the kernels' sizes for values (batch, length, head, channel) in segments of `segment` tokens."""
        _, length, heads, columns = value.shape
        groups, states = self.query.shape[2:]
        return Sizes(length, heads, columns, states, heads // groups, -(-length // segment), segment)

    def options(self, columns: int) -> dict[str, Any]:
        """Compile-time constants of the kernels, and the size of their programs."""
        sizes = {"CHUNK": CHUNK, "COLUMNS": _block_columns(columns), "STATES": power(self.query.shape[3], 16)}
        return {"PRECISION": self.precision, **sizes, "num_warps": 8, "num_stages": 1}

    def launch(self, value: Tensor, segment: int, states: States) -> None:
        """Run `scalar_segments`."""
        read, write = (self.key, self.query) if self.reverse else (self.query, self.key)
        sizes = self.sizes(value, segment)
        with on(value):
            scalar_segments[(self.programs(value) * sizes.segments,)](
                factor(read),
                factor(write),
                factor(self.log_decay, "batch token head"),
                factor(value),
                *states,
                sizes,
                REVERSE=self.reverse,
                **self.options(value.shape[3]),
            )

    def gradients(self, value: Tensor, grad: Tensor) -> Sequence[Tensor | None]:
        """Return the gradients by query, key and log-decay.

        By the queries it is the memory of the values, read by `grad` and applied to the keys; by the keys its
        transpose.
        """
        batch, length, heads, columns = value.shape
        sides = []
        for other, reverse in ((self.key, False), (self.query, True)):
            memory = ScalarMemory(self.precision, grad, value, self.log_decay, reverse=reverse)
            sides.append(memory.run(repeat_groups(other, heads, 2)).unflatten(2, (self.query.shape[2], -1)).sum(3))
        before = self.states(value, CHUNK)
        after = ScalarMemory(self.precision, self.query, self.key, self.log_decay, reverse=True).states(grad, CHUNK)
        by_decay = before.new_empty(batch, length, heads)
        with on(before):
            scalar_decay_gradient[(batch * heads * before.shape[1],)](
                factor(self.query),
                factor(self.key),
                factor(self.log_decay, "batch token head"),
                factor(value),
                factor(grad),
                before,
                after,
                by_decay,
                self.sizes(value, CHUNK),
                **self.options(columns),
            )
        return *sides, by_decay, None


def _block_columns(columns: int) -> int:
    """Return the columns of a block of a scalar memory's products."""
    return min(power(columns, 16), CHUNK)
