"""Toeplitz: alpha_ij = K[i - j], short and long convolutions, the same for every input."""

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Inexact, Int
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.kernels.backend import implementation
from unilinattn.kernels.reduced_map.dense import Taps
from unilinattn.kernels.subnormal import flushed
from unilinattn.kernels.toeplitz_map.tiled import windows
from unilinattn.mixers.base import ALL, CoreMixer, checked_factors

DIRECT_TAPS = 32
"""Most taps of a convolution that is summed tap by tap, which is causal bit for bit; longer ones use the FFT."""


class Toeplitz(CoreMixer):
    """A fixed causal convolution: S4, S4D, DSS and every short convolution (HMA ACL Theorem 1, Eq. 4).

    A complex kernel (S5: tap t of a mode is its decay to the power of t) mixes complex values; `adjoint` is then the
    transpose under the real inner product Re(x* y), which conjugates the taps.

    `apply` and `adjoint` take time O(L taps) per channel up to `DIRECT_TAPS` taps and O(L log L) above; `rows` takes
    O(L). The FFT is causal up to rounding.

    Args:
        kernel: (head, tap); tap t weights the token t steps back. A kernel shorter than the sequence gives a band.
        batch, length: size of the sequences.

    Attributes:
        taps: the kernel, cut to the length.
    """

    structure = "Toeplitz"
    causal = True
    data_controlled = False

    def __init__(self, kernel: Inexact[Tensor, "head tap"], *, batch: int, length: int) -> None:
        """Raise `FactorError` if `kernel` has NaN or infinite entries."""
        (kernel,) = checked_factors(kernel=kernel)
        self.taps = flushed(kernel[:, :length])
        self._kernel = kernel
        self._batch, self._length = batch, length

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        return self._batch, self.taps.shape[0], self._length, self._length

    @property
    def is_short(self) -> bool:
        """Whether the convolution is summed tap by tap."""
        return self.taps.shape[1] <= DIRECT_TAPS

    def apply(self, value: Inexact[Tensor, "batch key head channel"]) -> Inexact[Tensor, "batch query head channel"]:
        """Convolve along time."""
        return self._passed(value, adjoint=False)

    def adjoint(self, grad: Inexact[Tensor, "batch query head channel"]) -> Inexact[Tensor, "batch key head channel"]:
        """Correlate along time."""
        return self._passed(grad, adjoint=True)

    def _passed(self, vectors: Tensor, *, adjoint: bool) -> Tensor:
        if not self.is_short:
            return self._by_fft(vectors, conjugate=adjoint)
        first, *rest = (self.taps.conj() if adjoint else self.taps).unbind(1)
        output = first[:, None] * vectors
        for lag, tap in enumerate(rest, 1):
            earlier, later = slice(self._length - lag), slice(lag, None)
            target, source = (earlier, later) if adjoint else (later, earlier)
            output[:, target].addcmul_(tap[:, None], vectors[:, source])
        return output

    def apply_from(
        self, state: Tensor | None, value: Inexact[Tensor, "batch key head channel"]
    ) -> tuple[Inexact[Tensor, "batch query head channel"], Tensor]:
        """Convolve tokens after the previous values, as many as taps but one; long kernels carry no state."""
        longer, before = self._continued(state, value)
        values = torch.cat([before, value], dim=1)
        size = before.shape[1]
        return longer.apply(values)[:, size:], values[:, values.shape[1] - size :].clone()

    def adjoint_from(
        self, state: Tensor | None, grad: Inexact[Tensor, "batch query head channel"]
    ) -> tuple[Inexact[Tensor, "batch key head channel"], Tensor]:
        """Correlate tokens before the next gradients, as many as taps but one; long kernels carry no state."""
        longer, after = self._continued(state, grad)
        grads = torch.cat([grad, after], dim=1)
        size = after.shape[1]
        return longer.adjoint(grads)[:, : grad.shape[1]], grads[:, :size].clone()

    def _continued(self, state: Tensor | None, vectors: Tensor) -> tuple["Toeplitz", Tensor]:
        """Return the convolution of the tokens and a state, and the state, by default zeros."""
        size = self._kernel.shape[1] - 1
        # A kernel that grows with the number of tokens has other taps in every piece.
        if size >= DIRECT_TAPS or (state is not None and state.shape[1] != size):
            raise UncoveredError(
                f"a convolution with {size + 1} taps carries no state of constant size from one piece of the tokens "
                "to the next, so its layer cannot be computed in pieces; trace without stream_to=."
            )
        if state is None:
            state = vectors.new_zeros(vectors.shape[0], size, *vectors.shape[2:])
        return Toeplitz(self._kernel, batch=self._batch, length=self._length + size), state

    def rows(self, index: Int[Tensor, "batch row"]) -> Inexact[Tensor, "batch head row key"]:
        """Look up K[i - j] for the rows at the positions `index`."""
        lag = index[:, :, None] - torch.arange(self._length, device=self.taps.device)
        taps = self.taps.shape[1]
        inside = (lag >= 0) & (lag < taps)
        return (self.taps[:, lag.clamp(0, taps - 1)] * inside).transpose(0, 1)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Inexact[Tensor, "batch head row col"]:
        """Write K[i - j] for a block, from windows of the kernel."""

        def fill(rows: slice, cols: slice) -> Tensor:
            return windows(self.taps[heads], rows, cols).flip(1).expand(self._batch, -1, -1, -1)

        return self._block(rows, cols, heads, fill)

    def mean_map(self) -> Inexact[Tensor, "batch query key"]:
        """Write the matrix of the mean kernel once."""
        every = slice(0, self._length)
        mean = flushed(self.taps.mean(0, keepdim=True))
        return windows(mean, every, every).expand(self._batch, -1, -1).flip(1)

    def reduced_parts(
        self, blocks: Iterable[slice], left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Inexact[Tensor, "batch row key"]]:
        """Yield `CoreMixer.reduced_parts`; without weights it is the matrix of the sum of the kernels."""
        if left is None and taps is None:
            total = Toeplitz(self.taps.sum(0, keepdim=True), batch=self._batch, length=self._length)
            yield from (total.tile(tokens).squeeze(1) for tokens in blocks)
            return
        kernel = implementation("toeplitz_map", self.taps).toeplitz_rows
        yield from kernel(self.taps, left, taps, batch=self._batch, length=self._length, blocks=blocks)

    def diagonal(self) -> Inexact[Tensor, "batch head length"]:
        """Return K[0] for every token."""
        return self.taps[None, :, :1].expand(self._batch, -1, self._length)

    def _by_fft(self, value: Tensor, *, conjugate: bool) -> Tensor:
        # The product of spectra is a circular convolution: padded to this size, no output wraps around to the start.
        size = self._length + self.taps.shape[1]
        fft, inverse = (torch.fft.fft, torch.fft.ifft) if self.is_complex else (torch.fft.rfft, torch.fft.irfft)
        spectrum = fft(self.taps, n=size).T
        spectrum = spectrum.conj() if conjugate else spectrum
        return inverse(fft(value, n=size, dim=1) * spectrum[None, :, :, None], n=size, dim=1)[:, : self._length]

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""
        return self.taps.new_zeros(shape)
