"""Products of a carried tensor with frozen numbers, which sum over channels or over tokens.

A product is written with one letter for each axis: `matmul`, `linear` and `einsum` are the same thing then. A sum over
channels is a matrix for every token. A sum over tokens is a token mixer, whatever made its numbers: softmax, sigmoids,
differences of two softmaxes, parameters (MLP-Mixer), or a mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.mixers import Dense
from unilinattn.operator.stages import Matrix, Mix
from unilinattn.rules.layout import Carried, added

Letters = tuple[int, ...]

TERMS = 128
"""Largest number of tokens whose channels are summed by a matrix for each."""


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


def from_equation(equation: str, shapes: Sequence[torch.Size]) -> tuple[Letters, Letters, Letters]:
    """Return the letters of both operands and of the result of an einsum."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        raise UncoveredError(f"einsum with {len(terms)} operands")
    if "->" not in equation:
        raise UncoveredError("einsum without '->'")
    dots = [len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes, strict=True)]
    count = max(dot if "..." in term else 0 for term, dot in zip(terms, dots, strict=True))

    def letters(term: str, number: int) -> Letters:
        before, dots_, after = term.partition("...")
        # Axes behind the dots are aligned at their ends.
        extra = tuple(-1 - k for k in range(number))[::-1] if dots_ else ()
        found = (*map(ord, before), *extra, *map(ord, after))
        if len(set(found)) < len(found):
            raise UncoveredError("einsum with a diagonal")
        return found

    first, second = (letters(term, dot) for term, dot in zip(terms, dots, strict=True))
    return first, second, letters(output, count)


def matmul_letters(first: int, second: int) -> tuple[Letters, Letters, Letters]:
    """Return the letters of `matmul` of operands with these numbers of axes."""
    count = max(first, second, 2) - 2
    batch = tuple(-1 - k for k in range(count))[::-1]
    row, inner, column = 1, 2, 3
    left = (inner,) if first == 1 else (*batch[count - first + 2 :], row, inner)
    right = (inner,) if second == 1 else (*batch[count - second + 2 :], inner, column)
    out = batch + (() if first == 1 else (row,)) + (() if second == 1 else (column,))
    return left, right, out


def contracted(value: Carried, weights: Tensor, letters: Product, result: torch.Size, role: str) -> Carried:
    """Append a product to a carried tensor; `result` is the shape of its result.

    Raises `UncoveredError` for one that sums over tokens and channels at once, and for matrices that differ by token.
    """
    split = _Split(value, weights, letters, result)
    summed = [letter for letter in split.value if letter not in split.out]
    over_rows = [split.is_row[letter] for letter in summed]
    if summed and all(over_rows):
        return _over_tokens(split, summed)
    if any(over_rows):
        return _over_both(split, [letter for letter in summed if split.is_row[letter]], role)
    return _over_channels(split, role)


def with_channels(value: Carried, axis: int, like: Tensor) -> Carried:
    """Return a tensor as a value in which an axis of tokens and channels, such as merged patches, has channels only."""
    letters = tuple(range(value.index.ndim))
    size = value.index.shape[axis]
    out = tuple(100 if letter == axis % value.index.ndim else letter for letter in letters)
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    return contracted(value, eye, Product(letters, (100, axis % value.index.ndim), out), value.index.shape, "input")


