"""Toeplitz: alpha_ij = K[i - j], the same for every input: convolutions short and long."""

from collections.abc import Iterator

import torch
from jaxtyping import Inexact, Int
from torch import Tensor

from unilinattn.kernels.reduced_map.dense import Taps
from unilinattn.kernels.subnormal import flushed
from unilinattn.mixers.base import ALL, CoreMixer, check_factors

DIRECT_TAPS = 32
"""Up to so many taps are summed shift by shift (bit for bit causal); a longer kernel goes through the FFT."""


class Toeplitz(CoreMixer):
    """A fixed causal convolution: S4, S4D, DSS and every short convolution (HMA ACL Theorem 1, Eq. 4).

    A complex kernel (S5: tap t of a mode is its decay to the power of t) mixes complex values; `adjoint` is then
    the transpose under the real inner product Re(x* y), which conjugates the taps.

    `apply` and `adjoint` take O(L taps) time up to 32 taps and O(L log L) above; `rows` gathers in O(L).
    Through the FFT a future token moves the past by rounding only, not bit for bit by nothing.

    Args:
        kernel: (head, tap), tap t the weight of the token t steps back; fewer taps than tokens make a band.
        batch, length: what the matrix is repeated for.
    """

    structure = "Toeplitz"
    causal = True
    data_controlled = False

    def __init__(self, kernel: Inexact[Tensor, "head tap"], *, batch: int, length: int) -> None:
        """Hold the kernel, cut to the length; raise `FactorError` if it holds NaN or infinity."""
        check_factors(kernel=kernel)
        self._kernel = flushed(kernel[:, :length])
        self._batch, self._length = batch, length

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, length)."""
        return self._batch, self._kernel.shape[0], self._length, self._length

    @property
    def is_short(self) -> bool:
        """Whether the kernel is so short that its taps are worth taking one by one."""
        return self._kernel.shape[1] <= DIRECT_TAPS

    @property
    def taps(self) -> Inexact[Tensor, "head tap"]:
        """The kernel: tap t weighs the token t steps back."""
        return self._kernel

    def apply(self, value: Inexact[Tensor, "batch key head channel"]) -> Inexact[Tensor, "batch query head channel"]:
        """Convolve along time."""
        if not self.is_short:
            return self._by_fft(value, conjugate=False)
        first, *later = self._kernel.unbind(1)
        output = first[:, None] * value
        for lag, tap in enumerate(later, 1):
            output[:, lag:].addcmul_(tap[:, None], value[:, : self._length - lag])
        return output

    def adjoint(self, grad: Inexact[Tensor, "batch query head channel"]) -> Inexact[Tensor, "batch key head channel"]:
        """Correlate along time."""
        if not self.is_short:
            return self._by_fft(grad, conjugate=True)
        first, *later = self._kernel.conj().unbind(1)
        output = first[:, None] * grad
        for lag, tap in enumerate(later, 1):
            output[:, : self._length - lag].addcmul_(tap[:, None], grad[:, lag:])
        return output

    def rows(self, index: Int[Tensor, "batch row"]) -> Inexact[Tensor, "batch head row key"]:
        """Look up K[i - j] for selected rows."""
        return self._lookup(index, ALL, ALL)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Inexact[Tensor, "batch head row col"]:
        """Look up K[i - j]."""
        position = torch.arange(self._length, device=self._kernel.device)[rows]
        return self._lookup(position[None], cols, heads).expand(self._batch, -1, -1, -1)

    def reduced_rows(
        self, rows: int, left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Inexact[Tensor, "batch row key"]]:
        """Yield sum_c left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c]; without weights the kernels are added."""
        if left is not None or taps is not None:
            yield from super().reduced_rows(rows, left, taps)
            return
        total = Toeplitz(self._kernel.sum(0, keepdim=True), batch=self._batch, length=self._length)
        for _, block in total.blocks(rows):
            yield block(ALL).squeeze(1)

    def _lookup(
        self, index: Int[Tensor, "batch row"], cols: slice, heads: slice
    ) -> Inexact[Tensor, "batch head row col"]:
        lag = index[:, :, None] - torch.arange(self._length, device=self._kernel.device)[cols]
        taps = self._kernel.shape[1]
        inside = (lag >= 0) & (lag < taps)
        return (self._kernel[heads][:, lag.clamp(0, taps - 1)] * inside).transpose(0, 1)

    def diagonal(self) -> Inexact[Tensor, "batch head length"]:
        """Return K[0] for every token."""
        return self._kernel[None, :, :1].expand(self._batch, -1, self._length)

    def _by_fft(self, value: Tensor, *, conjugate: bool) -> Tensor:
        size = self._length + self._kernel.shape[1]
        if self._kernel.is_complex():
            spectrum = torch.fft.fft(self._kernel, n=size).T
            spectrum = spectrum.conj() if conjugate else spectrum
            product = torch.fft.fft(value, n=size, dim=1) * spectrum[None, :, :, None]
            return torch.fft.ifft(product, n=size, dim=1)[:, : self._length]
        spectrum = torch.fft.rfft(self._kernel, n=size).T
        spectrum = spectrum.conj() if conjugate else spectrum
        product = torch.fft.rfft(value, n=size, dim=1) * spectrum[None, :, :, None]
        return torch.fft.irfft(product, n=size, dim=1)[:, : self._length]

    def _like(self, shape: tuple[int, ...]) -> Tensor:
        return self._kernel.new_zeros(shape)
