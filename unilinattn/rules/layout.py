"""`Carried`: a tensor of a host as elements of a value (batch, token, channel) that stages compute from a layer's input.

A view, a permutation, a window partition or a gather moves elements and computes none, so a carried tensor is a chain
of stages and an index: for each element of the tensor, its position in the chain's flattened output. `Layout` reads
from the index which axes of the tensor are tokens and which are channels, in any order and also where one axis is both:
in (batch * head, token, channel) the first axis is a batch outside and a head inside.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.mixers import Gather
from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Scale, Stage

Shape = tuple[int, int, int]
"""(batch, token, channel) of a value."""


@dataclass(frozen=True, eq=False)
class Carried:
    """A tensor that is linear in a layer's inputs: its stages from each port, and the place of each element.

    Attributes:
        chains: the stages from each port; their outputs are summed. Biases are on the chain of the first port only.
        shape: (batch, token, channel) of the chains' output.
        index: the position of each of the tensor's elements in the flattened output.
        like: a tensor without elements of the operator's dtype and device.
    """

    chains: Mapping[str, Chain]
    shape: Shape
    index: Int[Tensor, "*axes"]
    like: Tensor

    @cached_property
    def layout(self) -> "Layout":
        """The tokens and channels of the tensor's axes."""
        return Layout(self.index, self.shape)

    def moved(self, index: Int[Tensor, "*axes"]) -> "Carried":
        """Return other elements of the same value."""
        return replace(self, index=index)

    def then(self, stage: Stage, channels: int | None = None, tokens: int | None = None) -> "Carried":
        """Append a stage; the tensor is then its whole output, (batch, token, channel)."""
        first = next(iter(self.chains))
        chains = {port: (*chain, stage if port == first else stage.unbiased()) for port, chain in self.chains.items()}
        shape = self.shape[0], tokens or self.shape[1], channels or self.shape[2]
        return Carried(chains, shape, whole(shape, self.index), self.like)

    def same_elements(self, stage: Stage) -> "Carried":
        """Append a stage that keeps the shape of the value; the tensor's elements stay where they are."""
        return self.then(stage).moved(self.index)

    def arranged(self, row_axes: frozenset[int] = frozenset()) -> "Carried":
        """Return the tensor as a value (batch, token, channel) in the order of the tensor's own axes.

        Rows come in the order of the axes that are tokens, channels in that of the axes that are channels. An axis of
        copies numbers channels, such as those of repeated heads, or tokens if it is one of `row_axes`.
        """
        layout, value = Layout(self.index, self.shape, row_axes) if row_axes else self.layout, self
        batch, length, width = self.shape
        tokens = layout.tokens
        if tokens.shape[1] != length or not bool((tokens == torch.arange(length, device=tokens.device)).all()):
            value = value.then(Mix("core", Gather(tokens, length, like=self.like)), tokens=tokens.shape[1])
        if not layout.has_all_channels:
            value = value.select(layout.channels)
        return value.moved(layout.own_index)

    def select(self, channels: Int[Tensor, " out"]) -> "Carried":
        """Return a value with the given channels of this one, by rows of its last matrix or by a matrix of ones."""
        if len(self.chains) == 1:
            ((port, chain),) = self.chains.items()
            if chain and isinstance(chain[-1], Matrix) and not chain[-1].weight.is_complex():
                last = chain[-1]
                bias = None if last.bias is None else last.bias[channels]
                chains = {port: (*chain[:-1], Matrix(last.role, last.weight[channels], bias))}
                shape = (*self.shape[:2], len(channels))
                return Carried(chains, shape, whole(shape, self.index), self.like)
        ones = self.like.new_zeros(len(channels), self.shape[2])
        ones[torch.arange(len(channels), device=ones.device), channels] = 1
        return self.then(Matrix("input", ones), channels=len(channels))


