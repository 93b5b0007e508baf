"""Chunked: what every causal memory shares whose chunks are four small matrices a head."""

from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.reduced_map.dense import Taps, reduced
from unilinattn.kernels.scan.chunks import Chunk, backward, fill, forward
from unilinattn.kernels.scan.tiled import CHUNK
from unilinattn.mixers.base import ALL, Block, CoreMixer, Cost


class Chunked(CoreMixer):
    """A causal memory, linear in its values, given by its chunks of tokens.

    A subclass gives `chunk`, `diagonal` and its shape. `apply`, `adjoint` and `rows` then take time linear in
    length, and `tile` time linear in its columns' distance to its rows; each holds one chunk's matrices at a time.
    """

    causal = True
    data_controlled = True

    @abstractmethod
    def chunk(self, tokens: slice, heads: slice = ALL) -> Chunk:
        """Return the matrices of some heads for one of the chunks that `CHUNK` cuts the sequence into."""

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Run the memory forward in time, chunk by chunk."""
        return forward((self.chunk(tokens) for tokens in self._chunks()), value)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the memory backward in time, chunk by chunk."""
        return backward((self.chunk(tokens) for tokens in reversed(self._chunks())), grad)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Fill a block column by column, each carried as a state from its own chunk to the last row's."""
        batch, total, length, _ = self.shape
        row, col = range(length)[rows], range(length)[cols]
        if not row or not col or col[0] > row[-1]:
            return self._like((batch, len(range(total)[heads]), len(row), len(col)))
        touched = [tokens for tokens in self._chunks() if tokens.stop > col[0] and tokens.start <= row[-1]]
        device = self._like(()).device
        return fill(
            (self.chunk(tokens, heads) for tokens in touched),
            touched[0].start,
            torch.tensor(row, device=device),
            torch.tensor(col, device=device),
        )

    def blocks(self, rows: int) -> Iterator[tuple[slice, Block]]:
        """Yield blocks of at most one chunk of rows; each column's state is carried from chunk to chunk, once."""
        state: Tensor | None = None
        for tokens in self._chunks():
            chunk = self.chunk(tokens)
            state = chunk.write[..., :0] if state is None else state
            for start in range(tokens.start, tokens.stop, rows):
                part = slice(start, min(start + rows, tokens.stop))
                yield part, partial(_block, chunk, state, tokens.start, self.shape[3], part)
            state = torch.cat([chunk.advance(state), chunk.write], dim=-1)

    def reduced_rows(
        self, rows: int, left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Float[Tensor, "batch row key"]]:
        """Yield sum_c left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c], exactly so many rows i at a time."""
        held: list[Tensor] = []
        for part, block in self.blocks(min(rows, CHUNK)):
            found = reduced(block(ALL), part, left, taps)
            while found.shape[1]:
                room = rows - sum(t.shape[1] for t in held)
                held.append(found[:, :room])
                found = found[:, room:]
                ended = part.stop == self.shape[2] and not found.shape[1]
                if ended or sum(t.shape[1] for t in held) == rows:
                    yield torch.cat(held, dim=1)
                    held = []

    @property
    def carried_size(self) -> int:
        """How many numbers `blocks` carries: a state for every column, its successor, and a chunk as it is made."""
        batch, heads, _, keys = self.shape
        return 2 * batch * heads * keys * self.state_size + self._making

    @cached_property
    def state_size(self) -> int:
        """How many numbers a head remembers of a channel: the inner dimension of a chunk's matrices."""
        return self.chunk(self._chunks()[0], slice(0, 1)).read.shape[-1]

    def pass_cost(self, channels: int) -> Cost:
        """Return what `apply` or `adjoint` costs: the matrices of one chunk and of its making."""
        batch, heads, length, _ = self.shape
        chunk, state = min(CHUNK, length), self.state_size
        each = chunk * chunk + 5 * chunk * state + state * state + channels * (chunk + 3 * state)
        return Cost(2 * batch * length * heads * channels + self._making, batch * length * heads * each)

    def map_operations(self, channels: int) -> int:
        """Return how much `reduced_rows` multiplies: every column's state through every chunk after it."""
        batch, heads, length, _ = self.shape
        chunk, state = min(CHUNK, length), self.state_size
        carried = state * (state + chunk) // chunk + 1
        weighed = length * (channels + heads) if channels > 1 else 0
        return batch * length * (length * heads * carried // 2 + weighed) + self.pass_cost(0).operations

    def reduced_size(self, rows: int, channels: int) -> int:
        """Return how many numbers `reduced_rows` holds: a block of heads, and a state for every column."""
        batch, heads, _, keys = self.shape
        return batch * keys * (2 * heads * min(rows, CHUNK) + 2 * rows) + self.carried_size

    @property
    def _making(self) -> int:
        """How many numbers the matrices of one chunk take while they are made."""
        batch, heads, length, _ = self.shape
        chunk = min(CHUNK, length)
        return 8 * batch * heads * chunk * (chunk + self.state_size)

    def _chunks(self) -> list[slice]:
        length = self.shape[2]
        return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]


def _block(
    chunk: Chunk, state: Float[Tensor, "batch head state col"], start: int, keys: int, part: slice, cols: slice
) -> Float[Tensor, "batch head row wanted"]:
    """Return rows of a chunk, for columns that stand in the state before it and in the chunk itself."""
    first, last, _ = cols.indices(keys)
    row = slice(part.start - start, part.stop - start)
    before = chunk.read[:, :, row] @ state[..., first : min(last, start)]
    within = chunk.within[:, :, row, max(first - start, 0) : max(last - start, 0)]
    block = torch.cat([before, within], dim=-1)
    return torch.nn.functional.pad(block, (0, last - first - block.shape[-1]))
