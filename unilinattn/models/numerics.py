"""Numerics of the reference models: working dtype, complex numbers from real parameters, causal convolution."""

import torch
from jaxtyping import Complex, Float, Inexact
from torch import Tensor


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which to compute with a real tensor: its dtype, or float32 if that is narrower."""
    return torch.promote_types(tensor.dtype, torch.float32)


def complex_from_pairs(pairs: Float[Tensor, "*shape 2"]) -> Complex[Tensor, "*shape"]:
    """Return the complex numbers with the real and imaginary parts on the last axis, in complex64 at least."""
    return torch.view_as_complex(pairs.to(working_dtype(pairs)).contiguous())


def powers(base: Inexact[Tensor, "*shape"], length: int) -> Inexact[Tensor, "*shape length"]:
    """Return base^0, base^1, ..., base^(length - 1) along a new last axis."""
    # A running product, because torch's complex power 0^0 is NaN.
    ones = torch.ones_like(base)[..., None]
    return torch.cat([ones, base[..., None].expand(*base.shape, length - 1)], dim=-1).cumprod(-1)


def causal_convolution(
    signal: Inexact[Tensor, "*#channels length"], kernel: Inexact[Tensor, "*#channels length"]
) -> Inexact[Tensor, "*channels length"]:
    """Return y_i = sum over j <= i of kernel_{i-j} signal_j along the last axis; the other axes broadcast.

    Computed by a fast Fourier transform, zero-padded to twice the length so that the end does not wrap onto the start.
    Both tensors are real or both are complex, in the dtype of the result.
    """
    length = signal.shape[-1]
    if signal.is_complex():
        spectrum = torch.fft.fft(signal, n=2 * length) * torch.fft.fft(kernel, n=2 * length)
        return torch.fft.ifft(spectrum, n=2 * length)[..., :length]
    spectrum = torch.fft.rfft(signal, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
    return torch.fft.irfft(spectrum, n=2 * length)[..., :length]


def convolution_with_skip(
    x: Float[Tensor, "batch length channel"], kernel: Float[Tensor, "channel length"], skip: Float[Tensor, " channel"]
) -> Float[Tensor, "batch channel length"]:
    """Return K * x + D x for a kernel K and a skip D of each channel, in the dtype of the kernel."""
    u = x.transpose(1, 2).to(kernel.dtype)
    return causal_convolution(u, kernel) + skip.to(kernel.dtype)[:, None] * u
