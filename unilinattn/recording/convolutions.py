"""Rules of convolutions and pools: sums of the tokens at the places of a window."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import UncoveredError
from unilinattn.recording.compilation import Compilation, rule
from unilinattn.recording.contraction import Product, contracted
from unilinattn.recording.joins import along, padded
from unilinattn.recording.layout import Carried
from unilinattn.recording.nodes import Node
from unilinattn.recording.regrouping import summed

TAPS = 128
"""Largest number of taps of a convolution that is written as a sum of shifted copies."""

Tap = Callable[[Carried, tuple[int, ...]], Carried]
"""Returns the term of one place of a window from the tokens at that place."""


@rule("conv1d", "conv2d", "conv3d")
def convolution(
    run: Compilation,
    node: Node,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Carried:
    """Add the tokens at each place of the window, times the matrix of that place."""
    grouped = run.number(weight).unflatten(0, (groups, -1))  # (group, out, in, *window)
    window = _Window(grouped.shape[3:], stride, padding, dilation, node.value.shape[2:])
    return _convolved(run, node, x, grouped, window, bias)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(
    run: Compilation,
    node: Node,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Carried:
    """Add each token, times the matrix of each place of the window, where this place lies around it."""
    grouped = run.number(weight).unflatten(0, (groups, -1)).transpose(1, 2)  # (group, out, in, *window)
    window = _Spread(grouped.shape[3:], stride, padding, dilation, node.value.shape[2:])
    return _convolved(run, node, x, grouped, window, bias)


def _convolved(run: Compilation, node: Node, x: Any, grouped: Tensor, window: "_Window", bias: Any) -> Carried:
    """Return the sum over a window of the tokens times matrices (group, out, in, *window), plus a bias."""
    groups, space = len(grouped), tuple(range(10, grouped.ndim + 7))
    letters = Product((0, 1, 2, *space), (1, 3, 2), (0, 1, 3, *space))

    def tap(tokens: Carried, place: tuple[int, ...]) -> Carried:
        index: tuple[Any, ...] = (..., *place)
        matrix = grouped[index]
        if matrix.shape[1:] == (1, 1):
            return run.scaled(tokens, matrix.reshape(-1, *[1] * len(space)), "conv")
        shape = torch.Size((len(x.value), groups, matrix.shape[1], *node.value.shape[2:]))
        term = contracted(tokens.moved(tokens.index.unflatten(1, (groups, -1))), matrix, letters, shape)
        return term.moved(term.index.flatten(1, 2))

    total = window.sum(run.value(x), tap)
    if bias is None:
        return total
    return run.shifted(total, bias if isinstance(bias, Node) else bias.reshape(-1, *[1] * len(space)))


@rule("avg_pool1d", "avg_pool2d")
def average_pool(
    run: Compilation,
    node: Node,
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Carried:
    """Average the tokens of each window."""
    axes = 2 if node.name == "avg_pool2d" else 1
    kernel = _each(kernel_size, axes)
    steps = kernel if stride is None or stride == () else _each(stride, axes)
    window = _Window(kernel, steps, padding, 1, node.value.shape[-axes:])
    total = window.sum(run.value(x), lambda tokens, place: tokens)
    # The pool of ones is the number of real tokens over the divisor.
    ones, options = run.like.new_ones(1, 1, *x.value.shape[-axes:]), (kernel, steps, padding, ceil_mode)
    if axes == 2:
        mean = functional.avg_pool2d(ones, *options, count_include_pad, divisor_override)
    else:
        mean = functional.avg_pool1d(ones, *options, count_include_pad)
    return run.scaled(total, mean / window.counts(ones.shape[2:]).to(mean), "conv")


@rule("max_pool1d", "max_pool2d")
def max_pool(
    run: Compilation,
    node: Node,
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Carried:
    """Read the largest element of each window, whose place is frozen."""
    axes = 2 if node.name == "max_pool2d" else 1
    kernel = _each(kernel_size, axes)
    steps = kernel if stride is None or stride == () else _each(stride, axes)
    if return_indices:
        raise UncoveredError("the places of the largest values of the tokens are read")
    pool = functional.max_pool2d if axes == 2 else functional.max_pool1d
    _, best = pool(x.value.detach(), kernel, steps, padding, dilation, ceil_mode=ceil_mode, return_indices=True)
    size = x.value.shape[-axes:]
    window = _Window(kernel, steps, padding, dilation, node.value.shape[-axes:])

    def tap(tokens: Carried, place: tuple[int, ...]) -> Carried:
        return run.scaled(tokens, (best == window.read(place, size).to(best)).to(run.like), "gate")

    return window.sum(run.value(x), tap)


@rule("max", "amax")
def largest(run: Compilation, node: Node, x: Any, dim: Any = None, keepdim: bool = False) -> Carried:
    """Read the largest element along an axis, whose place is frozen."""
    carried, point = run.value(x), x.value.detach()
    axes = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if len(axes) != 1 or node.item not in (None, 0) or point.shape[axes[0]] > TAPS:
        raise UncoveredError("the largest of many values that depend on the tokens is read")
    axis = axes[0] % point.ndim
    best = point.argmax(axis, keepdim=True)
    entries = torch.arange(point.shape[axis], device="cpu").split(1)
    taps = (carried.moved(carried.index.index_select(axis, entry.to(best.device))) for entry in entries)
    terms = (run.scaled(tap, (best == number).to(run.like), "gate") for number, tap in enumerate(taps))
    total = reduce(summed, terms)
    return total.moved(total.index.reshape(node.value.shape))


def windows(carried: Carried, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Carried:
    """Return the elements of each window of an image, as `functional.unfold` does; zeros beyond its edges."""
    for axis, size in zip((-2, -1), _each(padding, 2), strict=True):
        carried = padded(carried, carried.index.ndim + axis, size, size)
    # The function takes no whole numbers; those of an index are exact in float64.
    index = functional.unfold(carried.index.double(), kernel_size, dilation, 0, stride)
    return carried.moved(index.long())


class _Window:
    """The places of a window that moves over tokens."""

    def __init__(self, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any, out: Sequence[int]) -> None:
        axes = len(kernel)
        self._kernel, self._out = tuple(kernel), tuple(out)
        self._stride, self._dilation = _each(stride, axes), _each(dilation, axes)
        if isinstance(padding, str):
            reach = [d * (k - 1) for d, k in zip(self._dilation, kernel, strict=True)]
            self._before = [r // 2 if padding == "same" else 0 for r in reach]
        else:
            self._before = list(_each(padding, axes))
        if len(torch.zeros(self._kernel, device="cpu").flatten()) > TAPS:
            raise UncoveredError(f"a convolution of {self._kernel} taps over values that depend on the tokens")

    def sum(self, carried: Carried, tap: Tap) -> Carried:
        """Add the terms of all places."""
        places = product(*(range(size) for size in self._kernel))
        # Channels are selected once, and not for each place.
        carried = carried if carried.layout.has_all_channels else carried.in_place()
        return reduce(summed, (tap(self._moved(carried, place), place) for place in places))

    def counts(self, size: Sequence[int]) -> Int[Tensor, "*out"]:
        """Return the number of tokens in each window of tokens along axes of `size`."""
        total = torch.ones((), dtype=torch.long, device="cpu")
        for axis, length in enumerate(size):
            entries = (self._entries(axis, offset, length) >= 0 for offset in range(self._kernel[axis]))
            total = total[..., None] * torch.stack([*entries]).sum(0)
        return total

    def read(self, place: tuple[int, ...], size: Sequence[int]) -> Int[Tensor, "*out"]:
        """Return the number of the token at a place of each window, among those of the axes of `size`."""
        number = torch.zeros((), dtype=torch.long, device="cpu")
        for axis, length in enumerate(size):
            number = number[..., None] * length + self._entries(axis, place[axis], length)
        return number

    def _entries(self, axis: int, offset: int, size: int) -> Int[Tensor, " entry"]:
        index = (
            torch.arange(self._out[axis], device="cpu") * self._stride[axis]
            + offset * self._dilation[axis]
            - self._before[axis]
        )
        return index.masked_fill((index < 0) | (index >= size), -1)

    def _moved(self, carried: Carried, place: tuple[int, ...]) -> Carried:
        for number, offset in enumerate(place):
            axis = carried.index.ndim - len(place) + number
            entries = self._entries(number, offset, carried.index.shape[axis])
            carried = along(carried, axis, entries.to(carried.index.device))
        return carried


class _Spread(_Window):
    """The places of a window around each token, which tokens of the output they are."""

    def _entries(self, axis: int, offset: int, size: int) -> Int[Tensor, " entry"]:
        reached = torch.arange(self._out[axis], device="cpu") - offset * self._dilation[axis] + self._before[axis]
        index = reached // self._stride[axis]
        return index.masked_fill((reached % self._stride[axis] != 0) | (index < 0) | (index >= size), -1)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values
