"""Rules of convolutions by the Fourier transform: a spectrum of tokens times a frozen one, transformed back.

The product of two spectra of n values is the circular convolution of n values, with the kernel that the frozen spectrum
transforms back to. Tokens are followed by zeros, so that a causal kernel gives a causal convolution.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.mixers import Toeplitz
from unilinattn.operator.stages import Mix
from unilinattn.recording.compilation import Compilation, is_carried, rule
from unilinattn.recording.contraction import Product, contracted
from unilinattn.recording.joins import padded
from unilinattn.recording.layout import Carried
from unilinattn.recording.nodes import Node
from unilinattn.rules.letters import equation_letters

NEW = 100
"""The letter of the axis of the convolution's results."""

FORWARD = ("fft_rfft", "fft_fft")
"""Fourier transforms of real tokens."""


@dataclass(frozen=True)
class _Spectrum:
    """The Fourier transform of `n` values along the last axis, times a frozen spectrum.

    Attributes:
        carried: the values, whose last axis is transformed.
        factor: the frozen spectrum, broadcast to the transform's shape.
        n: number of values, of which those behind the carried ones are zero.
    """

    carried: Carried
    factor: Tensor
    n: int


@rule("fft_irfft")
def inverse(run: Compilation, node: Node, x: Any, n: Any = None, dim: int = -1, norm: str | None = None) -> Carried:
    """Convolve with the kernel of the spectrum that multiplies the tokens'."""
    size = int(n or 2 * (x.value.shape[dim] - 1))
    return _convolved(run, _spectrum(run, x, dim), size, dim, _inverse_scale(norm, size), torch.fft.irfft)


def real_inverse(run: Compilation, node: Node) -> Carried:
    """Return the real part of a spectrum that is transformed back, as `inverse` does."""
    x, n, dim, norm = _arguments(node)
    size = int(n or x.value.shape[dim])
    return _convolved(run, _spectrum(run, x, dim), size, dim, _inverse_scale(norm, size), torch.fft.ifft)


def _arguments(node: Node) -> list[Any]:
    """Return the values, their number, the axis and the norm of a Fourier transform."""
    names = {"n": None, "dim": -1, "norm": None}
    positional = dict(zip(names, node.args[1:], strict=False))
    return [node.args[0], *({**names, **positional, **node.kwargs}[name] for name in names)]


def _spectrum(run: Compilation, node: Node, dim: int) -> _Spectrum:
    """Return a spectrum with its frequencies in the last axis."""
    if node.name in FORWARD:
        return _transformed(run, node, dim)
    if node.name in ("mul", "multiply", "div", "divide", "true_divide"):
        first, second = node.args[:2]
        if is_carried(second) and not node.name.startswith(("div", "true")):
            first, second = second, first
        if isinstance(first, Node) and is_carried(first) and not is_carried(second):
            inner = _spectrum(run, first, dim)
            factor = run.exact(second)
            factor = _last(1 / factor if "div" in node.name else factor, dim, node.value.ndim)
            return _times(inner, factor, node.value.movedim(dim, -1).shape)
    if node.name == "einsum" and isinstance(node.args[0], str):
        return _times_einsum(run, node, dim)
    raise UncoveredError(f"{node.name!r} is applied to a Fourier transform of values that depend on the tokens")


def _transformed(run: Compilation, node: Node, dim: int) -> _Spectrum:
    x, n, axis, norm = _arguments(node)
    count = x.value.ndim
    if axis % count != dim % count or x.value.is_complex():
        raise UncoveredError("a Fourier transform along another axis than that of its inverse")
    carried = run.value(x)
    carried = carried.moved(carried.index.movedim(axis, -1))
    size = int(n or x.value.shape[axis])
    carried = carried if carried.index.shape[-1] <= size else carried.moved(carried.index[..., :size])
    scale = {None: 1.0, "backward": 1.0, "ortho": size**-0.5, "forward": 1 / size}[norm]
    return _Spectrum(carried, run.like.new_full((1,), scale), size)


def _times(inner: _Spectrum, factor: Tensor, shape: torch.Size) -> _Spectrum:
    """Multiply a spectrum by a frozen one that is broadcast to `shape`."""
    index = inner.carried.index
    length = index.shape[-1]
    carried = inner.carried.moved(index.expand(*shape[:-1], length))
    return _Spectrum(carried, inner.factor * factor, inner.n)


