"""Substep: the share of one of several writes that a memory makes at every token."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import InputError
from unilinattn.kernels.scan.tiled import CHUNK
from unilinattn.mixers.base import ALL, CoreMixer


class Substep(CoreMixer):
    """A mixer on a sequence expanded `count` times, read after each token's last sub-step, written at one of them.

    alpha_ij = A[count i + count - 1, count j + index], A the expanded matrix. Serves gated delta product
    (DeltaProduct; Siems et al., NeurIPS 2025), where every sub-step has its own key, strength and value: the layer
    is the sum over `index` of one chain each, from that sub-step's value projection through this mixer.

    `apply` and `adjoint` cost one pass of the expanded mixer.

    Args:
        mixer: the expanded mixer, `count` sub-steps of each token side by side; in gated delta product a token's
            decay stands on its first sub-step and its query on its last.
        count: sub-steps a token.
        index: which of them carries the values, from 0.
    """

    structure = "substeps"

    def __init__(self, mixer: CoreMixer, count: int, index: int) -> None:
        """Hold the expanded mixer; raise `InputError` if its length or the index does not fit the count."""
        length = mixer.shape[3]
        if count < 1 or length % count or mixer.shape[2] != length or not 0 <= index < count:
            raise InputError(
                f"sub-step {index} of {count} does not fit a mixer of {mixer.shape[2]} queries and {length} keys; "
                "both need to be the same multiple of the count, and the index lies from 0 to count - 1."
            )
        self._mixer, self._count, self._index = mixer, count, index
        self.causal = mixer.causal  # type: ignore[misc]  # per object here
        self.data_controlled = mixer.data_controlled  # type: ignore[misc]  # per object here

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length), of whole tokens."""
        batch, heads, length, _ = self._mixer.shape
        return batch, heads, length // self._count, length // self._count

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Put the values on their sub-step, run the expanded mixer, keep what each token's last sub-step reads."""
        return self._keep(self._mixer.apply(self._put(value, self._index)), self._count - 1)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Put the vectors on each token's last sub-step, run backward, keep what reaches the values' sub-step."""
        return self._keep(self._mixer.adjoint(self._put(grad, self._count - 1)), self._index)

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Take the rows of the last sub-steps and the columns of the values' sub-step."""
        return self._mixer.rows(index * self._count + self._count - 1)[..., self._index :: self._count]

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Take every `count`th row and column of the expanded block."""
        return self._mixer.tile(self._expanded(rows, self._count - 1), self._expanded(cols, self._index), heads)

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return each token's weight on its own sub-step, from blocks of tokens along the diagonal."""
        length = self.shape[2]
        # It lies beside the expanded mixer's own diagonal, so blocks are filled and all else in them dropped.
        parts = [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
        return torch.cat([self.tile(part, part).diagonal(dim1=-2, dim2=-1) for part in parts], dim=-1)

    def _put(self, x: Float[Tensor, "batch token head channel"], at: int) -> Float[Tensor, "batch step head channel"]:
        steps = functional.pad(x.unsqueeze(2), (0, 0, 0, 0, at, self._count - 1 - at))
        return steps.flatten(1, 2)

    def _keep(self, x: Float[Tensor, "batch step head channel"], at: int) -> Float[Tensor, "batch token head channel"]:
        return x[:, at :: self._count]

    def _expanded(self, part: slice, at: int) -> slice:
        tokens = range(self.shape[2])[part]
        first = tokens.start * self._count + at
        return slice(first, first + len(tokens) * tokens.step * self._count, tokens.step * self._count)

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._mixer._like(shape)
