"""The vectors T^h_ij x_j that pass through single heads of a layer's core, or through several of them together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.memory import parts as slices
from unilinattn.operator.contributions import sum_of_contributions, values_by_token
from unilinattn.operator.pairwise import PairwiseContributions, Tile, pairwise_of
from unilinattn.operator.scopes import restricted, scoped, sums_cores, through_core
from unilinattn.operator.stages import Center, Chain, Matrix, Scale, Stage, ToComplex, ToReal, run, run_adjoint

if TYPE_CHECKING:
    from unilinattn.operator.operator import MixerOperator

MOST_GROUPS = 1 << 15
"""Largest number of groups of a tile; a GPU's grid has fewer than 65536 on its third axis."""


@dataclass(frozen=True, eq=False)
class HeadContributions:
    """T^h_ij x_j: the contributions that pass through some heads of a layer's core, which follow its gate and norm.

    The stages after the core are frozen, so that the vectors of all heads and the paths around the core (a residual
    inside the module) add up to the contributions of the layer.

    Attributes:
        operator: the layer.
        chain: its stages without the paths around the core.
        channel_sets: the channels of the core in each part, which is a head or several heads together.
        channels: number of channels of the core.
    """

    operator: "MixerOperator"
    chain: Chain
    channel_sets: Int[Tensor, "part width"]
    channels: int

    @classmethod
    def of(cls, operator: "MixerOperator", heads: Sequence[int], *, joint: bool) -> "HeadContributions":
        """Return the contributions through each of `heads`, or the `joint` contributions through all of them.

        Heads are those of the scope `core`, each a block of consecutive channels, counted from 0. Raises
        `UncoveredError` for a core that mixes channels and for a sum of cores with projections of their own.
        """
        total = operator.num_heads("core")
        port = operator.ports[0]
        whole, x = operator.chains[port], operator.inputs[port]
        chain = through_core(whole)
        if chain is None or sums_cores(chain):
            raise UncoveredError(
                f"{operator.name} sums several cores with projections of their own, so a head is not a part of its "
                "output; leave heads and by_head out."
            )
        channels = scoped(whole, "core", x.shape[2])[1]
        blocks = torch.arange(channels, device=operator.output.device).view(total, -1)[list(heads)]
        return cls(operator, chain, blocks.view(1, -1) if joint else blocks, channels)

    @property
    def count(self) -> int:
        """Number of parts."""
        return len(self.channel_sets)

    def output(self, activation: str) -> Float[Tensor, "batch query out"]:
        """Return sum_j T^h_ij x_j summed over the parts, in linear time."""
        factors = self.operator.output.new_zeros(self.channels)
        factors[self.channel_sets.flatten()] = 1
        chain, x = restricted(self.chain, factors), self._input
        assert chain is not None
        return sum_of_contributions(chain, x, self.operator.name, activation)

    def adjoint(self, grad: Float[Tensor, "batch query out"], part: int) -> Float[Tensor, "batch key in"]:
        """Return sum_i grad_i . T^h_ij as a vector for each key j, of one part."""
        factors = self.operator.output.new_zeros(self.channels)
        factors[self.channel_sets[part]] = 1
        chain = restricted(self.chain, factors)
        assert chain is not None
        return run_adjoint(chain, grad.to(self.operator.output.dtype))

    def around(self) -> Float[Tensor, "batch query out"]:
        """Return the part of the output, without bias, that passes around the core, such as a residual inside."""
        whole = self.operator.chains[self.operator.ports[0]]
        if len(self.chain) == len(whole) and all(a is b for a, b in zip(self.chain, whole, strict=True)):
            return torch.zeros_like(self.operator.output)
        return run(whole, self._input, bias=False) - run(self.chain, self._input, bias=False)

    def pairwise(self) -> PairwiseContributions | None:
        """Return the contributions through all heads as tiles of all pairs, None if only rows can be computed."""
        return pairwise_of(self.chain, self._input, *self.operator.output.shape[1:])

    def tiles(self, form: PairwiseContributions, factor: float, rows: int) -> Iterator[tuple[slice, Tile]]:
        """Yield `factor` times the vectors of all pairs: slices of the parts with tiles of at most `rows` rows."""
        form = form.times(factor)
        after = form.tail if form.weight is None else (Matrix("output", form.weight), *form.tail)
        split = _Split.of(after, self.channel_sets, self.channels, form.values.dtype)
        for tile in form.tiles_before_tail(form.causal, rows=rows):
            yield from split.tiles(tile, tile.diagonal + tile.cols.start, folded=form.folded is not None)

    def rows(
        self, index: Int[Tensor, "batch row"], rows: slice, factor: float, activation: str
    ) -> Iterator[tuple[slice, Tile]]:
        """Yield `factor` times the vectors of the queries `index`, which are the rows `rows` of the tiles."""
        name, like, x = self.operator.name, self.operator.output, self._input
        values, after = values_by_token(self.chain, index, x, like, name, activation)
        first = next((k for k, stage in enumerate(after) if not isinstance(stage, Scale)), len(after))
        for stage in after[:first]:
            values = stage.at(index).apply(values, bias=False)
        values = (values if factor == 1 else factor * values).transpose(1, 2)
        split = _Split.of(after[first:], self.channel_sets, self.channels, values.dtype)
        yield from split.tiles(Tile(rows, slice(0, x.shape[1]), values, None, index), index, folded=False)

    @property
    def _input(self) -> Float[Tensor, "batch key in"]:
        return self.operator.inputs[self.operator.ports[0]].to(self.operator.output.dtype)


