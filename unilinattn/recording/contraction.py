"""Products of a carried tensor with frozen numbers, which sum over channels or over tokens.

A product is written with one letter for each axis: `matmul`, `linear` and `einsum` are the same thing then. A sum over
channels is a matrix for every token. A sum over tokens is a token mixer, whatever made its numbers: softmax, sigmoids,
differences of two softmaxes, parameters (MLP-Mixer), or a mean.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import reduce
from itertools import count, product
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.mixers import Dense
from unilinattn.operator.stages import Matrix, Mix, Scale
from unilinattn.recording.layout import Carried, added
from unilinattn.rules.letters import Letters

TERMS = 128
"""Largest number of tokens whose channels are summed by a matrix for each."""


WIDENED = 64
"""Largest number of copies of each channel for matrices that differ by token."""


@dataclass(frozen=True)
class Product:
    """sum over the letters that `out` lacks of weights[letters] * value[letters].

    Attributes:
        value: the letter of each axis of the carried tensor.
        weights: the letter of each axis of the frozen tensor.
        out: the letter of each axis of the result.
    """

    value: Letters
    weights: Letters
    out: Letters


def joined(
    factors: Sequence[Float[Tensor, "..."]], names: Sequence[Letters], needed: Set[int], like: Tensor
) -> tuple[Float[Tensor, "..."], Letters]:
    """Return one frozen tensor for several, and its letters: those of `needed` that they have."""
    if len(factors) == 1:
        return factors[0], names[0]
    out = tuple(dict.fromkeys(x for letters in names for x in letters if x in needed))
    if not factors:
        return like.new_ones(()), out
    numbers = {x: number for number, x in enumerate(dict.fromkeys(x for letters in names for x in letters))}
    operands = [
        value
        for factor, letters in zip(factors, names, strict=True)
        for value in (factor, [numbers[x] for x in letters])
    ]
    return torch.einsum(*operands, [numbers[x] for x in out]), out


def contracted(value: Carried, weights: Float[Tensor, "*axes"], letters: Product, result: torch.Size) -> Carried:
    """Append a product to a carried tensor; `result` is the shape of its result.

    Raises `UncoveredError` for matrices that differ by token, and for sums over the sequences of a batch.
    """
    split = _Split.of(value, weights, letters, result)
    rows = [x for x in split.value if x not in split.out and split.is_row[x]]
    channels = [x for x in split.value if x not in split.out and not split.is_row[x] and split.sizes[x] > 1]
    if not rows and not channels and _is_single_token(split):
        rows = [x for x in split.value if x not in split.out]
    if not rows:
        return _over_channels(split)
    return _over_both(split, rows) if channels else _over_tokens(split)


def _is_single_token(split: "_Split") -> bool:
    """Tell whether the carried tensor is one token of each sequence, such as a global one, which all others read."""
    remaining = [x for x in split.value if x in split.out]
    rows, channels = (split.count([x for x in remaining if split.is_row[x] == is_row]) for is_row in (True, False))
    return rows == split.carried.shape[0] and channels > 1


def with_channels(value: Carried, axis: int, like: Tensor) -> Carried:
    """Return a tensor in which an axis of tokens and channels, such as merged patches, has channels only."""
    letters, size = tuple(range(value.index.ndim)), value.index.shape[axis]
    out = tuple(-1 if letter == axis else letter for letter in letters)
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    return contracted(value, eye, Product(letters, (-1, axis), out), value.index.shape)


@dataclass(frozen=True, eq=False)
class _Split:
    """A product each of whose letters numbers either rows or channels of the carried tensor.

    Attributes:
        carried: the carried tensor.
        index, value: its index and the letters of its axes.
        weights, weight_letters: the frozen numbers and their letters.
        out: the letters of the result.
        sizes, is_row: by letter, the size and whether it numbers rows.
        result: the shape of the result.
    """

    carried: Carried
    index: Int[Tensor, "*value"]
    value: list[int]
    weights: Float[Tensor, "*weights"]
    weight_letters: list[int]
    out: list[int]
    sizes: dict[int, int]
    is_row: dict[int, bool]
    result: torch.Size

    @classmethod
    def of(cls, carried: Carried, weights: Tensor, letters: Product, result: torch.Size) -> "_Split":
        """Split the axes of a product like those of the carried tensor's layout."""
        sizes: dict[int, int] = {}
        for names, shape in ((letters.value, carried.index.shape), (letters.weights, weights.shape)):
            # An axis of size 1 is broadcast.
            sizes |= {x: n for x, n in zip(names, shape, strict=True) if sizes.get(x, 1) == 1}
        numbers = count()
        parts = {x: [(next(numbers), size, False)] for x, size in sizes.items()}
        for letter, split in zip(letters.value, carried.layout.split, strict=True):
            if prod(size for size, _ in split) == sizes[letter]:
                parts[letter] = [(next(numbers), size, is_row) for size, is_row in split]
        flat = [part for split in parts.values() for part in split]
        size_of = {x: size for x, size, _ in flat}
        is_row = {x: rows for x, _, rows in flat}

        def split_axes(tensor: Tensor, names: Letters) -> tuple[Tensor, list[int]]:
            axes = [x for name in names for x, _, _ in parts[name]]
            return tensor.expand([sizes[name] for name in names]).reshape([size_of[x] for x in axes]), axes

        index, value = split_axes(carried.index, letters.value)
        numbers_, weight_letters = split_axes(weights, letters.weights)
        out = [x for name in letters.out for x, _, _ in parts[name]]
        return cls(carried, index, value, numbers_, weight_letters, out, size_of, is_row, result)

    def aligned(self, tensor: Tensor, letters: Sequence[int], order: Sequence[int]) -> Tensor:
        """Return a tensor with its axes in another order, and axes of size 1 for letters that it lacks."""
        tensor = tensor.permute([list(letters).index(x) for x in order if x in letters])
        return tensor.reshape([self.sizes[x] if x in letters else 1 for x in order])

    def count(self, letters: Sequence[int]) -> int:
        """Return the product of the sizes of letters."""
        return prod(self.sizes[x] for x in letters)

    def shape(self, letters: Sequence[int], order: Sequence[int]) -> list[int]:
        """Return the sizes of the letters of `order`, 1 for those that are not among `letters`."""
        return [self.sizes[x] if x in letters else 1 for x in order]

    def located(
        self,
        value: Carried,
        rows: tuple[Int[Tensor, " row"], Sequence[int]],
        channels: tuple[Int[Tensor, " channel"], Sequence[int]],
    ) -> Carried:
        """Return the result as elements of a value, by the row and the channel of its letters."""
        order = [*rows[1], *channels[1]]
        row, channel = (x.view(self.shape(letters, order)) for x, letters in (rows, channels))
        index = (row * value.shape[2] + channel).permute([order.index(x) for x in self.out])
        return value.moved(index.reshape(self.result))


