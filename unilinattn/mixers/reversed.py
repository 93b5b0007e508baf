"""Reversed: a mixer of the time-reversed sequence, such as the second direction of a bidirectional layer."""

from collections.abc import Iterator

from jaxtyping import Inexact, Int
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.reduced_map.dense import Taps
from unilinattn.memory import parts
from unilinattn.mixers.base import ALL, CoreMixer


class Reversed(CoreMixer):
    """The matrix A of another mixer, flipped on both axes: alpha_ij = A[L - 1 - i, L - 1 - j] (ViM; Zhu et al., 2024).

    Every operation costs as much as the inner mixer's.

    Args:
        mixer: the mixer of the reversed sequence, whose token 0 is the last token; if it is causal, the result is
            anti-causal.
    """

    causal = False

    def __init__(self, mixer: CoreMixer) -> None:
        """Wrap a mixer of the reversed sequence."""
        self.mixer = mixer
        self.structure = f"reversed {mixer.structure}"  # type: ignore[misc]  # varies by object
        self.data_controlled = mixer.data_controlled  # type: ignore[misc]  # varies by object

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        return self.mixer.shape

    @property
    def query(self) -> Tensor | None:
        """The inner mixer's query in the order of the tokens, None if it has none."""
        query = getattr(self.mixer, "query", None)
        return None if query is None else query.flip(1)

    def with_query(self, query: Inexact[Tensor, "batch length group state"]) -> "Reversed":
        """Read the inner mixer's memory with another query."""
        return Reversed(self.mixer.with_query(query.flip(1)))

    def apply(self, value: Inexact[Tensor, "batch key head channel"]) -> Inexact[Tensor, "batch query head channel"]:
        """Reverse time, mix, reverse time back."""
        return self.mixer.apply(value.flip(1)).flip(1)

    def adjoint(self, grad: Inexact[Tensor, "batch query head channel"]) -> Inexact[Tensor, "batch key head channel"]:
        """Reverse time, apply the transpose, reverse time back."""
        return self.mixer.adjoint(grad.flip(1)).flip(1)

    def rows(self, index: Int[Tensor, "batch row"]) -> Inexact[Tensor, "batch head row key"]:
        """Return the mirrored rows with their keys reversed."""
        return self.mixer.rows(self.shape[2] - 1 - index).flip(-1)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Inexact[Tensor, "batch head row col"]:
        """Return the mirrored block with both axes reversed."""
        _, _, queries, keys = self.shape
        return self.mixer.tile(_mirrored(rows, queries), _mirrored(cols, keys), heads).flip(-2, -1)

    def reduced_rows(
        self, rows: int, left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Inexact[Tensor, "batch row key"]]:
        """Yield the map of `CoreMixer.reduced_rows`: mirrored blocks of the inner mixer, for each lag."""
        _, _, queries, keys = self.shape
        reading = None if left is None else left.flip(1)
        # A tap that lands later lands earlier in the reversed sequence, so each lag is a map without lag, shifted.
        by_lag = {0: None} if taps is None else {lag: {0: tap.flip(1)} for lag, tap in taps.items()}
        for tokens in parts(queries, rows):
            total: Tensor | None = None
            for lag, landing in by_lag.items():
                (block,) = self.mixer.reduced_parts([_mirrored(tokens, queries)], reading, landing)
                landed = functional.pad(block.flip(1, 2)[..., lag:], (0, min(lag, keys)))
                total = landed if total is None else total.add_(landed)
            assert total is not None
            yield total

    def diagonal(self) -> Inexact[Tensor, "batch head length"]:
        """Return the inner diagonal in reverse order."""
        return self.mixer.diagonal().flip(-1)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""
        return self.mixer.zeros(shape)


def _mirrored(tokens: slice, length: int) -> slice:
    """Return a slice, in ascending order, of the mirror images of a slice's positions."""
    positions = range(length)[tokens]
    return slice(length - 1 - positions[-1], length - positions[0], positions.step) if positions else slice(0, 0)