@dataclass(frozen=True, eq=False)
class _Split:
    """The stages after the values of the core's channels, by part.

    Attributes:
        channel_sets: the channels of each part.
        channels: number of channels.
        weight: the matrix that reads the channels, None if other stages come first.
        tail: the stages after the matrix, or all stages.
        dtype: dtype of the values.
    """

    channel_sets: Int[Tensor, "part width"]
    channels: int
    weight: Float[Tensor, "out channel"] | None
    tail: Chain
    dtype: torch.dtype

    @classmethod
    def of(cls, after: Chain, channel_sets: Int[Tensor, "part width"], channels: int, dtype: torch.dtype) -> "_Split":
        """Split stages at a real matrix that is the first of them."""
        if after and isinstance(after[0], Matrix) and not after[0].is_complex:
            return cls(channel_sets, channels, after[0].weight, after[1:], dtype)
        return cls(channel_sets, channels, None, after, dtype)

    def tiles(self, tile: Tile, index: Int[Tensor, "batch row"], *, folded: bool) -> Iterator[tuple[slice, Tile]]:
        """Yield the parts of a tile of all channels, of the queries `index`, several at a time if no stage follows.

        A `folded` tile has one channel for each head, and its values in the weights.
        """
        batch, count = index.shape[0], len(self.channel_sets)
        by_part = self._folded if folded else self._channels
        if self.weight is not None and not self.tail:
            step = max(1, MOST_GROUPS // (len(tile.inner) if folded else batch))
            for span in slices(count, step):
                yield span, by_part(tile, span)
            return
        for number in range(count):
            span = slice(number, number + 1)
            vectors = by_part(tile, span).vectors()
            for stage in self.tail if self.weight is not None else self._tails[number]:
                vectors = stage.at(index).apply(vectors.transpose(1, 2), bias=False).transpose(1, 2)
            yield span, replace(tile, inner=vectors, weight=None, portions=1)

    def _channels(self, tile: Tile, span: slice) -> Tile:
        """Return the tile of some parts, whose channels are those of the values."""
        channels = self.channel_sets[span]
        count, width = channels.shape
        inner = tile.inner if self._is_whole(channels) else tile.inner[:, channels.flatten()]
        inner = inner.unflatten(1, (count, width)).flatten(0, 1)
        weight = None if self._by_part is None else self._by_part[span].expand(len(tile.inner), -1, -1, -1)
        weight = None if weight is None else weight.flatten(0, 1)
        return replace(tile, inner=inner, weight=weight, portions=count)

    def _folded(self, tile: Tile, span: slice) -> Tile:
        """Return the tile of some parts, whose channels are heads: their values are in the weights of each key."""
        assert tile.weight is not None
        heads = self._heads(tile.inner.shape[1])[span]
        count, width = heads.shape
        batch = len(tile.diagonal)
        inner = tile.inner[:, heads.flatten()].unflatten(1, (count, width)).unflatten(0, (batch, -1)).transpose(1, 2)
        weight = tile.weight[..., heads.flatten()].unflatten(2, (count, width)).unflatten(0, (batch, -1))
        weight = weight.permute(0, 3, 1, 2, 4)
        return replace(tile, inner=inner.flatten(0, 2), weight=weight.flatten(0, 2), portions=count)

    def _heads(self, heads: int) -> Int[Tensor, "part head"]:
        """Return the heads of each part."""
        width = self.channels // heads
        return self.channel_sets[:, ::width] // width

    def _is_whole(self, channels: Int[Tensor, "part width"]) -> bool:
        return channels.numel() == self.channels and bool((channels.flatten().diff() == 1).all())

    @cached_property
    def _by_part(self) -> Float[Tensor, "part out width"] | None:
        """The columns of the weight that read each part."""
        return None if self.weight is None else self.weight[:, self.channel_sets].transpose(0, 1).contiguous()

    @cached_property
    def _tails(self) -> list[Chain]:
        """The stages for values of the channels of one part."""
        return [_of_channels(self.tail, channels, self.channels, self.dtype) for channels in self.channel_sets]


def _of_channels(stages: Chain, index: Int[Tensor, " channel"], total: int, dtype: torch.dtype) -> Chain:
    """Return stages for some of their `total` input channels, the others being zero."""
    passed: list[Stage] = []
    for k, stage in enumerate(stages):
        if isinstance(stage, Matrix):
            return (*passed, Matrix(stage.role, stage.weight[:, index]), *stages[k + 1 :])
        narrowed = _restricted(stage, index, total)
        if narrowed is None:
            break
        passed.append(narrowed)
    # A stage that mixes all channels needs the zeros, and so does the output.
    return (Matrix("core", torch.eye(total, dtype=dtype, device=index.device)[:, index]), *stages)


def _restricted(stage: Stage, index: Int[Tensor, " channel"], total: int) -> Stage | None:
    """Return a stage for some channels, None if it reads other channels too."""
    if isinstance(stage, ToComplex | ToReal):
        return stage
    if isinstance(stage, Scale):
        return Scale(stage.role, stage.scale[..., index // (total // stage.scale.shape[-1])])
    if isinstance(stage, Center):
        width = total // stage.centred_groups
        if len(index) % width == 0:
            blocks = index.view(-1, width)
            whole = blocks[:, :1] + torch.arange(width, device=index.device)
            if bool((blocks == whole).all() and (blocks[:, 0] % width == 0).all()):
                return Center(stage.role, len(blocks))
    return None
