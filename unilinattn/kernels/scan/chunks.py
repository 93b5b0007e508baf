"""Linear-time passes of any memory that is linear in its values, chunk by chunk.

Within a chunk such a memory is four matrices a head: how values reach outputs, how outputs read the state that the
chunk begins with, how values write the state that it ends with, and how the first state becomes the last one.
"""

from collections.abc import Iterable
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
    chunks: Iterable[Chunk], value: Float[Tensor, "batch length head channel"]
) -> Float[Tensor, "batch length head channel"]:
    """Apply a memory to values, its chunks given from the first to the last."""
    outputs, start, state = [], 0, None
    for chunk in chunks:
        stop = start + chunk.within.shape[-1]
        v = value[:, start:stop].transpose(1, 2)
        written = chunk.write @ v
        if state is None:
            outputs.append(chunk.within @ v)
            state = written
        else:
            outputs.append(chunk.within @ v + chunk.read @ state)
            state = chunk.advance(state) + written
        start = stop
    return torch.cat(outputs, dim=2).transpose(1, 2)


def backward(
    chunks: Iterable[Chunk], grad: Float[Tensor, "batch length head channel"]
) -> Float[Tensor, "batch length head channel"]:
    """Apply a memory's transpose, its chunks given from the last to the first."""
    outputs, stop, state = [], grad.shape[1], None
    for chunk in chunks:
        start = stop - chunk.within.shape[-1]
        g = grad[:, start:stop].transpose(1, 2)
        passed = chunk.read.mT @ g
        if state is None:
            outputs.append(chunk.within.mT @ g)
            state = passed
        else:
            outputs.append(chunk.within.mT @ g + chunk.write.mT @ state)
            state = chunk.retreat(state) + passed
        stop = start
    return torch.cat(outputs[::-1], dim=2).transpose(1, 2)


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
