"""Rules of padding, writes and joins: sums of tensors whose tokens or channels were moved."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import UncoveredError
from unilinattn.mixers import Gather
from unilinattn.operator.stages import Matrix, Mix
from unilinattn.recording.compilation import Compilation, is_carried, rule
from unilinattn.recording.layout import Carried
from unilinattn.recording.nodes import Node
from unilinattn.recording.regrouping import by_row, summed

MOST_TERMS = 64
"""Largest number of different values that are joined as a sum of padded ones."""


@rule("pad")
def pad(run: Compilation, node: Node, x: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Carried:
    """Add zeros along axes."""
    if mode != "constant":
        raise UncoveredError(f"values of the tokens are padded by {mode!r}")
    carried = run.value(x)
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = carried.index.ndim - 1 - number
        of_tokens = _are_tokens(run, carried, axis, before + carried.index.shape[axis] + after)
        carried = padded(carried, axis, before, after, of_tokens=of_tokens)
    if not value:
        return carried
    return run.shifted(carried, functional.pad(torch.zeros_like(x.value), tuple(pad), value=value))


@rule("cat", "concat", "concatenate")
def concatenate(run: Compilation, node: Node, tensors: Sequence[Any], dim: int = 0) -> Carried:
    """Add the tensors, each padded by zeros where the others are."""
    axis = dim % node.value.ndim
    sizes = [(x, run.number(x).shape[axis]) for x in tensors if run.number(x).numel()]
    return _joined(run, sizes, axis, lambda x: x)


@rule("stack")
def stack(run: Compilation, node: Node, tensors: Sequence[Any], dim: int = 0) -> Carried:
    """Add the tensors, each padded by zeros along a new axis."""
    axis = dim % node.value.ndim
    return _joined(run, [(x, 1) for x in tensors], axis, lambda index: index.unsqueeze(axis), is_new=True)


@rule("setitem")
def write(run: Compilation, node: Node, target: Any, place: Any, value: Any) -> Carried:
    """Add the written values, at their place among zeros, to what is left of the target."""
    keys = tuple(run.number(key) for key in (place if isinstance(place, tuple) else (place,)))
    shape = run.number(target).shape
    written = torch.zeros(shape, dtype=torch.bool, device=run.like.device)
    written[keys] = True
    written = _narrowed(written)
    terms: list[Carried] = []
    if is_carried(target):
        terms.append(run.scaled(run.value(target), ~written, "gate"))
    if is_carried(value):
        if all(isinstance(key, Tensor) for key in keys):
            terms.append(run.scaled(_scattered(run.value(value), keys, shape), written, "gate"))
        elif all(isinstance(key, (int, slice)) or key is Ellipsis for key in keys):
            terms.append(_placed(run, run.value(value), keys, shape))
        else:
            raise UncoveredError("values of the tokens are written at places that are slices and numbers at once")
    total = terms[0] if len(terms) == 1 else summed(*terms)
    for other, here in ((target, ~written), (value, written)):
        if not is_carried(other):
            total = run.shifted(total, other if isinstance(other, Node) else _constant(run, other, here, keys, shape))
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


def _narrowed(mask: Tensor) -> Tensor:
    """Return a mask with one entry along each axis along which it does not change."""
    for axis in range(mask.ndim):
        first = mask.narrow(axis, 0, 1)
        if torch.equal(first.expand_as(mask), mask):
            mask = first
    return mask


def _constant(run: Compilation, value: Any, here: Tensor, place: Any, shape: torch.Size) -> Tensor:
    """Return the constants of a target or of a write into it, zero elsewhere."""
    full = run.like.new_zeros(shape)
    if isinstance(value, Tensor) and value.shape == shape:
        return value * here
    full[place] = value
    return full * here


def _placed(run: Compilation, carried: Carried, keys: tuple[Any, ...], shape: torch.Size) -> Carried:
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
            carried = along(carried, axis, read, of_tokens=_are_tokens(run, carried, axis, size))
    return carried


def _joined(
    run: Compilation,
    tensors: Sequence[tuple[Any, int]],
    axis: int,
    shaped: Callable[[Tensor], Tensor],
    *,
    is_new: bool = False,
) -> Carried:
    """Join tensors of given sizes along an axis, which may be a new one."""
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
        return terms[0][0].moved(torch.cat([term.index for term, _, _ in terms], axis))
    if len(terms) > MOST_TERMS:
        raise UncoveredError(f"it joins more than {MOST_TERMS} values, as a loop over tokens does")
    rows = any(axis in term.layout.row_axes for term, _, _ in terms)
    are_single = all(term.index.shape[axis] == 1 for term, _, _ in terms)
    told = rows or (_are_tokens(run, terms[0][0], axis, total, is_new=is_new) if are_single else None)
    sum_ = reduce(summed, (padded(term, axis, before, after, of_tokens=told) for term, before, after in terms))
    return run.shifted(sum_, torch.cat([c.to(run.like) for c in constants], axis))


def _are_tokens(run: Compilation, carried: Carried, axis: int, count: int, *, is_new: bool = False) -> bool | None:
    """Whether entries that are joined along an axis of one entry are tokens, None if the axis tells.

    Heads may be stacked along a new axis where tokens usually stand.
    """
    usual = _is_usual(carried, axis)
    if carried.index.shape[axis] > 1 or (usual and not is_new):
        return None
    return run.joins.are_tokens(count * carried.layout.order.numel(), usual=usual)


def _is_usual(carried: Carried, axis: int) -> bool:
    """Whether tokens usually stand along an axis, and no other axis has them."""
    return carried.layout.order.numel() == carried.shape[0] and axis == carried.index.ndim - 2


def padded(carried: Carried, axis: int, before: int, after: int, *, of_tokens: bool | None = None) -> Carried:
    """Add zeros at both ends of an axis; negative numbers remove entries. See `along` for `of_tokens`."""
    size = carried.index.shape[axis]
    index = torch.arange(-before, size + after, device=carried.index.device)
    return along(carried, axis, index.masked_fill((index < 0) | (index >= size), -1), of_tokens=of_tokens)


def along(carried: Carried, axis: int, index: Int[Tensor, " entry"], *, of_tokens: bool | None = None) -> Carried:
    """Read entries along an axis, zeros where the index is -1.

    An axis of one entry numbers tokens with `of_tokens`; with None if it stands where they usually do and no other axis
    does.
    """
    if bool((index >= 0).all()):
        return carried.moved(carried.index.index_select(axis, index))
    kinds = {is_row for size, is_row in carried.layout.split[axis] if size > 1}
    if len(kinds) == 2:
        raise UncoveredError("zeros are joined along an axis of tokens and channels")
    is_row = True in kinds or (not kinds and (_is_usual(carried, axis) if of_tokens is None else of_tokens))
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