def _over_channels(split: _Split) -> Carried:
    """Multiply every token by one matrix."""
    width = split.carried.shape[2]
    rows = [x for x in split.value if split.is_row[x]]
    remaining = [x for x in split.out if x not in rows]
    summed = [x for x in split.value if not split.is_row[x] and x not in split.out]
    shared = [x for x in split.weight_letters if x in rows]
    weights = split.aligned(split.weights, split.weight_letters, [*shared, *remaining, *summed])
    first = weights[(slice(1),) * len(shared)]
    if not torch.equal(first.expand_as(weights), weights):
        return _by_token_and_channel(split, rows, remaining, summed)
    shape = [split.sizes[x] for x in (*remaining, *summed)]
    weights = first.reshape(first.shape[len(shared) :]).expand(shape)
    # The channel of the value that each remaining channel takes from each summed one: with heads, those of its head.
    index = split.aligned(split.index, split.value, [*rows, *remaining, *summed]).reshape(
        split.count(rows), *split.shape(split.value, [*remaining, *summed])
    )
    channel = (index[0] % width).expand(shape).reshape(split.count(remaining), split.count(summed))
    weights = weights.reshape(channel.shape)
    if channel.shape[1] != width or not bool((channel == torch.arange(width, device=channel.device)).all()):
        weights = weights.new_zeros(len(weights), width).scatter_add_(1, channel, weights)
    value = split.carried.then(Matrix("input", weights), channels=len(weights))
    row = index.reshape(len(index), -1)[:, 0] // width
    return split.located(value, (row, rows), (torch.arange(len(weights), device=row.device), remaining))