class _Split:
    """A product in whose letters each axis numbers either rows or channels of the carried tensor."""

    def __init__(self, carried: Carried, weights: Tensor, product: Product, result: torch.Size) -> None:
        self.carried, layout = carried, carried.layout
        sizes = dict(zip(product.out, result, strict=True))
        sizes |= {k: n for k, n in zip(product.weights, weights.shape, strict=True) if n > 1 or k not in sizes}
        sizes |= {k: n for k, n in zip(product.value, carried.index.shape, strict=True) if n > 1 or k not in sizes}
        index = carried.index
        # Axes that are broadcast are those of the other operand.
        parts: dict[int, list[tuple[int, int, bool]]] = {}
        names = iter(range(1000, 10**6))
        for letter, axis in zip(product.value, layout.split, strict=True):
            broadcast = prod(size for size, _ in axis) != sizes[letter]
            parts[letter] = [(next(names), 1 if broadcast else size, row) for size, row in axis]
            if broadcast:
                parts[letter] = [(next(names), sizes[letter], False)]
        for letter, size in sizes.items():
            parts.setdefault(letter, [(next(names), size, False)])
        self.sizes = {name: size for part in parts.values() for name, size, _ in part}
        self.is_row = {name: row for part in parts.values() for name, _, row in part}

        def split(letters: Letters) -> list[int]:
            return [name for letter in letters for name, _, _ in parts[letter]]

        self.value, self.weights_letters, self.out = (split(x) for x in (product.value, product.weights, product.out))
        shape = [sizes[letter] for letter in product.value]
        self.index = index.expand(shape).reshape([self.sizes[x] for x in self.value])
        shape = [sizes[letter] for letter in product.weights]
        self.weights = weights.expand(shape).reshape([self.sizes[x] for x in self.weights_letters])
        self.result = result

    def aligned(self, tensor: Tensor, letters: Sequence[int], order: Sequence[int]) -> Tensor:
        """Return a tensor with its axes in another order, and axes of size 1 for letters that it lacks."""
        present = [x for x in order if x in letters]
        tensor = tensor.permute([list(letters).index(x) for x in present])
        return tensor.reshape([self.sizes[x] if x in present else 1 for x in order])

    def count(self, letters: Sequence[int]) -> int:
        """Return the product of the sizes of letters."""
        return prod(self.sizes[x] for x in letters)


def _over_both(at: _Split, rows: list[int], role: str) -> Carried:
    """Sum over the tokens one by one: each has a matrix of its own, as in the merging of patches."""
    count = at.count(rows)
    if count > TERMS:
        raise UncoveredError(f"a product sums over the channels of {count} tokens at once")
    total: Carried | None = None
    for places in product(*(range(at.sizes[x]) for x in rows)):
        index, weights = at.index, at.weights
        for letter, place in zip(rows, places, strict=True):
            index = index.select([x for x in at.value if x not in rows[: rows.index(letter)]].index(letter), place)
            if letter in at.weights_letters:
                kept = [x for x in at.weights_letters if x not in rows[: rows.index(letter)]]
                weights = weights.select(kept.index(letter), place)
        letters = Product(
            tuple(x for x in at.value if x not in rows), tuple(x for x in at.weights_letters if x not in rows), tuple(at.out)
        )
        shape = torch.Size(at.sizes[x] for x in at.out)
        term = contracted(at.carried.moved(index), weights, letters, shape, role)
        total = term if total is None else added(total, term)
    assert total is not None
    return total.moved(total.index.reshape(at.result))


