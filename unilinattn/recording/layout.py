"""`Carried`: a tensor of a host as elements of a value (batch, token, channel) that stages compute.

A view, a permutation, a window partition or a gather moves elements and computes none, so a carried tensor is a chain
of stages and an index: for each element of the tensor, its position in the chain's flattened output. `Layout` reads
from the index which axes of the tensor are tokens and which are channels, in any order and also where one axis is both:
in (batch * head, token, channel) the first axis is a batch outside and a head inside.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
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

    def follow(self, stages: Chain, channels: int) -> "Carried":
        """Append stages that keep the tokens; the tensor is then their whole output, of `channels` channels."""
        carried = self
        for stage in stages:
            carried = carried.same_elements(stage)
        shape = *self.shape[:2], channels
        return replace(carried, shape=shape, index=whole(shape, self.index))

    def then(self, stage: Stage, *, tokens: int | None = None, channels: int | None = None) -> "Carried":
        """Append a stage; the tensor is then its whole output, (batch, token, channel)."""
        first = next(iter(self.chains))
        chains = {port: (*chain, stage if port == first else stage.unbiased()) for port, chain in self.chains.items()}
        shape = self.shape[0], tokens or self.shape[1], channels or self.shape[2]
        return replace(self, chains=chains, shape=shape, index=whole(shape, self.index))

    def same_elements(self, stage: Stage) -> "Carried":
        """Append a stage that keeps the shape of the value; the tensor's elements stay where they are."""
        return self.then(stage).moved(self.index)

    def arranged(self, row_axes: frozenset[int] = frozenset()) -> "Carried":
        """Return the tensor as a value (batch, token, channel) in the order of the tensor's own axes.

        Tokens come in the order of the axes that are tokens, channels in that of the axes that are channels. An axis of
        copies numbers channels, such as those of repeated heads, or tokens if it is one of `row_axes`.
        """
        layout = self.layout_with(row_axes)
        value = self.with_tokens(layout.tokens)
        value = value if layout.has_all_channels else value.select(layout.channels)
        return value.moved(layout.own_index)

    def in_place(self) -> "Carried":
        """Return the tensor with its channels in order; some of the tokens, in their order, stay where they are."""
        layout = self.layout
        if not layout.has_some_rows:
            return self.arranged()
        value = self if layout.has_all_channels else self.select(layout.channels)
        return value.moved(layout.index_in(value.shape[2]))

    def layout_with(self, row_axes: frozenset[int]) -> "Layout":
        """Return the layout in which axes of copies number tokens if they are among `row_axes`."""
        return Layout(self.index, self.shape, row_axes) if row_axes else self.layout

    def with_tokens(self, tokens: Int[Tensor, "batch token"]) -> "Carried":
        """Return the value with other tokens of it."""
        length = self.shape[1]
        if tokens.shape[1] == length and bool((tokens == _range(length, tokens)).all()):
            return self
        return self.then(Mix("core", Gather(tokens, length, like=self.like)), tokens=tokens.shape[1])

    def select(self, channels: Int[Tensor, " out"]) -> "Carried":
        """Return the value with other channels of it, by rows of its last matrix or by a matrix of ones."""
        chain = next(iter(self.chains.values()))
        last = chain[-1] if chain and len(self.chains) == 1 else None
        if isinstance(last, Matrix) and not last.is_complex:
            bias = None if last.bias is None else last.bias[channels]
            rows: Any = channels
            if torch.equal(channels, channels[:1] + _range(len(channels), channels)):
                # A slice is a view of the weight.
                rows = slice(int(channels[0]), int(channels[0]) + len(channels))
            return with_last(self, Matrix(last.role, last.matrix[rows], bias), channels=len(channels))
        ones = self.like.new_zeros(len(channels), self.shape[2])
        ones[_range(len(channels), ones), channels] = 1
        return self.then(Matrix("input", ones), channels=len(channels))


