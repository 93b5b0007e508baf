"""Chunked: what every causal memory shares whose chunks are four small matrices a head."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unilinattn.kernels.reduced_map.dense import Taps, reduced
from unilinattn.kernels.scan.chunks import Chunk, Reading, fill
from unilinattn.kernels.scan.pairs import LEAF
from unilinattn.kernels.scan.tiled import CHUNK, cut
from unilinattn.mixers.base import ALL, Block, CoreMixer, Cost

KEPT = 8192
"""Tokens up to which a pass that will be differentiated keeps the matrices of all of its chunks."""

WAIT = 4
"""Chunks whose transitions are multiplied before the states of all columns before them are carried."""


class Chunked(CoreMixer):
    """A causal memory, linear in its values, given by its chunks of tokens.

    A subclass gives `_factors`, `chunk`, `diagonal` and its shape. `apply`, `adjoint` and `rows` then take time
    linear in length, and `tile` time linear in its columns' distance to its rows; each holds one chunk's matrices at
    a time, in the gradients of a long pass too.
    """

    causal = True
    data_controlled = True

    @property
    @abstractmethod
    def _factors(self) -> tuple[Float[Tensor, "batch length *rest"], ...]:
        """What `chunk` takes, of all tokens."""

    @abstractmethod
    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Return the matrices of some heads for one of the chunks that `CHUNK` cuts the sequence into."""

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Run the memory forward in time, chunk by chunk."""
        return torch.cat(self._pass(Chunk.forward, value, 1), dim=1)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the memory backward in time, chunk by chunk."""
        return torch.cat(self._pass(Chunk.backward, grad, -1)[::-1], dim=1)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Fill a block column by column, each carried as a state from its own chunk to the last row's."""
        batch, total, length, _ = self.shape
        row, col = range(length)[rows], range(length)[cols]
        if not row or not col or col[0] > row[-1]:
            return self._like((batch, len(range(total)[heads]), len(row), len(col)))
        first, last = col[0] // CHUNK, row[-1] // CHUNK
        device = self._like(()).device
        return fill(
            (self.chunk(factors, heads) for factors in self._pieces(slice(first, last + 1))),
            first * CHUNK,
            torch.tensor(row, device=device),
            torch.tensor(col, device=device),
        )

    def blocks(self, rows: int) -> Iterator[tuple[slice, Block]]:
        """Yield blocks of at most one chunk of rows; each column's state is carried from chunk to chunk, once."""
        for part, reading, row in self._readings(rows):
            yield part, partial(reading.block, row)

    def reduced_rows(
        self, rows: int, left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Float[Tensor, "batch row key"]]:
        """Yield sum_c left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c], exactly so many rows i at a time."""
        held: list[Tensor] = []
        plain = left is None and taps is None
        for part, reading, row in self._readings(min(rows, CHUNK)):
            found = reading.over_heads(row) if plain else reduced(reading.block(row, ALL), part, left, taps)
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
        """How many numbers `blocks` carries: states of every column, their successors, and a chunk as it is made."""
        batch, heads, _, keys = self.shape
        return 2 * batch * heads * keys * self.state_size + self._making

    @cached_property
    def state_size(self) -> int:
        """How many numbers a head remembers of a channel: the inner dimension of a chunk's matrices."""
        return self.chunk(self._pieces(slice(0, 1))[0], slice(0, 1)).read.shape[-1]

    def pass_cost(self, channels: int) -> Cost:
        """Return what `apply` or `adjoint` costs: the matrices of one chunk and of its making."""
        batch, heads, length, _ = self.shape
        chunk, state = min(CHUNK, length), self.state_size
        solved = chunk * (chunk + state) // 2
        each = solved + 4 * chunk * state + state * state + channels * (chunk + 3 * state)
        return Cost(2 * batch * length * heads * channels + self._making, batch * length * heads * each)

    def map_operations(self, channels: int) -> int:
        """Return how much `reduced_rows` multiplies: every column's state through every chunk after it."""
        batch, heads, length, _ = self.shape
        chunk, state = min(CHUNK, length), self.state_size
        carried = state * (state + WAIT * chunk) // (WAIT * chunk) + 1
        weighed = length * (channels + heads) if channels > 1 else 0
        return batch * length * (length * heads * carried // 2 + weighed) + self.pass_cost(0).operations

    def reduced_size(self, rows: int, channels: int) -> int:
        """Return how many numbers `reduced_rows` holds: states, and a chunk as it is made or a block as it is read.

        Every head's block is there where heads are weighed apart.
        """
        batch, heads, _, keys = self.shape
        apart = heads if channels > 1 else 1
        block = batch * keys * (2 * apart * min(rows, CHUNK) + 2 * rows)
        return self.carried_size + max(0, block - self._making // 2)

    @property
    def _making(self) -> int:
        """How many numbers the matrices of one chunk take while they are made."""
        batch, heads, length, _ = self.shape
        chunk, state = min(CHUNK, length), self.state_size
        decay = getattr(self, "_log_decay", None)
        # Decays of their own for every coordinate are multiplied out in small blocks.
        fine = LEAF * state if decay is not None and decay.ndim == 4 and decay.shape[-1] > 1 else 0
        return batch * heads * chunk * (8 * (chunk + state) + fine)

    def _pieces(self, chunks: slice = ALL) -> list[tuple[Tensor, ...]]:
        """Cut the factors of some chunks, all at once: the gradient of each single slice is as long as all."""
        first, last, _ = chunks.indices(len(self._chunks()))
        return cut(CHUNK, *(factor[:, first * CHUNK : last * CHUNK] for factor in self._factors))

    def _pass(
        self, step: Callable[[Chunk, Tensor | None, Tensor], tuple[Tensor, Tensor]], vectors: Tensor, order: int
    ) -> list[Tensor]:
        """Carry a state through the chunks in an order, and return what each chunk makes of it and of its vectors."""

        def run(state: Tensor | None, vector: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            return step(self.chunk(factors), state, vector)

        # The matrices of a long pass are made again when its gradient needs them: states alone are kept.
        again = torch.is_grad_enabled() and vectors.shape[1] > KEPT
        outputs, state = [], None
        for vector, factors in list(zip(vectors.split(CHUNK, dim=1), self._pieces(), strict=True))[::order]:
            if again:
                found, state = checkpoint(run, state, vector, factors, use_reentrant=False, preserve_rng_state=False)
            else:
                found, state = run(state, vector, factors)
            outputs.append(found)
        return outputs

    def _readings(self, rows: int) -> Iterator[tuple[slice, Reading, slice]]:
        """Yield at most so many rows of a chunk, the chunk as they read it, and where they stand in it.

        Near columns are carried through each chunk. The others wait for the product of `WAIT` chunks' transitions.
        """
        batch, heads, _, keys = self.shape
        none = self._like((batch, heads, self.state_size, 0))
        unmoved = torch.diag_embed(self._like((batch, heads, self.state_size)) + 1)
        far, near, crossed = none, none, unmoved
        for number, (tokens, factors) in enumerate(zip(self._chunks(), self._pieces(), strict=True)):
            if number % WAIT == 0:
                far, near, crossed = torch.cat([crossed @ far, near], dim=-1), none, unmoved
            chunk = self.chunk(factors)
            reading = Reading(((chunk.read @ crossed, far), (chunk.read, near)), chunk.within, keys)
            for start in range(tokens.start, tokens.stop, rows):
                part = slice(start, min(start + rows, tokens.stop))
                yield part, reading, slice(part.start - tokens.start, part.stop - tokens.start)
            near, crossed = torch.cat([chunk.advance(near), chunk.write], dim=-1), chunk.advance(crossed)

    def _chunks(self) -> list[slice]:
        length = self.shape[2]
        return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