def _times_einsum(run: Compilation, node: Node, dim: int) -> _Spectrum:
    """Multiply a spectrum by a frozen one as an einsum says that sums over nothing."""
    terms = [term for term in node.args[1:] if is_carried(term)]
    if len(terms) != 1 or len(node.args) != 3:
        raise UncoveredError("an einsum of several Fourier transforms of values that depend on the tokens")
    number = node.args[1:].index(terms[0])
    factor = run.number(node.args[2 - number])
    names, out = equation_letters(node.args[0], [run.number(term).shape for term in node.args[1:]])
    letters, of_factor = names[number], names[1 - number]
    if not {*letters, *of_factor} <= {*out} or out[dim] not in letters:
        raise UncoveredError("a sum over Fourier transforms of values that depend on the tokens")
    inner = _spectrum(run, terms[0], letters.index(out[dim]))
    last = [x for x in out if x != out[dim]]
    at_last = [x for x in letters if x != out[dim]]
    index = inner.carried.index.permute(*(at_last.index(x) for x in last if x in at_last), -1)
    index = index[tuple(slice(None) if x in at_last else None for x in last)]
    if inner.factor.numel() > 1:
        raise UncoveredError("an einsum of a Fourier transform that is multiplied before")
    order = [of_factor.index(x) for x in (*last, out[dim]) if x in of_factor]
    factor = factor.permute(order)[tuple(slice(None) if x in of_factor else None for x in (*last, out[dim]))]
    shape = node.value.movedim(dim, -1).shape
    return _times(_Spectrum(inner.carried.moved(index), inner.factor, inner.n), factor, shape)


def _last(factor: Tensor, dim: int, count: int) -> Tensor:
    """Return a factor of a tensor of `count` axes with one of them last."""
    return factor.reshape((1,) * (count - factor.ndim) + tuple(factor.shape)).movedim(dim, -1)


def _inverse_scale(norm: str | None, n: int) -> float:
    return {None: 1.0, "backward": 1.0, "ortho": n**0.5, "forward": float(n)}[norm]


def _convolved(run: Compilation, x: _Spectrum, n: int, dim: int, scale: float, transform: Any) -> Carried:
    """Convolve the values of a spectrum with the kernel of its factor; the results lie along the axis `dim`."""
    if n != x.n:
        raise UncoveredError("the Fourier transform of tokens has another length than its inverse")
    frequencies = n if transform is torch.fft.ifft else n // 2 + 1
    factor = x.factor.expand(*x.factor.shape[:-1], frequencies)
    kernel = transform(factor.to(run.like.dtype.to_complex()), n=n).real * scale
    length = x.carried.index.shape[-1]
    backward = kernel[..., n - length + 1 :]
    rounding = 16 * torch.finfo(kernel.dtype).eps * float(kernel.abs().max())
    result = None
    if n >= 2 * length - 1 and _largest(backward) <= rounding:
        result = _causal(run, x, kernel)
    if result is None:
        letters = tuple(range(x.carried.index.ndim))
        rows, columns = (torch.arange(size, device=kernel.device) for size in (n, length))
        weights = kernel[..., (rows[:, None] - columns).remainder(n)]
        lead = letters[-1 - (weights.ndim - 2) : -1]
        product = Product(letters, (*lead, NEW, letters[-1]), (*letters[:-1], NEW))
        result = contracted(x.carried, weights, product, torch.Size((*x.carried.index.shape[:-1], n)))
    return result.moved(result.index.movedim(-1, dim))


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _causal(run: Compilation, x: _Spectrum, kernel: Tensor) -> Carried | None:
    """Return a causal convolution as a Toeplitz matrix, None if sequences have different kernels."""
    carried = padded(x.carried, x.carried.index.ndim - 1, 0, x.n - x.carried.index.shape[-1])
    carried = carried.arranged(frozenset([carried.index.ndim - 1]))
    batch, length, _ = carried.shape
    if length != x.n:
        return None
    taps = carried.layout.factor(kernel.expand(carried.index.shape))
    if taps.shape[0] > 1 and not torch.equal(taps, taps[:1].expand_as(taps)):
        return None
    mixer = Toeplitz(taps[0].T.contiguous(), batch=batch, length=length)
    return carried.same_elements(Mix("core", mixer))
