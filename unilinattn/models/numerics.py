"""What the reference models compute with: at least float32, complex numbers from real parameters, convolution."""

import torch
from jaxtyping import Complex, Float, Inexact
from torch import Tensor


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute a real tensor in: its own, or float32 if that is narrower."""
    return torch.promote_types(tensor.dtype, torch.float32)


def complex_from_pairs(pairs: Float[Tensor, "*shape 2"]) -> Complex[Tensor, "*shape"]:
    """Return the complex numbers whose real and imaginary parts stand on the last axis, in complex64 at least."""
    return torch.view_as_complex(pairs.to(working_dtype(pairs)).contiguous())


def powers(base: Inexact[Tensor, "*shape"], length: int) -> Inexact[Tensor, "*shape length"]:
    """Return base^0, base^1, ..., base^(length - 1) along a new last axis."""
    # A running product, for torch's complex power of zero to zero is NaN.
    ones = torch.ones_like(base)[..., None]
    return torch.cat([ones, base[..., None].expand(*base.shape, length - 1)], dim=-1).cumprod(-1)


def causal_convolution(
    signal: Inexact[Tensor, "*#channels length"], kernel: Inexact[Tensor, "*#channels length"]
) -> Inexact[Tensor, "*channels length"]:
    """Return y_i = sum over j <= i of kernel_{i-j} signal_j along the last axis; the other axes broadcast.

    One fast Fourier transform, padded to twice the length so that the end does not wrap onto the start. Both
    tensors are real or both are complex, in the dtype that the result is wanted in.
    """
    length = signal.shape[-1]
    if signal.is_complex():
        spectrum = torch.fft.fft(signal, n=2 * length) * torch.fft.fft(kernel, n=2 * length)
        return torch.fft.ifft(spectrum, n=2 * length)[..., :length]
    spectrum = torch.fft.rfft(signal, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
    return torch.fft.irfft(spectrum, n=2 * length)[..., :length]
