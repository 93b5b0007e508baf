"""Chunked: what every causal memory shares whose chunks are four small matrices a head."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unilinattn.kernels.reduced_map.dense import Taps, reduced
from unilinattn.kernels.scan.chunks import Chunk, Reading, fill, held_elements
from unilinattn.kernels.scan.tiled import CHUNK, cut
from unilinattn.kernels.subnormal import flushed_
from unilinattn.memory import allowed
from unilinattn.mixers.base import ALL, Block, CoreMixer

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
        return self._by_parts(lambda part: torch.cat(self._pass(Chunk.forward, value[:, :, part], 1, part), dim=1))

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the memory backward in time, chunk by chunk."""
        return self._by_parts(
            lambda part: torch.cat(self._pass(Chunk.backward, grad[:, :, part], -1, part)[::-1], dim=1)
        )

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Fill a block column by column, each carried as a state from its own chunk to the last row's."""
        batch, total, length, _ = self.shape
        row, col = range(length)[rows], range(length)[cols]
        if not row or not col or col[0] > row[-1]:
            return self._like((batch, len(range(total)[heads]), len(row), len(col)))
        first, last = col[0] // CHUNK, row[-1] // CHUNK
        device = self._like(()).device
        places = [torch.tensor(positions, device=device) for positions in (row, col)]
        parts = [
            fill(
                (self.chunk(factors, part) for factors in self._pieces(slice(first, last + 1))), first * CHUNK, *places
            )
            for part in self._parts(heads)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

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

    @cached_property
    def state_size(self) -> int:
        """Coordinates of the state: the inner dimension of a chunk's matrices."""
        return self.chunk(self._pieces(slice(0, 1))[0], slice(0, 1)).read.shape[-1]

    def making_elements(self, heads: int) -> int:
        """Elements held while one chunk of `heads` heads is made."""
        batch, _, length, _ = self.shape
        decay = getattr(self, "_log_decay", None)
        fine = decay is not None and decay.ndim == 4 and decay.shape[-1] > 1
        return batch * heads * held_elements(min(CHUNK, length), self.state_size, fine)

    def _parts(self, heads: slice = ALL) -> list[slice]:
        """Split heads so that making one chunk of them takes no more than half of what `max_memory` allows."""
        chosen = range(self.heads)[heads]
        step = max(1, allowed() // max(1, 2 * self._like(()).element_size() * self.making_elements(1)))
        parts = [chosen[start : start + step] for start in range(0, max(1, len(chosen)), step)]
        return [slice(part.start, part.stop, part.step) for part in parts]

    def _pieces(self, chunks: slice = ALL) -> list[tuple[Tensor, ...]]:
        """Cut the factors of some chunks, all at once: the gradient of each single slice is as long as all."""
        first, last, _ = chunks.indices(len(self._chunks()))
        return cut(CHUNK, *(factor[:, first * CHUNK : last * CHUNK] for factor in self._factors))

    def _by_parts(self, run: Callable[[slice], Tensor]) -> Tensor:
        """Run a pass for some heads at a time, and put their outputs, whose third axis is the head, side by side."""
        parts = self._parts()
        return run(ALL) if len(parts) == 1 else torch.cat([run(part) for part in parts], dim=2)

    def _pass(
        self,
        step: Callable[[Chunk, Tensor | None, Tensor], tuple[Tensor, Tensor]],
        vectors: Tensor,
        order: int,
        heads: slice,
    ) -> list[Tensor]:
        """Carry a state through the chunks in an order, and return what each chunk makes of it and of its vectors."""

        def run(state: Tensor | None, vector: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            return step(self.chunk(factors, heads), state, vector)

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
                far, near, crossed = torch.cat([flushed_(crossed @ far), near], dim=-1), none, unmoved
            chunk = self.chunk(factors)
            reading = Reading(((flushed_(chunk.read @ crossed), far), (chunk.read, near)), chunk, keys)
            for start in range(tokens.start, tokens.stop, rows):
                part = slice(start, min(start + rows, tokens.stop))
                yield part, reading, slice(part.start - tokens.start, part.stop - tokens.start)
            near, crossed = torch.cat([chunk.advance(near), chunk.write], dim=-1), chunk.advance(crossed)

    def _chunks(self) -> list[slice]:
        length = self.shape[2]
        return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
