"""Substep: the part of a memory with several writes per token that comes from one of these writes."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import InputError
from unilinattn.kernels.scan.chunks import Chunk, joined
from unilinattn.memory import parts
from unilinattn.mixers.base import ALL, CoreMixer
from unilinattn.mixers.chunked import Chunked


class Substep(Chunked):
    """A memory with `count` sub-steps per token, written at sub-step `index` and read after the last one.

    alpha_ij = A[count i + count - 1, count j + index], where A is the matrix of the expanded sequence. Serves gated
    delta product (DeltaProduct; Siems et al., NeurIPS 2025), whose sub-steps have separate keys, strengths and values:
    the layer is the sum over `index` of one chain per sub-step, from the value projection of that sub-step through
    this mixer.

    Args:
        mixer: the `Chunked` of the expanded sequence, in which the sub-steps of a token are consecutive; in gated delta
            product the first sub-step has the token's decay and the last one its query.
        count: number of sub-steps per token.
        index: sub-step of the values, from 0.
    """

    structure = "substeps"

    def __init__(self, mixer: CoreMixer, count: int, index: int) -> None:
        """Raise `InputError` for a mixer that is no `Chunked`, and a count or an index that does not fit it."""
        if not isinstance(mixer, Chunked):
            raise InputError(
                f"sub-steps of {type(mixer).__name__} are not defined; a causal memory that is computed chunk by chunk "
                "is needed, such as DeltaRule."
            )
        length = mixer.shape[3]
        if count < 1 or length % count or not 0 <= index < count:
            raise InputError(
                f"sub-step {index} of {count} does not fit a mixer of {length} tokens; the length needs to be a "
                "multiple of the count, and the index lies from 0 to count - 1."
            )
        self.mixer, self.count, self.index = mixer, count, index
        # A chunk of tokens is `count` chunks of the expanded sequence.
        self.steps, self.tokens = count, mixer.tokens  # type: ignore[misc]  # varies by object

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length), in whole tokens."""
        batch, heads, length, _ = self.mixer.shape
        return batch, heads, length // self.count, length // self.count

    @property
    def query(self) -> Tensor | None:
        """The query of each token's last sub-step, None if the expanded mixer has none."""
        query = getattr(self.mixer, "query", None)
        return None if query is None else query[:, self.count - 1 :: self.count]

    def with_query(self, query: Float[Tensor, "batch length group state"]) -> "Substep":
        """Read the expanded mixer's memory after each token's last sub-step with another query."""
        steps = functional.pad(query.unsqueeze(2), (0, 0, 0, 0, self.count - 1, 0)).flatten(1, 2)
        return Substep(self.mixer.with_query(steps), self.count, self.index)

    @property
    def chunk_factors(self) -> tuple[Tensor, ...]:
        """The factors of the expanded mixer."""
        return self.mixer.chunk_factors

    def factors_by_chunk(self, chunks: slice = ALL) -> list[tuple[Tensor, ...]]:
        """Return the factors of `count` chunks of the expanded sequence for each chunk of tokens."""
        first, last, _ = chunks.indices(-(-self.shape[2] // self.tokens))
        expanded = self.mixer.factors_by_chunk(slice(first * self.count, last * self.count))
        return [sum(expanded[start : start + self.count], ()) for start in range(0, len(expanded), self.count)]

    def chunk(self, factors: Sequence[Tensor], heads: slice = ALL) -> Chunk:
        """Return the matrices of the expanded chunks: reads of each last sub-step, and writes of sub-step `index`."""
        width = len(self.chunk_factors) + 2 * bool(self.mixer.boundaries)
        expanded = [factors[start : start + width] for start in range(0, len(factors), width)]
        chunk = joined([self.mixer.chunk(each, heads) for each in expanded])
        # With 3 sub-steps, token 1 is the sub-steps 3, 4 and 5: it reads after sub-step 5, and `index` 0 writes at 3.
        last, written = slice(self.count - 1, None, self.count), slice(self.index, None, self.count)
        return Chunk(
            within=chunk.within[:, :, last, written],
            read=chunk.read[:, :, last],
            write=chunk.write[..., written],
            transition=chunk.transition,
            scale=None if chunk.scale is None else chunk.scale[:, :, last],
        )

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return the weight of each token on itself, from square blocks, because it lies off the expanded diagonal."""
        squares = [self.tile(tokens, tokens) for tokens in parts(self.shape[2], self.tokens)]
        return torch.cat([square.diagonal(dim1=-2, dim2=-1) for square in squares], dim=-1)