def _by_token_and_channel(split: _Split, rows: list[int], remaining: list[int], summed: list[int]) -> Carried:
    """Multiply each token by another matrix: copy its channels, multiply the copies by factors, and add them."""
    inner = split.count(summed)
    if split.count(remaining) * inner > WIDENED * split.carried.shape[2]:
        raise UncoveredError("a product has another large matrix for every token")
    order = [*rows, *remaining, *summed]
    index = split.aligned(split.index, split.value, order).expand([split.sizes[x] for x in order])
    copies = split.carried.moved(index).arranged()
    factor = split.aligned(split.weights, split.weight_letters, order)
    scaled = copies.same_elements(Scale("gate", copies.layout.factor(factor)))
    flat = scaled.moved(scaled.index.reshape(split.count(rows), split.count(remaining), inner))
    shape = torch.Size((split.count(rows), split.count(remaining)))
    total = contracted(flat, split.weights.new_ones(inner), Product((0, 1, 2), (2,), (0, 1)), shape)
    result = total.index.view([split.sizes[x] for x in (*rows, *remaining)])
    return total.moved(result.permute([[*rows, *remaining].index(x) for x in split.out]).reshape(split.result))


def _over_tokens(split: _Split) -> Carried:
    """Mix tokens by one matrix for each head."""
    batch, length, width = split.carried.shape
    windows = [x for x in split.value if split.is_row[x] and x in split.out]
    summed = [x for x in split.value if x not in split.out]
    queries = [x for x in split.out if x not in split.value]
    channels = [x for x in split.value if not split.is_row[x] and x in split.out]
    heads = [x for x in channels if x in split.weight_letters]
    others = [x for x in channels if x not in heads]
    index = split.aligned(split.index, split.value, [*windows, *summed, *heads, *others])
    index = index.reshape(split.count(windows), split.count(summed), split.count(channels))
    value = split.carried
    lanes = index[0, 0] % width
    if len(lanes) != width or not torch.equal(lanes, torch.arange(width, device=lanes.device)):
        # A mixer's heads are consecutive channels.
        value = value.select(lanes)
    sequence, token = index[:, :, 0] // width // length, index[:, :, 0] // width % length
    if not torch.equal(sequence, sequence[:, :1].expand_as(sequence)):
        raise UncoveredError("a product sums over the sequences of a batch")
    # The queries of a sequence come in the order of its windows, then of the queries of a window.
    order = torch.argsort(sequence[:, 0], stable=True)
    groups = len(order) // batch
    if not torch.equal(sequence[order, 0], torch.arange(batch, device=order.device).repeat_interleave(groups)):
        raise UncoveredError("the sequences of a batch have different numbers of tokens")
    letters = [*windows, *heads, *queries, *summed]
    weights = split.aligned(split.weights, split.weight_letters, letters).expand([split.sizes[x] for x in letters])
    weights = weights.reshape([split.count(x) for x in (windows, heads, queries, summed)])[order]
    weights = weights.unflatten(0, (batch, groups)).transpose(1, 2)
    value = value.then(
        Mix("core", Dense(_by_token(weights, token[order].view(batch, groups, -1), length))),
        tokens=groups * split.count(queries),
    )
    group = torch.empty_like(order)
    group[order] = torch.arange(len(order), device=order.device)
    row = group[:, None] * split.count(queries) + torch.arange(split.count(queries), device=order.device)
    lane = torch.arange(len(lanes), device=row.device)
    return split.located(value, (row.flatten(), [*windows, *queries]), (lane, [*heads, *others]))


def _by_token(
    weights: Float[Tensor, "batch head window query key"], token: Int[Tensor, "batch window key"], length: int
) -> Float[Tensor, "batch head row token"]:
    """Return weights of keys in windows as one matrix over the tokens, which is zero outside of a query's window."""
    windows, keys = token.shape[1:]
    if windows == 1 and keys == length and bool((token == torch.arange(length, device=token.device)).all()):
        return weights.squeeze(2).contiguous()
    matrix = weights.new_zeros(*weights.shape[:4], length)
    return matrix.scatter_add_(4, token[:, None, :, None].expand(weights.shape), weights).flatten(2, 3)


def _over_both(split: _Split, rows: Sequence[int]) -> Carried:
    """Add one term for each summed token, whose channels have a separate matrix, as in the merging of patches."""
    if split.count(rows) > TERMS:
        raise UncoveredError(f"a product sums over the channels of {split.count(rows)} tokens at once")
    letters = Product(
        *(tuple(x for x in names if x not in rows) for names in (split.value, split.weight_letters, split.out))
    )
    shape = torch.Size(split.sizes[x] for x in split.out)
    terms: list[Carried] = []
    for places in product(*(range(split.sizes[x]) for x in rows)):
        place = dict(zip(rows, places, strict=True))
        index, weights = (
            tensor[tuple(place.get(x, slice(None)) for x in names)]
            for tensor, names in ((split.index, split.value), (split.weights, split.weight_letters))
        )
        terms.append(contracted(split.carried.moved(index), weights, letters, shape))
    total = reduce(added, terms)
    return total.moved(total.index.reshape(split.result))
