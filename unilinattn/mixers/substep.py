"""Substep: the part of a memory with several writes per token that comes from one of these writes."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import InputError
from unilinattn.kernels.scan.tiled import CHUNK
from unilinattn.memory import parts
from unilinattn.mixers.base import ALL, CoreMixer


class Substep(CoreMixer):
    """A mixer of a sequence with `count` sub-steps per token, written at sub-step `index` and read after the last one.

    alpha_ij = A[count i + count - 1, count j + index], where A is the expanded matrix. Serves gated delta product
    (DeltaProduct; Siems et al., NeurIPS 2025), whose sub-steps have separate keys, strengths and values: the layer is
    the sum over `index` of one chain per sub-step, from the value projection of that sub-step through this mixer.

    `apply` and `adjoint` take one pass of the expanded mixer.

    Args:
        mixer: the mixer of the expanded sequence, in which the sub-steps of a token are consecutive; in gated delta
            product the first sub-step has the token's decay and the last one its query.
        count: number of sub-steps per token.
        index: sub-step of the values, from 0.
    """

    structure = "substeps"

    def __init__(self, mixer: CoreMixer, count: int, index: int) -> None:
        """Raise `InputError` if `count` does not divide the length of `mixer` or `index` is not a sub-step."""
        length = mixer.shape[3]
        if count < 1 or length % count or mixer.shape[2] != length or not 0 <= index < count:
            raise InputError(
                f"sub-step {index} of {count} does not fit a mixer of {mixer.shape[2]} queries and {length} keys; "
                "both need to be the same multiple of the count, and the index lies from 0 to count - 1."
            )
        self.mixer, self.count, self.index = mixer, count, index
        self.causal = mixer.causal  # type: ignore[misc]  # varies by object
        self.data_controlled = mixer.data_controlled  # type: ignore[misc]  # varies by object

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length), in whole tokens."""
        batch, heads, length, _ = self.mixer.shape
        return batch, heads, length // self.count, length // self.count

    @property
    def query(self) -> Tensor | None:
        """The query of each token's last sub-step, None if the expanded mixer has none."""
        query = getattr(self.mixer, "query", None)
        return None if query is None else self._take(query, self.count - 1)

    def with_query(self, query: Float[Tensor, "batch length group state"]) -> "Substep":
        """Read the expanded mixer's memory after each token's last sub-step with another query."""
        return Substep(self.mixer.with_query(self._put(query, self.count - 1)), self.count, self.index)

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Run the expanded mixer on values at sub-step `index`, and read the last sub-step of each token."""
        return self._take(self.mixer.apply(self._put(value, self.index)), self.count - 1)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Run the transposed mixer on vectors at each token's last sub-step, and read sub-step `index`."""
        return self._take(self.mixer.adjoint(self._put(grad, self.count - 1)), self.index)

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Return the rows of the last sub-steps, at the columns of sub-step `index`."""
        return self.mixer.rows(index * self.count + self.count - 1)[..., self.index :: self.count]

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Return every `count`th row and column of the expanded block."""
        return self.mixer.tile(self._expanded(rows, self.count - 1), self._expanded(cols, self.index), heads)

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return the weight of each token on itself, from square blocks, because it lies off the expanded diagonal."""
        squares = [self.tile(part, part) for part in parts(self.shape[2], CHUNK)]
        return torch.cat([square.diagonal(dim1=-2, dim2=-1) for square in squares], dim=-1)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""
        return self.mixer.zeros(shape)

    def _put(self, x: Float[Tensor, "batch token head channel"], at: int) -> Float[Tensor, "batch step head channel"]:
        steps = functional.pad(x.unsqueeze(2), (0, 0, 0, 0, at, self.count - 1 - at))
        return steps.flatten(1, 2)

    def _take(self, x: Float[Tensor, "batch step head channel"], at: int) -> Float[Tensor, "batch token head channel"]:
        return x[:, at :: self.count]

    def _expanded(self, part: slice, at: int) -> slice:
        tokens = range(self.shape[2])[part]
        first = tokens.start * self.count + at
        return slice(first, first + len(tokens) * tokens.step * self.count, tokens.step * self.count)