class Layout:
    """The token and the channel of every element of a carried tensor, as functions of separate axes.

    Attributes:
        sizes: sizes of the axes, after axes that are both have been split.
        is_row: for each axis, whether it numbers rows, that is sequences or tokens; others number channels, also axes
            along which an element is repeated.

    Raises `UncoveredError` for an index that is no product of rows and channels.
    """

    def __init__(self, index: Int[Tensor, "*axes"], shape: Shape, row_axes: frozenset[int] = frozenset()) -> None:
        self._index, self._shape, self._row_axes = index, shape, row_axes
        width = shape[2]
        self.row, self.channel = index // width, index % width
        # Sizes of each axis after it is split into axes that change only the row or only the channel.
        self.split = [self._split(axis) for axis in range(index.ndim)]
        self.sizes = [size for sizes in self.split for size, _ in sizes]
        self.is_row = [is_row for sizes in self.split for _, is_row in sizes]
        row, channel = self.row.reshape(self.sizes), self.channel.reshape(self.sizes)
        for axis, is_row in enumerate(self.is_row):
            row = row if is_row else row.narrow(axis, 0, 1)
            channel = channel.narrow(axis, 0, 1) if is_row else channel
        self.row, self.channel = row, channel

    @property
    def row_axes(self) -> list[int]:
        """The tensor's axes that number rows."""
        return [axis for axis, sizes in enumerate(self.split) if any(is_row and size > 1 for size, is_row in sizes)]

    def _split(self, axis: int) -> list[tuple[int, bool]]:
        """Return the sizes of an axis, outer first, and whether each changes the row."""
        size = self._index.shape[axis]
        before, after = prod(self._index.shape[:axis]), prod(self._index.shape[axis + 1 :])
        row, channel = (x.reshape(before, size, after) for x in (self.row, self.channel))
        split: list[tuple[int, bool]] = []
        if (
            axis in self._row_axes
            and _is_pure(row, channel, size) is False
            and not bool((channel != channel[:, :1]).any())
        ):
            return [(size, True)]
        while True:
            inner = next(inner for inner in _divisors(size) if _is_pure(row, channel, inner) is not None)
            if inner == 1 and size > 1:
                raise UncoveredError("tokens and channels are interleaved in one axis")
            split.insert(0, (inner, bool(_is_pure(row, channel, inner))))
            size //= inner
            if size == 1:
                return split
            row, channel = (x.reshape(before, size, -1)[:, :, :after] for x in (row, channel))
            # The first inner element stands for all: with (batch * head), the heads of a sequence have its row.

    @cached_property
    def rows(self) -> Int[Tensor, " row"]:
        """The row, sequence * length + token, of each row of the tensor in the order of its axes."""
        return self.row.flatten()

    @cached_property
    def channels(self) -> Int[Tensor, " channel"]:
        """The channel of each channel of the tensor in the order of its axes."""
        return self.channel.flatten()

    @property
    def has_all_channels(self) -> bool:
        """Whether the tensor has the channels of the value in their order."""
        channels, width = self.channels, self._shape[2]
        return len(channels) == width and bool((channels == torch.arange(width, device=channels.device)).all())

    @cached_property
    def is_whole(self) -> bool:
        """Whether every element of the value occurs once in the tensor."""
        batch, length, width = self._shape
        counts = (self.rows.numel(), batch * length), (self.channels.numel(), width)
        return all(a == b for a, b in counts) and all(
            len(torch.unique(x)) == len(x) for x in (self.rows, self.channels)
        )

    @cached_property
    def _order(self) -> Int[Tensor, " row"]:
        """The rows of the tensor by sequence."""
        return torch.argsort(self.rows // self._shape[1], stable=True)

    @cached_property
    def tokens(self) -> Int[Tensor, "batch row"]:
        """The token of each row, for each sequence in the order of the tensor's axes.

        Raises `UncoveredError` if the sequences have different numbers of rows.
        """
        batch, length, _ = self._shape
        sequences = self.rows // length
        counts = torch.bincount(sequences, minlength=batch)
        if not bool((counts == counts[0]).all()):
            raise UncoveredError("the sequences of a batch have different numbers of tokens")
        return (self.rows % length)[self._order].view(batch, -1)

    @property
    def own_index(self) -> Int[Tensor, "*axes"]:
        """The index of the tensor's elements in the value that `Carried.arranged` returns."""
        place = torch.empty_like(self._order)
        place[self._order] = torch.arange(len(place), device=place.device)
        width = self.channels.numel()
        index = place.view(self.row.shape) * width + torch.arange(width, device=place.device).view(self.channel.shape)
        return index.reshape(self._index.shape)

    def factor(self, factor: Float[Tensor, "*axes"]) -> Float[Tensor, "batch token group"]:
        """Return a factor of a whole tensor as one of the value: sizes are 1 where it is constant."""
        batch, length, width = self._shape
        factor = factor.expand(self._index.shape)
        varies = self._strides(factor)
        factor = factor.reshape(self.sizes)
        row_axes = [axis for axis, is_row in enumerate(self.is_row) if is_row]
        channel_axes = [axis for axis, is_row in enumerate(self.is_row) if not is_row]
        table = factor.permute(*row_axes, *channel_axes)
        table = table.reshape(prod(self.row.shape), prod(self.channel.shape))
        if not any(varies[axis] for axis in channel_axes):
            by_channel = table[:, :1]
        else:
            constant = 1
            if self.has_all_channels:
                for axis in reversed(channel_axes):
                    if varies[axis]:
                        break
                    constant *= self.sizes[axis]
            by_channel = table[:, ::constant] if constant > 1 else torch.empty_like(table)
            if constant == 1:
                by_channel[:, self.channels] = table
        if not any(varies[axis] for axis in row_axes):
            return by_channel[:1].reshape(1, 1, -1)
        result = torch.empty_like(by_channel)
        result[self.rows] = by_channel
        return result.view(batch, length, -1)

    def _strides(self, factor: Tensor) -> list[bool]:
        """Return for each split axis whether a factor of the tensor's shape changes along it."""
        varies: list[bool] = []
        for axis, sizes in enumerate(self.split):
            if factor.stride(axis) == 0 or factor.shape[axis] == 1:
                varies += [False] * len(sizes)
            else:
                varies += [True] * len(sizes)
        return varies


def whole(shape: Shape, like: Tensor) -> Int[Tensor, "batch token channel"]:
    """Return the index of a value itself."""
    return torch.arange(prod(shape), device=like.device).view(shape)


def added(first: Carried, second: Carried) -> Carried:
    """Return the sum of two carried tensors of one shape."""
    if first.shape != second.shape or not torch.equal(first.index, second.index):
        # The mean of all tokens is added to each of them: copies along an axis of the other's tokens are tokens.
        rows = frozenset(axis for term in (first, second) for axis in term.layout.row_axes)
        first, second = first.arranged(rows), second.arranged(rows)
        if first.shape != second.shape or not torch.equal(first.index, second.index):
            raise UncoveredError("two tensors are added whose tokens lie along different axes")
    chains = dict(first.chains)
    for port, chain in second.chains.items():
        chains[port] = _sum(chains[port], chain, first.like) if port in chains else chain
    return Carried(chains, first.shape, first.index, first.like)


def _sum(first: Chain, second: Chain, like: Tensor) -> Chain:
    """Return one chain for the sum of two, with their common first stages once."""
    common = 0
    while common < min(len(first), len(second)) and first[common] is second[common]:
        common += 1
    chains = first[common:], second[common:]
    if common:
        # Only a path around all stages is a residual of the layer.
        chains = tuple(chain or (Scale("skip", like.new_ones(1, 1, 1)),) for chain in chains)
    flat: list[Chain] = []
    for chain in chains:
        # Of three terms (a + b) + c, one branch.
        flat += chain[0].chains if len(chain) == 1 and isinstance(chain[0], Branch) else [chain]
    return (*first[:common], Branch("output", tuple(flat)))


def _is_pure(row: Tensor, channel: Tensor, inner: int) -> bool | None:
    """Tell whether the inner part of the middle axis changes only the row (True) or not (False); None if it is both."""
    before, size, after = row.shape
    row, channel = (x.view(before, size // inner, inner, after) for x in (row, channel))
    moves_row, moves_channel = (bool((x != x[:, :, :1]).any()) for x in (row, channel))
    if moves_row and moves_channel:
        return None
    return moves_row


def _divisors(size: int) -> list[int]:
    """Return the divisors of a size, the largest first."""
    return [d for d in range(size, 0, -1) if size % d == 0] or [1]
