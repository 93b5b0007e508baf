"""Chunks of any memory that is linear in its values, and blocks of such a memory's matrix, filled by chunks.

Within a chunk the memory has four matrices per head: from values to outputs, from the initial state to outputs, from
values to the final state, and from the initial to the final state.
"""

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.subnormal import flushed, flushed_

ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Chunk:
    """One chunk of a memory: y = scale * (within v + read S), S' = transition S + write v.

    Consecutive chunks of equal length are one object whose batch holds the chunks of each sequence in order.

    Subnormal numbers of the matrices and of the states are set to zero, because products read both. `flush=False`: the
    given matrices have none.

    Attributes:
        within: (batch, head, token, token), lower triangular; the sum over heads with one head in `over_heads`.
        read: (batch, head, token, state).
        write: (batch, head, state, token).
        transition: (batch, head, state, state), from the initial to the final state; (batch, head, state or 1, 1) for
            one decay per coordinate or per head.
        scale: (batch, head, token), factors of the outputs, which may underflow; None for 1.
    """

    within: Float[Tensor, "batch #head token token"]
    read: Float[Tensor, "batch head token state"]
    write: Float[Tensor, "batch head state token"]
    transition: Float[Tensor, "batch head state_or_1 from_or_1"]
    scale: Float[Tensor, "batch head token"] | None = None
    flush: InitVar[bool] = True

    def __post_init__(self, flush: bool) -> None:
        """Set subnormal numbers to zero, in place if no gradient needs the matrices' storage."""
        if not flush:
            return
        flushing = flushed if torch.is_grad_enabled() else flushed_
        for name, matrix in vars(self).items():
            if matrix is not None:
                object.__setattr__(self, name, flushing(matrix))

    @property
    def is_diagonal(self) -> bool:
        """Whether the transition multiplies each coordinate of the state by a decay."""
        return self.transition.shape[-1] == 1

    def advance(self, state: Float[Tensor, "batch head state channel"]) -> Float[Tensor, "batch head state channel"]:
        """Return the state at the chunk's end, given the one at its beginning, without writes."""
        return flushed_(self.transition * state if self.is_diagonal else self.transition @ state)

    def retreat(self, state: Float[Tensor, "batch head state channel"]) -> Float[Tensor, "batch head state channel"]:
        """Apply the transpose of `advance`."""
        return flushed_(self.transition * state if self.is_diagonal else self.transition.mT @ state)

    def scaled(
        self, outputs: Float[Tensor, "batch head row any"], row: slice | Int[Tensor, " row"] = ALL
    ) -> Float[Tensor, "batch head row any"]:
        """Multiply rows of outputs by `scale`."""
        return outputs if self.scale is None else outputs * self.scale[:, :, row].unsqueeze(-1)

    def forward(
        self, state: Float[Tensor, "batch head state channel"] | None, value: Float[Tensor, "batch token head channel"]
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs and the state after the last chunk, given the values and the state before the first.

        A state of None is zero.
        """
        v = self._by_chunk(flushed(value))
        output, written = self.within @ v, flushed_(self.write @ v)
        entering, ending = self._carried(state, written, len(value), reverse=False)
        if entering is not None:
            output = output + self.read @ entering
        return self.scaled(output).transpose(1, 2).reshape(value.shape), ending

    def backward(
        self, state: Float[Tensor, "batch head state channel"] | None, grad: Float[Tensor, "batch token head channel"]
    ) -> tuple[Tensor, Tensor]:
        """Apply the transpose of `forward`: from the adjoint state after the last chunk to the one before the first."""
        g = self._by_chunk(grad)
        g = flushed(g) if self.scale is None else flushed_(self.scaled(g))
        value_grad, read = self.within.mT @ g, flushed_(self.read.mT @ g)
        leaving, beginning = self._carried(state, read, len(grad), reverse=True)
        if leaving is not None:
            value_grad = value_grad + self.write.mT @ leaving
        return value_grad.transpose(1, 2).reshape(grad.shape), beginning

    def _by_chunk(self, vectors: Float[Tensor, "batch token head channel"]) -> Float[Tensor, "each head some channel"]:
        """Move the chunks of each sequence into the batch."""
        chunks = len(self.read) // len(vectors)
        return vectors.unflatten(1, (chunks, -1)).flatten(0, 1).transpose(1, 2)

    def _carried(
        self, state: Tensor | None, added: Float[Tensor, "each head state channel"], batch: int, *, reverse: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Return the states that enter the chunks, None if a single one is zero, and the state after the last chunk.

        `added` is what each chunk adds to the state; `reverse` carries states through the transposed transitions.
        """
        if len(added) == batch:
            move = self.retreat if reverse else self.advance
            return state, added if state is None else flushed_(move(state) + added)
        carry = implementation("chunk_states", added).chunk_states
        transition, added = (t.unflatten(0, (batch, -1)) for t in (self.transition, added))
        states = carry(transition, added, state, reverse=reverse)
        entering, ending = (states[:, 1:], states[:, 0]) if reverse else (states[:, :-1], states[:, -1])
        return entering.flatten(0, 1), ending

    def cut(self, count: int) -> Sequence["Chunk"]:
        """Return the chunks of `count` consecutive ones as separate objects."""
        if count == 1:
            return [self]
        within, read, write, transition = (
            t.unflatten(0, (-1, count)).unbind(1) for t in (self.within, self.read, self.write, self.transition)
        )
        scale = [None] * count if self.scale is None else self.scale.unflatten(0, (-1, count)).unbind(1)
        every = zip(within, read, write, transition, scale, strict=True)
        return [Chunk(*matrices, flush=False) for matrices in every]

    def over_heads(self) -> "Chunk":
        """Return the chunk with scaled rows and `within` summed over heads, for maps that are sums over heads."""
        within = flushed_(self.scaled(self.within).sum(1, keepdim=True))
        read = self.read if self.scale is None else flushed_(self.scaled(self.read))
        return Chunk(within, read, self.write, self.transition, flush=False)

    def then(self, later: "Chunk") -> "Chunk":
        """Return this chunk and the one after it as one chunk."""
        # `over_heads` sums `within` over heads and keeps them in `read`, so the axis of heads tells the two apart.
        summed = self.within.shape[1] < self.read.shape[1]
        corner = flushed_(_summed(later.read, self.write).unsqueeze(1) if summed else later.read @ self.write)
        upper = torch.cat([self.within, torch.zeros_like(corner).mT], dim=-1)
        scale = None
        if self.scale is not None and later.scale is not None:
            scale = torch.cat([self.scale, later.scale], dim=-1)
        return Chunk(
            within=torch.cat([upper, torch.cat([corner, later.within], dim=-1)], dim=-2),
            read=torch.cat([self.read, self.retreat(later.read.mT).mT], dim=-2),
            write=torch.cat([later.advance(self.write), later.write], dim=-1),
            transition=later.advance(self.transition),
            scale=scale,
            flush=False,
        )


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return consecutive chunks as one: neighbours are joined first, so that both halves have about the same size."""
    while len(chunks) > 1:
        pairs = [earlier.then(later) for earlier, later in zip(chunks[::2], chunks[1::2], strict=False)]
        chunks = [*pairs, *chunks[len(chunks) // 2 * 2 :]]
    return chunks[0]


def with_diagonal(
    matrix: Float[Tensor, "batch head state state"], diagonal: Float[Tensor, "batch head state_or_1"]
) -> Float[Tensor, "batch head state state"]:
    """Return a matrix that no other operation has read with `diagonal` added to its diagonal."""
    matrix.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return matrix


@dataclass(frozen=True, eq=False)
class Reading:
    """The rows of a chunk in a memory's matrix, as factors; all columns after the chunk are zero.

    Attributes:
        states: (batch, head, state, col), the columns before the chunk as states at its beginning.
        chunk: the chunk of the rows; that of `Chunk.over_heads` for sums over heads.
        keys: number of columns of the matrix.
    """

    states: Float[Tensor, "batch head state col"]
    chunk: Chunk
    keys: int

    def block(self, row: slice, cols: slice) -> Float[Tensor, "batch head row col"]:
        """Return a block of rows and columns for every head."""
        first, last, _ = cols.indices(self.keys)
        # `states` covers the columns before the chunk, `within` those of the chunk: with 64 earlier columns, columns
        # 60 to 69 are the last 4 of the one and the first 6 of the other.
        begun = self.states.shape[-1]
        earlier = self.chunk.read[:, :, row] @ self.states[..., first:last]
        within = self.chunk.within[:, :, row, max(first - begun, 0) : max(last - begun, 0)]
        return self.chunk.scaled(_padded([earlier, within], last - first), row)

    def over_heads(self, row: slice) -> Float[Tensor, "batch row key"]:
        """Return rows summed over heads, by a product whose inner dimension is (head, state)."""
        earlier = _summed(self.chunk.read[:, :, row], self.states)
        return _padded([earlier, self.chunk.within[:, 0, row]], self.keys)


def _summed(
    read: Float[Tensor, "batch head row state"], states: Float[Tensor, "batch head state col"]
) -> Float[Tensor, "batch row col"]:
    """Return the sum over heads of read states, as one product."""
    return read.transpose(1, 2).flatten(2) @ states.flatten(1, 2)


def _padded(blocks: Sequence[Tensor], width: int) -> Tensor:
    """Concatenate columns and pad them with zeros to `width`, in one copy."""
    rest = width - sum(block.shape[-1] for block in blocks)
    return torch.cat([*blocks, blocks[-1].new_zeros(*blocks[-1].shape[:-1], rest)], dim=-1)


def fill(
    chunks: Iterable[Chunk], start: int, row: Int[Tensor, " row"], col: Int[Tensor, " col"]
) -> Float[Tensor, "batch head row col"]:
    """Fill a block of a memory's matrix, passing each column from chunk to chunk as a state.

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
        block = chunk.scaled(torch.cat([chunk.read[:, :, i] @ state, chunk.within[:, :, i][..., j]], dim=-1), i)
        blocks.append(functional.pad(block, (0, len(col) - block.shape[-1])))
        state = torch.cat([chunk.advance(state), chunk.write[..., j]], dim=-1)
        start = stop
    filled = torch.cat(blocks, dim=2)
    return functional.pad(filled, (0, 0, len(row) - filled.shape[2], 0))
