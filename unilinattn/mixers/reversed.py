"""Reversed: a mixer seen in a mirror of time, the second direction of a bidirectional layer."""

from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.mixers.base import ALL, CoreMixer


class Reversed(CoreMixer):
    """Another mixer's matrix flipped on both axes: alpha_ij = A[L - 1 - i, L - 1 - j] (ViM; Zhu et al., 2024).

    The inner mixer's factors stand in its own, reversed order of tokens: token 0 is the sequence's last. Every
    operation costs what the inner mixer's does.

    Args:
        mixer: the mixer of the reversed sequence; a causal one makes an anti-causal one.
    """

    causal = False

    def __init__(self, mixer: CoreMixer) -> None:
        """Hold the mixer of the reversed sequence."""
        self._mixer = mixer
        self.structure = f"reversed {mixer.structure}"  # type: ignore[misc]  # per object here
        self.data_controlled = mixer.data_controlled  # type: ignore[misc]  # per object here

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        return self._mixer.shape

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Reverse time, mix, reverse time back."""
        return self._mixer.apply(value.flip(1)).flip(1)

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Reverse time, apply the transpose, reverse time back."""
        return self._mixer.adjoint(grad.flip(1)).flip(1)

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Take the mirrored rows and mirror their keys."""
        return self._mixer.rows(self.shape[2] - 1 - index).flip(-1)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Fill the mirrored block and mirror it."""
        _, _, queries, keys = self.shape
        return self._mixer.tile(_mirrored(rows, queries), _mirrored(cols, keys), heads).flip(-2, -1)

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return the inner diagonal from its end."""
        return self._mixer.diagonal().flip(-1)

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._mixer._like(shape)


def _mirrored(part: slice, length: int) -> slice:
    """Return the slice, in ascending order, of the positions that mirror a slice's."""
    positions = range(length)[part]
    return slice(length - 1 - positions[-1], length - positions[0], positions.step) if positions else slice(0, 0)
