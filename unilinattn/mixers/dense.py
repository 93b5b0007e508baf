"""Dense: the matrix itself, such as softmax attention weights."""

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._guards import detect_fake_mode

from unilinattn.kernels.precision import full_precision
from unilinattn.kernels.subnormal import flushed, flushed_, flushed_given
from unilinattn.mixers.base import ALL, CoreMixer, checked_factors

RETAINED = 2**28
"""Most bytes of weights that all mixers which can compute theirs again keep; the one used last keeps its weights."""


class Dense(CoreMixer):
    """Attention weights after the softmax, under any mask, window, sink or soft cap (HMA ACL Eq. 1).

    Every operation takes O(L_query L_key) time per channel.

    Args:
        weights: (batch, head, query, key); subnormal numbers are set to zero, in a copy.
        again: computes the weights again from less memory, such as queries and keys. The mixer then keeps them only
            while it is among those used last, see `RETAINED`; a copy by `copy.deepcopy` keeps them always.
    """

    structure = "dense"
    causal = False
    data_controlled = True

    def __init__(
        self, weights: Float[Tensor, "batch head query key"], *, again: Callable[[], Tensor] | None = None
    ) -> None:
        """Raise `FactorError` if `weights` has NaN or infinite entries."""
        (weights,) = checked_factors(weights=weights)
        batch, heads, queries, keys = weights.shape
        self._shape, self._like = (batch, heads, queries, keys), weights.new_empty(0)
        self._weights: Tensor | None = flushed_given(weights)
        self._again = again
        if again is not None:
            _latest.use(self, self._weights)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and store the weights, not what computes them."""
        return {**vars(self), "_weights": self.weights, "_again": None}

    @property
    def weights(self) -> Float[Tensor, "batch head query key"]:
        """The matrix, computed again if it was released."""
        weights = self._weights
        if self._again is None:
            assert weights is not None
            return weights
        if weights is None and detect_fake_mode() is not None:
            # A run on fake tensors asks for shapes.
            return self._like.new_empty(self._shape)
        if weights is None:
            # A use may be inside of a mode of torch functions, of autocast, or of a graph.
            with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad(), full_precision():
                weights = flushed_given(self._again())
        self._weights = weights
        _latest.use(self, weights)
        return weights

    def release(self) -> None:
        """Drop the weights, if the mixer can compute them again."""
        if self._again is not None:
            self._weights = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        return self._shape

    @cached_property
    def is_lower_triangular(self) -> bool:
        """Whether all weights above the diagonal are zero."""
        return not bool(self.weights.triu(1).any())

    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Multiply by the weights."""
        return torch.einsum("bhij,bjhp->bihp", self.weights, flushed(value))

    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Multiply by the transposed weights."""
        # A product with the transposed matrix on the left takes longer than one with the matrix on the right.
        return (flushed(grad).permute(0, 2, 3, 1) @ self.weights).permute(0, 3, 1, 2)

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Gather rows of the weights."""
        _, heads, _, keys = self.shape
        return self.weights.gather(2, index[:, None, :, None].expand(-1, heads, -1, keys))

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Return a view of a block of the weights."""
        return self.weights[:, heads, rows, cols]

    def mean_map(self) -> Float[Tensor, "batch query key"]:
        """Read the weights once."""
        # The kernel of `sum` is faster than that of `mean`.
        return flushed_(self.weights.sum(1).div_(self.heads))

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return the weight of each token on itself."""
        return self.weights.diagonal(dim1=-2, dim2=-1)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""
        return self._like.new_zeros(shape)


class _Latest:
    """The mixers that keep weights which they could compute again, from the one whose last use is longest ago."""

    def __init__(self) -> None:
        self._bytes: WeakKeyDictionary[Dense, int] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def use(self, mixer: Dense, weights: Tensor) -> None:
        """Note a use, and release the weights of other mixers that exceed `RETAINED`."""
        with self._lock:
            self._bytes.pop(mixer, None)
            self._bytes[mixer] = weights.nbytes
            total = sum(self._bytes.values())
            for other in list(self._bytes):
                if total <= RETAINED or other is mixer:
                    break
                total -= self._bytes.pop(other)
                other.release()


_latest = _Latest()