class Layout:
    """The row (sequence and token) and the channel of each element of a tensor, as functions of separate axes.

    Args:
        index: the position of each element in a flattened value.
        shape: (batch, token, channel) of the value.
        row_axes: axes of copies that number rows; other axes of copies number channels.

    Attributes:
        split: for each axis of the tensor, the axes that it is split into, outer first: size, and whether it numbers
            rows.

    Raises `UncoveredError` for an index that is no product of rows and channels.
    """

    def __init__(self, index: Int[Tensor, "*axes"], shape: Shape, row_axes: frozenset[int] = frozenset()) -> None:
        if bool((index < 0).any()):
            raise UncoveredError("steps of a token before its last one are read")
        self._index, self._shape = index, shape
        row, channel = index // shape[2], index % shape[2]
        self.split = [_split(row, channel, axis, copies_are_rows=axis in row_axes) for axis in range(index.ndim)]
        self._sizes = [size for axes in self.split for size, _ in axes]
        self._is_row = [is_row for axes in self.split for _, is_row in axes]
        row, channel = row.reshape(self._sizes), channel.reshape(self._sizes)
        for axis, is_row in enumerate(self._is_row):
            row = row if is_row else row.narrow(axis, 0, 1)
            channel = channel.narrow(axis, 0, 1) if is_row else channel
        self._row, self._channel = row, channel

    @property
    def row_axes(self) -> frozenset[int]:
        """The tensor's axes that number rows."""
        axes = enumerate(self.split)
        return frozenset(axis for axis, split in axes if any(is_row and size > 1 for size, is_row in split))

    @property
    def channels(self) -> Int[Tensor, " channel"]:
        """The channels in the order of the tensor's axes."""
        return self._channel.flatten()

    @cached_property
    def has_all_channels(self) -> bool:
        """Whether the tensor has the channels of the value in their order."""
        channels = self.channels
        return len(channels) == self._shape[2] and torch.equal(channels, _range(len(channels), channels))

    @cached_property
    def is_whole(self) -> bool:
        """Whether every element of the value occurs once in the tensor."""
        batch, length, width = self._shape
        sizes = (self._row.flatten(), batch * length), (self.channels, width)
        return all(len(x) == size and len(torch.unique(x)) == size for x, size in sizes)

    @cached_property
    def has_some_rows(self) -> bool:
        """Whether the tensor has some of the rows of the value in their order, such as the real tokens of a batch."""
        rows = self._row.flatten()
        return len(rows) < self._shape[0] * self._shape[1] and bool((rows.diff() > 0).all())

    @cached_property
    def order(self) -> Int[Tensor, " row"]:
        """The rows of the tensor, sequence by sequence."""
        return torch.argsort(self._row.flatten() // self._shape[1], stable=True)

    @cached_property
    def tokens(self) -> Int[Tensor, "batch row"]:
        """The token of each row of a sequence, in the order of the tensor's axes.

        Raises `UncoveredError` if the sequences have different numbers of rows.
        """
        batch, length, _ = self._shape
        rows = self._row.flatten()
        counts = torch.bincount(rows // length, minlength=batch)
        if not bool((counts == counts[0]).all()):
            raise UncoveredError("the sequences of a batch have different numbers of tokens")
        return (rows % length)[self.order].view(batch, -1)

    @property
    def own_index(self) -> Int[Tensor, "*axes"]:
        """The index of the tensor's elements in the value that `Carried.arranged` returns."""
        row = torch.empty_like(self.order)
        row[self.order] = _range(len(row), row)
        channel = _range(self._channel.numel(), row).view(self._channel.shape)
        return (row.view(self._row.shape) * channel.numel() + channel).reshape(self._index.shape)

    def index_in(self, width: int) -> Int[Tensor, "*axes"]:
        """Return the index of the tensor's elements in a value of `width` channels, which are those of the tensor."""
        channel = _range(width, self._row).view(self._channel.shape)
        return (self._row * width + channel).reshape(self._index.shape)

    def table(self, values: Shaped[Tensor, "*axes"]) -> Shaped[Tensor, "row channel"]:
        """Return values of the tensor's shape by row and channel, in the order of the tensor's axes."""
        rows = [axis for axis, is_row in enumerate(self._is_row) if is_row]
        channels = [axis for axis, is_row in enumerate(self._is_row) if not is_row]
        return values.reshape(self._sizes).permute(*rows, *channels).reshape(self._row.numel(), self._channel.numel())

    def factor(self, factor: Float[Tensor, "*broadcast"]) -> Float[Tensor, "batch token group"]:
        """Return a factor of a whole tensor as one of the value, with size 1 for what it does not depend on.

        It is zero for tokens that the tensor lacks. Channels are grouped if the factor is equal for consecutive ones,
        such as those of a head.
        """
        batch, length, _ = self._shape
        factor = factor.expand(self._index.shape)
        varies = self._varies(factor)
        table = self.table(factor)
        by_channel = [v for v, is_row in zip(varies, self._is_row, strict=True) if not is_row]
        if not any(by_channel):
            table = table[:, :1]
        elif self.has_all_channels:
            sizes = [size for size, is_row in zip(self._sizes, self._is_row, strict=True) if not is_row]
            last = max(axis for axis, v in enumerate(by_channel) if v)
            table = table[:, :: prod(sizes[last + 1 :])]
        else:
            table = torch.empty_like(table).index_copy_(1, self.channels, table)
        if not any(v for v, is_row in zip(varies, self._is_row, strict=True) if is_row):
            return table[:1].reshape(1, 1, -1)
        rows = table.new_zeros(batch * length, table.shape[1])
        return rows.index_copy_(0, self._row.flatten(), table).view(batch, length, -1)

    def _varies(self, factor: Tensor) -> list[bool]:
        """Tell for each split axis whether an expanded factor may change along it."""
        steps = zip(factor.stride(), factor.shape, self.split, strict=True)
        return [step != 0 and size > 1 for step, size, split in steps for _ in split]


def whole(shape: Shape, like: Tensor) -> Int[Tensor, "batch token channel"]:
    """Return the index of a value itself."""
    return _range(prod(shape), like).view(shape)


def with_last(carried: Carried, stage: Stage, *, channels: int | None = None) -> Carried:
    """Return a tensor of one port with another last stage; a number of channels makes it the whole output."""
    ((port, chain),) = carried.chains.items()
    chains = {port: (*chain[:-1], stage)}
    if channels is None:
        return replace(carried, chains=chains)
    shape = (*carried.shape[:2], channels)
    return replace(carried, chains=chains, shape=shape, index=whole(shape, carried.index))


def added(first: Carried, second: Carried) -> Carried:
    """Return the sum of two carried tensors of one shape.

    Raises `UncoveredError` if tokens of one lie along an axis of channels of the other.
    """
    if first.shape != second.shape or not torch.equal(first.index, second.index):
        # The mean of all tokens may be added to each of them: its copies along an axis of tokens are tokens.
        row_axes = first.layout.row_axes | second.layout.row_axes
        first, second = first.arranged(row_axes), second.arranged(row_axes)
        if first.shape != second.shape or not torch.equal(first.index, second.index):
            raise UncoveredError("two tensors are added whose tokens lie along different axes")
    chains = dict(first.chains)
    for port, chain in second.chains.items():
        chains[port] = _sum(chains[port], chain, first.like) if port in chains else chain
    return replace(first, chains=chains)


def _sum(first: Chain, second: Chain, like: Tensor) -> Chain:
    """Return one chain for the sum of two, with their common first stages once."""
    common = 0
    while common < min(len(first), len(second)) and first[common] is second[common]:
        common += 1
    chains: list[Chain] = []
    for chain in (first[common:], second[common:]):
        if len(chain) == 1 and isinstance(chain[0], Branch):
            # Three terms (a + b) + c are one branch.
            chains += chain[0].chains
        else:
            # Only a path around all stages is a residual of the layer.
            chains.append(chain if chain or not common else (Scale("skip", like.new_ones(1, 1, 1)),))
    return (*first[:common], Branch("output", tuple(chains)))


def _split(
    row: Int[Tensor, "*axes"], channel: Int[Tensor, "*axes"], axis: int, *, copies_are_rows: bool
) -> list[tuple[int, bool]]:
    """Split an axis into axes that change only the row or only the channel, outer first."""
    size, before = row.shape[axis], prod(row.shape[:axis])
    after = prod(row.shape[axis + 1 :])
    row, channel = (x.reshape(before, size, after) for x in (row, channel))
    if copies_are_rows and not bool(_changes(row, size) | _changes(channel, size)):
        return [(size, True)]
    split: list[tuple[int, bool]] = []
    while True:
        for inner in _divisors(size):
            # With 2 sequences of 3 heads in one axis of 6, three consecutive entries differ in their channel only.
            moves_row, moves_channel = _changes(row, inner), _changes(channel, inner)
            if not bool(moves_row & moves_channel):
                break
        if inner == 1 and size > 1:
            raise UncoveredError("tokens and channels are interleaved in one axis")
        split.insert(0, (inner, bool(moves_row)))
        size //= inner
        if size == 1:
            return split
        # The first inner entry stands for all of them.
        row, channel = (x.reshape(before, size, -1)[:, :, :after] for x in (row, channel))


def _changes(x: Int[Tensor, "before size after"], inner: int) -> Bool[Tensor, ""]:
    """Tell whether numbers change along the inner part of the middle axis."""
    parts = x.reshape(x.shape[0], -1, inner, x.shape[2])
    return (parts != parts[:, :, :1]).any()


def _divisors(size: int) -> list[int]:
    """Return the divisors of a size, the largest first."""
    return [divisor for divisor in range(size, 0, -1) if size % divisor == 0]


def _range(size: int, like: Tensor) -> Int[Tensor, " entry"]:
    return torch.arange(size, device=like.device)
