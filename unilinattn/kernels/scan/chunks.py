"""One chunk of any memory that is linear in its values, and a block of the matrix of one, filled chunk by chunk.

Within a chunk such a memory is four matrices a head: how values reach outputs, how outputs read the state that the
chunk begins with, how values write the state that it ends with, and how the first state becomes the last one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class Chunk:
    """One chunk of a memory: y = within v + read S, S' = decay * S + transfer S + write v.

    Attributes:
        within: (batch, head, token, token), lower triangular.
        read: (batch, head, token, state).
        write: (batch, head, state, token).
        decay: (batch, head, state or 1), the diagonal part of the transition.
        transfer: (batch, head, state, state), the rest of the transition, None where there is none.
    """

    within: Float[Tensor, "batch head token token"]
    read: Float[Tensor, "batch head token state"]
    write: Float[Tensor, "batch head state token"]
    decay: Float[Tensor, "batch head staten"]
    transfer: Float[Tensor, "batch head state state"] | None = None

    def advance(self, state: Float[Tensor, "batch head state channel"]) -> Float[Tensor, "batch head state channel"]:
        """Carry a state from the chunk's beginning to its end."""
        carried = self.decay.unsqueeze(-1) * state
        return carried if self.transfer is None else carried + self.transfer @ state

    def retreat(self, state: Float[Tensor, "batch head state channel"]) -> Float[Tensor, "batch head state channel"]:
        """Apply the transpose of `advance`."""
        carried = self.decay.unsqueeze(-1) * state
        return carried if self.transfer is None else carried + self.transfer.mT @ state

    def forward(
        self, state: Float[Tensor, "batch head state channel"] | None, value: Float[Tensor, "batch token head channel"]
    ) -> tuple[Tensor, Tensor]:
        """Return what the chunk makes of its values and of the state before it (None: nothing), and the state after."""
        v = value.transpose(1, 2)
        found, ending = self.within @ v, self.write @ v
        if state is not None:
            found, ending = found + self.read @ state, self.advance(state) + ending
        return found.transpose(1, 2), ending

    def backward(
        self, state: Float[Tensor, "batch head state channel"] | None, grad: Float[Tensor, "batch token head channel"]
    ) -> tuple[Tensor, Tensor]:
        """Apply the transpose of `forward`, the state coming from after the chunk and going to before it."""
        g = grad.transpose(1, 2)
        found, beginning = self.within.mT @ g, self.read.mT @ g
        if state is not None:
            found, beginning = found + self.write.mT @ state, self.retreat(state) + beginning
        return found.transpose(1, 2), beginning


@dataclass(frozen=True, eq=False)
class Reading:
    """The rows of a chunk in a memory's matrix, not yet multiplied out; all columns after the chunk are zero.

    Attributes:
        sides: what the rows read, (batch, head, token, state), and states, (batch, head, state, col), in pairs for
            consecutive columns that end where the chunk begins.
        within: (batch, head, token, token).
        keys: how many columns the matrix has.
    """

    sides: tuple[tuple[Tensor, Tensor], ...]
    within: Float[Tensor, "batch head token token"]
    keys: int

    def block(self, row: slice, cols: slice) -> Float[Tensor, "batch head row col"]:
        """Return some rows and columns of every head."""
        first, last, _ = cols.indices(self.keys)
        parts, begun = [], 0
        for read, states in self.sides:
            part = slice(max(first - begun, 0), max(last - begun, 0))
            parts.append(read[:, :, row] @ states[..., part])
            begun += states.shape[-1]
        parts.append(self.within[:, :, row, max(first - begun, 0) : max(last - begun, 0)])
        return _padded(parts, last - first)

    def over_heads(self, row: slice) -> Float[Tensor, "batch row key"]:
        """Return some rows summed over heads, which the products do: heads and states are one inner dimension."""
        parts = [read[:, :, row].transpose(1, 2).flatten(2) @ states.flatten(1, 2) for read, states in self.sides]
        return _padded([*parts, self.within[:, :, row].sum(1)], self.keys)


def _padded(parts: Sequence[Tensor], width: int) -> Tensor:
    """Put columns side by side and zeros after them, in one copy."""
    rest = width - sum(part.shape[-1] for part in parts)
    return torch.cat([*parts, parts[-1].new_zeros(*parts[-1].shape[:-1], rest)], dim=-1)


def fill(
    chunks: Iterable[Chunk], start: int, row: Int[Tensor, " row"], col: Int[Tensor, " col"]
) -> Float[Tensor, "batch head row col"]:
    """Fill a block of a memory's matrix: each column is carried from chunk to chunk as a state.

    `chunks` begin at token `start` and cover every column up to the last row; rows before `start` are zero.
    """
    state: Tensor | None = None
    blocks: list[Tensor] = []
    for chunk in chunks:
        stop = start + chunk.within.shape[-1]
        i = row[(row >= start) & (row < stop)] - start
        j = col[(col >= start) & (col < stop)] - start
        if state is None:
            state = chunk.write[..., :0]
        block = torch.cat([chunk.read[:, :, i] @ state, chunk.within[:, :, i][..., j]], dim=-1)
        blocks.append(functional.pad(block, (0, len(col) - block.shape[-1])))
        state = torch.cat([chunk.advance(state), chunk.write[..., j]], dim=-1)
        start = stop
    filled = torch.cat(blocks, dim=2)
    return functional.pad(filled, (0, 0, len(row) - filled.shape[2], 0))