def _over_channels(at: _Split, role: str) -> Carried:
    """Multiply every token by one matrix."""
    batch, length, width = at.carried.shape
    rows = [x for x in at.value if at.is_row[x]]
    kept = [x for x in at.out if x not in rows]
    summed = [x for x in at.value if not at.is_row[x] and x not in at.out]
    weights, letters = at.weights, at.weights_letters
    for row in [x for x in letters if x in rows]:
        first = weights.narrow(letters.index(row), 0, 1)
        if not torch.equal(first.expand_as(weights), weights):
            raise UncoveredError("a product has another matrix for every token")
        weights = first
    present = [x for x in (*kept, *summed) if x in letters]
    weights = weights.permute([letters.index(x) for x in (*(x for x in letters if x in rows), *present)])
    weights = weights.reshape([at.sizes[x] if x in present else 1 for x in (*kept, *summed)])
    # The channel of the carried tensor for each kept channel and each summed one.
    order = [*[x for x in at.value if at.is_row[x]], *kept, *summed]
    index = at.aligned(at.index, at.value, order)
    channel = index.flatten(0, len(rows) - 1)[0] % width if rows else index % width
    row = (index // width).reshape(at.count(rows), -1)[:, 0]
    shape = [at.sizes[x] for x in (*kept, *summed)]
    out, inner = at.count(kept), at.count(summed)
    dense = weights.expand(shape).reshape(out, inner)
    channel = channel.expand(shape).reshape(out, inner)
    columns = torch.arange(width, device=channel.device)
    if inner == width and torch.equal(channel, columns.expand(out, -1)):
        matrix = dense
    else:
        matrix = dense.new_zeros(out, width).scatter_add_(1, channel, dense)
    value = at.carried.then(Matrix(role, matrix), channels=out)
    result = row.view([at.sizes[x] if x in rows else 1 for x in (*rows, *kept)]) * out
    result = result + torch.arange(out, device=row.device).view(
        [1 if x in rows else at.sizes[x] for x in (*rows, *kept)]
    )
    present = [*rows, *kept]
    return value.moved(result.permute([present.index(x) for x in at.out]).reshape(at.result))


def _over_tokens(at: _Split, summed: list[int]) -> Carried:
    """Mix tokens by one matrix for each head."""
    carried, (batch, length, width) = at.carried, at.carried.shape
    kept_rows = [x for x in at.value if at.is_row[x] and x in at.out]
    queries = [x for x in at.out if x not in at.value]
    channels = [x for x in at.value if not at.is_row[x]]
    heads = [x for x in channels if x in at.weights_letters]
    others = [x for x in channels if x not in heads]
    if any(x not in at.out for x in channels):
        raise UncoveredError("a product sums over tokens and channels at once")
    # Channels in the order of the heads.
    index = at.aligned(at.index, at.value, [*kept_rows, *summed, *heads, *others])
    index = index.reshape(at.count(kept_rows), at.count(summed), at.count(channels))
    order = index[0, 0] % width
    if len(order) != width or not torch.equal(order, torch.arange(width, device=order.device)):
        carried = carried.moved(carried.index).select(order)
    row = index[:, :, 0] // width
    sequence, token = row // length, row % length
    if not bool((sequence == sequence[:, :1]).all()):
        raise UncoveredError("a product sums over the sequences of a batch")
    sequence = sequence[:, 0]
    # Queries of a sequence in the order of the kept axes (such as windows), then of their own.
    by_sequence = torch.argsort(sequence, stable=True)
    groups = len(sequence) // batch
    if not bool((torch.bincount(sequence, minlength=batch) == groups).all()):
        raise UncoveredError("the sequences of a batch have different numbers of tokens")
    weights = at.aligned(at.weights, at.weights_letters, [*kept_rows, *heads, *queries, *summed])
    sizes = [at.sizes[x] for x in (*kept_rows, *heads, *queries, *summed)]
    weights = weights.expand(sizes).reshape(at.count(kept_rows), at.count(heads), at.count(queries), at.count(summed))[
        by_sequence
    ]
    token = token[by_sequence].view(batch, groups, -1)
    weights = weights.view(batch, groups, *weights.shape[1:]).transpose(1, 2)
    whole = groups == 1 and token.shape[2] == length
    if whole and bool((token == torch.arange(length, device=token.device)).all()):
        matrix = weights.squeeze(2)
    else:
        matrix = weights.new_zeros(*weights.shape[:4], length)
        places = token[:, None, :, None, :].expand(weights.shape)
        matrix = matrix.scatter_add_(4, places, weights).flatten(2, 3)
    tokens = groups * at.count(queries)
    value = carried.then(Mix("core", Dense(matrix.contiguous())), tokens=tokens)
    place = torch.empty_like(by_sequence)
    place[by_sequence] = torch.arange(len(place), device=place.device)
    rows = place[:, None] * at.count(queries) + torch.arange(at.count(queries), device=place.device)
    rows = rows.view([at.sizes[x] for x in (*kept_rows, *queries)])
    present = [*kept_rows, *queries, *heads, *others]
    rows = rows.reshape([at.sizes[x] if x in (*kept_rows, *queries) else 1 for x in present])
    lanes = torch.arange(width, device=rows.device) if len(order) == width else torch.arange(len(order))
    lanes = lanes.view([at.sizes[x] if x in (*heads, *others) else 1 for x in present])
    result = rows * len(order) + lanes
    return value.moved(result.permute([present.index(x) for x in at.out]).reshape(at.result))
