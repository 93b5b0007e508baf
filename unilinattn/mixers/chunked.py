"""`Chunked`, the base class of causal memories that are computed chunk by chunk."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unilinattn.kernels.backend import uses_triton
from unilinattn.kernels.reduced_map.dense import PIECE, Taps, reduced
from unilinattn.kernels.scan.chunks import Chunk, Reading, fill, joined
from unilinattn.kernels.scan.tiled import CHUNK, cut
from unilinattn.memory import allowed, parts
from unilinattn.mixers.base import ALL, Block, CoreMixer, split_heads

KEPT = 8192
"""Longest pass, in tokens, whose chunk matrices are all saved for the backward pass."""

JOINED = 4
"""Tokens of joined chunks per coordinate of the state."""


class Chunked(CoreMixer):
    """A causal memory that is linear in its values.

    A subclass defines `chunk_factors`, `chunk` and `diagonal`. `apply`, `adjoint` and `rows` take time linear in
    length; `tile` takes time linear in the distance from its first column to its last row. Each holds the matrices of
    `side_by_side` chunks at a time, also in the backward pass of a long sequence.
    """

    causal = True
    data_controlled = True
    tokens: ClassVar[int] = CHUNK
    """Tokens of a chunk."""
    pairs: ClassVar[int] = 8
    """Pairs of a matrix (token, token) and one (token, state) that are held while those of a chunk are computed."""
    steps: int = 1
    """Number of steps per token whose factors `chunk` takes."""
    boundaries: Sequence[Float[Tensor, "batch 1 head"]] = ()
    """A factor at each chunk's beginning and at the end, which `chunk` takes after the others; empty for none."""

    @property
    @abstractmethod
    def chunk_factors(self) -> tuple[Float[Tensor, "batch length *rest"], ...]:
        """The factors of all tokens that `chunk` takes for the tokens of one chunk."""

    @abstractmethod
    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Return the matrices of a chunk of `tokens` tokens (the last one may be shorter) for some heads.

        The batch of the factors may hold several chunks of each sequence.
        """

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length), as the last of `chunk_factors` has one entry for each token and head."""
        batch, length, heads = self.chunk_factors[-1].shape[:3]
        return batch, heads, length, length

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""
        return self.chunk_factors[0].new_zeros(shape)

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Run the memory forward in time, chunk by chunk."""
        return self._over_heads(lambda heads: torch.cat(self._pass(Chunk.forward, value, 1, heads), dim=1))

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the transposed memory backward in time, chunk by chunk."""
        return self._over_heads(lambda heads: torch.cat(self._pass(Chunk.backward, grad, -1, heads)[::-1], dim=1))

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Return a block of the matrix; each column is a state that is carried from its chunk to the last row's."""
        batch, total, length, _ = self.shape
        row, col = range(length)[rows], range(length)[cols]
        if not row or not col or col[0] > row[-1]:
            return self.zeros((batch, len(range(total)[heads]), len(row), len(col)))
        first, last = col[0] // self.tokens, row[-1] // self.tokens
        device = self.zeros(()).device
        positions = [torch.tensor(tokens, device=device) for tokens in (row, col)]
        blocks = []
        for some_heads in split_heads(heads, total, self.heads_at_once):
            chunks = self._chunks(slice(first, last + 1), some_heads)
            blocks.append(fill(chunks, first * self.tokens, *positions))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)

    def blocks(self, rows: int) -> Iterator[tuple[slice, Block]]:
        """Yield blocks of at most `rows` rows of one chunk; the state of each column is carried forward once."""
        for tokens, reading, row in self._readings(rows):
            yield tokens, partial(reading.block, row)

    def reduced_rows(
        self, rows: int, left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Float[Tensor, "batch row key"]]:
        """Yield the map of `CoreMixer.reduced_rows` in blocks of `rows` rows."""
        pending: list[Tensor] = []
        plain = left is None and taps is None
        for tokens, reading, row in self._readings(rows if plain else min(rows, PIECE), over_heads=plain):
            if plain:
                block = reading.over_heads(row)
            else:
                block = reduced(reading.block(row, slice(0, tokens.stop)), tokens, left, taps)
                block = functional.pad(block, (0, self.shape[2] - tokens.stop))
            while block.shape[1]:
                missing = rows - sum(t.shape[1] for t in pending)
                pending.append(block[:, :missing])
                block = block[:, missing:]
                ended = tokens.stop == self.shape[2] and not block.shape[1]
                if ended or sum(t.shape[1] for t in pending) == rows:
                    yield pending[0] if len(pending) == 1 else torch.cat(pending, dim=1)
                    pending = []

    def factors_by_chunk(self, chunks: slice = ALL) -> list[tuple[Tensor, ...]]:
        """Cut the factors of consecutive chunks at once, because the gradient of each slice is as long as its base."""
        size = self.tokens
        first, last, _ = chunks.indices(-(-self.shape[2] // size))
        by_chunk = cut(size, *(factor[:, first * size : last * size] for factor in self.chunk_factors))
        if not self.boundaries:
            return by_chunk
        ends = zip(by_chunk, self.boundaries[first:last], self.boundaries[first + 1 : last + 1], strict=True)
        return [(*factors, before, after) for factors, before, after in ends]

    @cached_property
    def state_size(self) -> int:
        """Number of coordinates of a head's state."""
        return self.chunk(self.factors_by_chunk(slice(0, 1))[0], slice(0, 1)).read.shape[-1]

    def making_elements(self, heads: int, chunks: int = 1) -> int:
        """Elements held while the matrices of some chunks are computed for `heads` heads, and joined."""
        batch, _, length, _ = self.shape
        state = self.state_size
        chunk, tokens = min(self.tokens, length), chunks * self.tokens
        making = chunks * self.steps * self.pairs * chunk * (chunk + state)
        joining = 0 if chunks == 1 else 3 * tokens * (tokens + 2 * state)
        return batch * heads * max(making, joining)

    @property
    def chunks_at_once(self) -> int:
        """Number of chunks that are joined before other columns pass them: a power of two.

        A transition then costs a quarter of a reading, if the matrices take at most a quarter of what `max_memory`
        allows.
        """
        chunks, element_bytes = 1, self.zeros(()).element_size()
        while (
            2 * chunks <= min(max(JOINED * self.state_size, CHUNK), self.shape[2]) // self.tokens
            and 4 * element_bytes * self.making_elements(self.heads, 2 * chunks) <= allowed()
        ):
            chunks *= 2
        return chunks

    @property
    def side_by_side(self) -> int:
        """Number of chunks whose matrices are computed at once.

        One on a CPU, whose cache holds them. On a GPU, where each operation costs a launch, as many as take at most a
        quarter of what `max_memory` allows.
        """
        like = self.zeros(())
        if like.device.type == "cpu" and not uses_triton(like):
            return 1
        chunks = max(1, self.shape[2] // self.tokens)
        return max(1, min(chunks, allowed() // (4 * like.element_size() * self.making_elements(self.heads))))

    @property
    def heads_at_once(self) -> int:
        """Number of heads for which computing one chunk takes at most half of the memory that `max_memory` allows."""
        return max(1, allowed() // max(1, 2 * self.zeros(()).element_size() * self.making_elements(1)))

    def _over_heads(self, run: Callable[[slice], Tensor]) -> Tensor:
        """Concatenate the outputs (batch, token, head, channel) of a pass over `heads_at_once` heads at a time."""
        some_heads = split_heads(ALL, self.heads, self.heads_at_once)
        return run(ALL) if len(some_heads) == 1 else torch.cat([run(some) for some in some_heads], dim=2)

    def _pass(
        self,
        step: Callable[[Chunk, Tensor | None, Tensor], tuple[Tensor, Tensor]],
        vectors: Tensor,
        order: int,
        heads: slice,
    ) -> list[Tensor]:
        """Carry a state through the chunks, forward (`order` 1) or backward (-1), and return each chunk's output."""

        def run(state: Tensor | None, vector: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            return step(self.chunk(factors, heads), state, vector)

        # For the gradient of a long pass only the states are saved; its matrices are computed again.
        recompute = torch.is_grad_enabled() and vectors.shape[1] > KEPT
        outputs, state = [], None
        groups = self._groups()
        tokens = [self.tokens * len(group) for group in groups]
        tokens[-1] += self.shape[2] - sum(tokens)
        by_group = vectors[:, :, heads].split(tokens, dim=1)
        for vector, group in list(zip(by_group, groups, strict=True))[::order]:
            factors = _side_by_side(group)
            if recompute:
                output, state = checkpoint(run, state, vector, factors, use_reentrant=False, preserve_rng_state=False)
            else:
                output, state = run(state, vector, factors)
            outputs.append(output)
        return outputs

    def _groups(self, chunks: slice = ALL) -> list[list[tuple[Tensor, ...]]]:
        """Return the factors of consecutive chunks in groups of `side_by_side` chunks of equal length."""
        first, last, _ = chunks.indices(-(-self.shape[2] // self.tokens))
        by_chunk = self.factors_by_chunk(chunks)
        whole = min(last, self.shape[2] // self.tokens) - first
        groups = [by_chunk[span] for span in parts(whole, self.side_by_side)]
        return [*groups, *([each] for each in by_chunk[whole:])]

    def _chunks(self, chunks: slice = ALL, heads: slice = ALL, *, over_heads: bool = False) -> Iterator[Chunk]:
        """Yield the matrices of consecutive chunks, with `over_heads` those of `Chunk.over_heads`."""
        for group in self._groups(chunks):
            made = self.chunk(_side_by_side(group), heads)
            yield from (made.over_heads() if over_heads else made).cut(len(group))

    def _readings(self, rows: int, *, over_heads: bool = False) -> Iterator[tuple[slice, Reading, slice]]:
        """Yield blocks of at most `rows` rows of a chunk: their tokens, their factors, and their rows in the chunk."""
        batch, heads, _, keys = self.shape
        states = self.zeros((batch, heads, self.state_size, 0))
        start = 0
        for chunk in self._joined_chunks(over_heads):
            reading = Reading(states, chunk, keys)
            for row in parts(chunk.within.shape[-1], rows):
                yield slice(start + row.start, start + row.stop), reading, row
            start += chunk.within.shape[-1]
            states = torch.cat([chunk.advance(states), chunk.write], dim=-1)

    def _joined_chunks(self, over_heads: bool) -> Iterator[Chunk]:
        """Yield the chunks in order, `chunks_at_once` joined."""
        chunks, count = self._chunks(over_heads=over_heads), self.chunks_at_once
        while some := list(islice(chunks, count)):
            yield joined(some)


def _side_by_side(group: Sequence[tuple[Tensor, ...]]) -> Sequence[Tensor]:
    """Return the factors of a group of chunks, whose batch holds the chunks of each sequence in order."""
    if len(group) == 1:
        return group[0]
    return [torch.stack(each, dim=1).flatten(0, 1) for each in zip(*group, strict=True)]
