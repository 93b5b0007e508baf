"""Rules of convolutions, pools, padding and joins: sums of tensors whose tokens or channels were moved."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import UncoveredError
from unilinattn.mixers import Gather
from unilinattn.operator.stages import Matrix, Mix
from unilinattn.rules.compilation import Compilation, is_carried, rule
from unilinattn.rules.contraction import Product, contracted
from unilinattn.rules.layout import Carried
from unilinattn.rules.recording import Node
from unilinattn.rules.regrouping import by_row, summed

TAPS = 128
"""Largest number of taps of a convolution that is written as a sum of shifted copies."""

MOST_TERMS = 64
"""Largest number of different values that are joined as a sum of padded ones."""

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
    space = tuple(range(10, grouped.ndim + 7))
    letters = Product((0, 1, 2, *space), (1, 3, 2), (0, 1, 3, *space))

    def tap(tokens: Carried, place: tuple[int, ...]) -> Carried:
        matrix = grouped[(..., *place)]
        if matrix.shape[1:] == (1, 1):
            return run.scaled(tokens, matrix.reshape(-1, *[1] * len(space)), "conv")
        shape = torch.Size((len(x.value), groups, matrix.shape[1], *node.value.shape[2:]))
        term = contracted(tokens.moved(tokens.index.unflatten(1, (groups, -1))), matrix, letters, shape)
        return term.moved(term.index.flatten(1, 2))

    window = _Window(grouped.shape[3:], stride, padding, dilation, node.value.shape[2:])
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
    entries = torch.arange(point.shape[axis]).split(1)
    taps = (carried.moved(carried.index.index_select(axis, entry.to(best.device))) for entry in entries)
    terms = (run.scaled(tap, (best == number).to(run.like), "gate") for number, tap in enumerate(taps))
    total = reduce(summed, terms)
    return total.moved(total.index.reshape(node.value.shape))


@rule("pad")
def pad(run: Compilation, node: Node, x: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Carried:
    """Add zeros along axes."""
    if mode != "constant":
        raise UncoveredError(f"values of the tokens are padded by {mode!r}")
    carried = run.value(x)
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        carried = padded(carried, carried.index.ndim - 1 - number, before, after)
    if not value:
        return carried
    return run.shifted(carried, functional.pad(torch.zeros_like(x.value), tuple(pad), value=value))


@rule("cat", "concat", "concatenate")
def concatenate(run: Compilation, node: Node, tensors: Sequence[Any], dim: int = 0) -> Carried:
    """Add the tensors, each padded by zeros where the others are."""
    axis = dim % node.value.ndim
    sizes = [(x, run.number(x).shape[axis]) for x in tensors if run.number(x).numel()]
    return _joined(run, sizes, axis, lambda x: x, torch.cat)


@rule("stack")
def stack(run: Compilation, node: Node, tensors: Sequence[Any], dim: int = 0) -> Carried:
    """Add the tensors, each padded by zeros along a new axis."""
    axis = dim % node.value.ndim
    return _joined(run, [(x, 1) for x in tensors], axis, lambda index: index.unsqueeze(axis), torch.cat)


@rule("setitem")
def write(run: Compilation, node: Node, target: Any, place: Any, value: Any) -> Carried:
    """Add the written values, at their place among zeros, to what is left of the target."""
    keys = tuple(run.number(key) for key in (place if isinstance(place, tuple) else (place,)))
    shape = run.number(target).shape
    written = torch.zeros(shape, dtype=torch.bool, device=run.like.device)
    written[keys] = True
    terms: list[Carried] = []
    if is_carried(target):
        terms.append(run.scaled(run.value(target), ~written, "gate"))
    if is_carried(value):
        if all(isinstance(key, Tensor) for key in keys):
            terms.append(run.scaled(_scattered(run.value(value), keys, shape), written, "gate"))
        elif all(isinstance(key, (int, slice)) or key is Ellipsis for key in keys):
            terms.append(_placed(run.value(value), keys, shape))
        else:
            raise UncoveredError("values of the tokens are written at places that are slices and numbers at once")
    total = terms[0] if len(terms) == 1 else summed(*terms)
    for other, here in ((target, ~written), (value, written)):
        if not is_carried(other):
            total = run.shifted(total, other if isinstance(other, Node) else _constant(other, here, keys, shape))
    return total


def _scattered(carried: Carried, keys: Sequence[Tensor], shape: torch.Size) -> Carried:
    """Return a tensor whose rows are written where numbers or a mask say; other rows have any tokens of their sequence.

    Raises `UncoveredError` for rows that are written twice, or into another sequence.
    """
    numbers = [number for key in keys for number in (key.nonzero(as_tuple=True) if key.dtype == torch.bool else (key,))]
    axes = len(numbers)
    of_row = torch.arange(shape[:axes].numel(), device=carried.index.device).view(shape[:axes])
    rows = of_row[tuple(numbers)]
    index = carried.index.expand(*rows.shape, *shape[axes:]).reshape(rows.numel(), -1)
    rows = rows.flatten()
    if len(torch.unique(rows)) < len(rows):
        raise UncoveredError("values of the tokens are written twice at one place")
    batch, length, width = carried.shape
    sequence, count = index[:, 0] // (length * width), of_row.numel() // batch
    # Rows of (sequence, token) or of (token, sequence).
    of_sequences = (of_row.flatten() // max(count, 1), of_row.flatten() % batch)
    matching = (x for x in of_sequences if torch.equal(x[rows], sequence))
    if of_row.numel() % batch or (own_sequence := next(matching, None)) is None:
        raise UncoveredError("tokens are written into another sequence")
    order = torch.argsort(own_sequence, stable=True)
    token = torch.empty_like(order)
    token[order] = torch.arange(len(order), device=order.device) % count % length
    every = ((own_sequence * length + token) * width)[:, None] + index[:1] % width
    every[rows] = index
    return by_row(carried.moved(every.view(shape)), axes)


def _constant(value: Any, here: Tensor, place: Any, shape: torch.Size) -> Tensor:
    """Return the constants of a target or of a write into it, zero elsewhere."""
    full = torch.zeros(shape, device=here.device)
    if isinstance(value, Tensor) and value.shape == shape:
        return value * here
    full[place] = value
    return full * here


def _placed(carried: Carried, keys: tuple[Any, ...], shape: torch.Size) -> Carried:
    """Return a tensor at the place of slices in a tensor of zeros."""
    missing = len(shape) - sum(key is not Ellipsis for key in keys)
    before = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    every = [*keys[:before], *[slice(None)] * missing, *keys[before + 1 :]]
    index = carried.index
    for axis, key in enumerate(every):
        if isinstance(key, int):
            index = index.unsqueeze(axis)
    sizes = [1 if isinstance(k, int) else len(range(*k.indices(n))) for k, n in zip(every, shape, strict=True)]
    carried = carried.moved(index.expand(sizes))
    for axis, (key, size) in enumerate(zip(every, shape, strict=True)):
        selected = [key % size] if isinstance(key, int) else list(range(*key.indices(size)))
        if len(selected) < size:
            read = torch.full((size,), -1, device=index.device)
            read[selected] = torch.arange(len(selected), device=index.device)
            carried = along(carried, axis, read)
    return carried


def _joined(
    run: Compilation,
    tensors: Sequence[tuple[Any, int]],
    axis: int,
    shaped: Callable[[Tensor], Tensor],
    join: Callable[[list[Tensor], int], Tensor],
) -> Carried:
    """Join tensors of given sizes along an axis."""
    tensors = [(tensor, size) for tensor, size in tensors if size]
    terms: list[tuple[Carried, int, int]] = []
    constants: list[Tensor] = []
    start, total = 0, sum(size for _, size in tensors)
    for tensor, size in tensors:
        if is_carried(tensor):
            value = run.value(tensor)
            terms.append((value.moved(shaped(value.index)), start, total - start - size))
            constants.append(torch.zeros_like(shaped(tensor.value)))
        elif isinstance(tensor, Node):
            raise UncoveredError(f"the output of {tensor.name!r} depends on the tokens and is joined to their values")
        else:
            constants.append(shaped(tensor).detach())
        start += size
    if len(terms) == len(tensors) and all(term.chains is terms[0][0].chains for term, _, _ in terms):
        return terms[0][0].moved(join([term.index for term, _, _ in terms], axis))
    if len(terms) > MOST_TERMS:
        raise UncoveredError(f"it joins more than {MOST_TERMS} values, as a loop over tokens does")
    rows = any(axis in term.layout.row_axes for term, _, _ in terms)
    sum_ = reduce(summed, (padded(term, axis, before, after, of_tokens=rows) for term, before, after in terms))
    return run.shifted(sum_, join([c.to(run.like) for c in constants], axis))


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
        if len(torch.zeros(self._kernel).flatten()) > TAPS:
            raise UncoveredError(f"a convolution of {self._kernel} taps over values that depend on the tokens")

    def sum(self, carried: Carried, tap: Tap) -> Carried:
        """Add the terms of all places."""
        places = product(*(range(size) for size in self._kernel))
        return reduce(summed, (tap(self._moved(carried, place), place) for place in places))

    def counts(self, size: Sequence[int]) -> Int[Tensor, "*out"]:
        """Return the number of tokens in each window of tokens along axes of `size`."""
        total = torch.ones((), dtype=torch.long)
        for axis, length in enumerate(size):
            entries = (self._entries(axis, offset, length) >= 0 for offset in range(self._kernel[axis]))
            total = total[..., None] * torch.stack([*entries]).sum(0)
        return total

    def read(self, place: tuple[int, ...], size: Sequence[int]) -> Int[Tensor, "*out"]:
        """Return the number of the token at a place of each window, among those of the axes of `size`."""
        number = torch.zeros((), dtype=torch.long)
        for axis, length in enumerate(size):
            number = number[..., None] * length + self._entries(axis, place[axis], length)
        return number

    def _entries(self, axis: int, offset: int, size: int) -> Int[Tensor, " entry"]:
        index = torch.arange(self._out[axis]) * self._stride[axis] + offset * self._dilation[axis] - self._before[axis]
        return index.masked_fill((index < 0) | (index >= size), -1)

    def _moved(self, carried: Carried, place: tuple[int, ...]) -> Carried:
        for number, offset in enumerate(place):
            axis = carried.index.ndim - len(place) + number
            entries = self._entries(number, offset, carried.index.shape[axis])
            carried = along(carried, axis, entries.to(carried.index.device))
        return carried


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


def padded(carried: Carried, axis: int, before: int, after: int, *, of_tokens: bool = False) -> Carried:
    """Add zeros at both ends of an axis; negative numbers remove entries. See `along` for `of_tokens`."""
    size = carried.index.shape[axis]
    index = torch.arange(-before, size + after, device=carried.index.device)
    return along(carried, axis, index.masked_fill((index < 0) | (index >= size), -1), of_tokens=of_tokens)


def along(carried: Carried, axis: int, index: Int[Tensor, " entry"], *, of_tokens: bool = False) -> Carried:
    """Read entries along an axis, zeros where the index is -1.

    An axis of one entry numbers tokens with `of_tokens`, or if it stands where they usually do.
    """
    if bool((index >= 0).all()):
        return carried.moved(carried.index.index_select(axis, index))
    kinds = {is_row for size, is_row in carried.layout.split[axis] if size > 1}
    if len(kinds) == 2:
        raise UncoveredError("zeros are joined along an axis of tokens and channels")
    is_row = True in kinds or (not kinds and (of_tokens or axis == carried.index.ndim - 2))
    read = carried.moved(carried.index.index_select(axis, index.clamp_min(0)))
    layout = read.layout_with(frozenset([axis]) if is_row else frozenset())
    shape = [1] * read.index.ndim
    shape[axis] = -1
    real = layout.table((index >= 0).view(shape).expand(read.index.shape))
    batch, length, width = carried.shape
    if is_row:
        tokens = layout.tokens.masked_fill(~real[layout.order, 0].view(batch, -1), -1)
        # Tokens that are moved among themselves are a convolution's; others are those of the core.
        role = "conv" if tokens.shape[1] == length else "core"
        value = carried.then(Mix(role, Gather(tokens, length, like=carried.like)), tokens=tokens.shape[1])
        value = value if layout.has_all_channels else value.select(layout.channels)
        return value.moved(layout.own_index)
    value = carried.with_tokens(layout.tokens)
    ones = carried.like.new_zeros(layout.channels.numel(), width)
    ones[torch.arange(len(ones), device=ones.device), layout.channels] = real[0].to(ones)
    return value.then(Matrix("input", ones), channels=len(ones)).moved(layout.own_index)
