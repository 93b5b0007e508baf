"""`inner_core`: the part of a frozen module that mixes the tokens of each channel by themselves, as a core mixer.

A loop over tokens is no chain of stages, but its graph has few tensors through which all values pass: of Mamba's block
these are the vectors before the convolution, those that enter the scan and those that leave it. The map between two of
them is a matrix for each channel if a channel of the second depends on the same channel of the first alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from unilinattn.call.exactness import layer_tolerance
from unilinattn.kernels.subnormal import flushed
from unilinattn.memory import parts
from unilinattn.mixers import CoreMixer
from unilinattn.mixers.base import ALL, Block

CONVOLUTION = "ConvolutionBackward"
"""The beginning of the name of a graph node that mixes the tokens of a window."""

BESIDE = (
    CONVOLUTION,
    *(f"{name}Backward" for name in ("Slice", "ConstantPadNd", "Clone", "View", "UnsafeView", "Transpose", "Permute")),
    *(f"{name}Backward" for name in ("Squeeze", "Unsqueeze", "Add")),
    "torch::autograd::Identity",
)
"""Beginnings of the names of nodes from the input of a convolution to its output."""

SMALL = 2**24
"""Largest number of elements of matrices that are computed once."""

Node = Any
"""A node of a graph of autograd, whose class is none of Python's."""

Made = Mapping[tuple[Node, int], tuple[Tensor, Tensor | None]]
"""Tensors of a graph and the parts of them that come from constants, by the node and the number of its output."""


@dataclass(frozen=True, eq=False)
class Cut:
    """A tensor of a graph through which all values pass, (batch, ..., token, ...).

    Attributes:
        edge: the tensor's place in the graph.
        value: the tensor.
        axis: the axis of tokens.
        level: the part of the tensor that comes from constants, None without.
    """

    edge: GradientEdge
    value: Tensor
    axis: int
    level: Tensor | None = None

    def vectors(self, tensor: Tensor) -> Shaped[Tensor, "batch token channel"]:
        """Return a tensor of the cut's shape, or its index, by token and channel."""
        return tensor.movedim(self.axis, 1).flatten(2)

    def tensor(self, vectors: Shaped[Tensor, "batch token channel"]) -> Tensor:
        """Return vectors in the shape of the cut."""
        first = self.value.movedim(self.axis, 1).shape
        return vectors.reshape(first).movedim(1, self.axis)


class Channelwise(CoreMixer):
    """A matrix for each channel, by passes through the graph between two cuts.

    `apply` and `adjoint` take a pass for each column, and a row of the matrices of all channels takes one pass.

    Args:
        entered: the cut that enters.
        left: the cut that leaves.
    """

    structure = "recorded"
    causal = False
    data_controlled = True
    in_graph = True

    def __init__(self, entered: Cut, left: Cut) -> None:
        """Store the cuts; their graph lives as long as the mixer."""
        self.entered, self.left = entered, left

    def __deepcopy__(self, memo: dict[int, Any]) -> "Channelwise":
        """Return the mixer itself: a graph has no copies, and does not change."""
        return self

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, channels, queries, keys)."""
        batch, length, channels = self.entered.vectors(self.entered.value).shape
        return batch, channels, length, length

    def apply(self, value: Float[Tensor, "batch key head column"]) -> Float[Tensor, "batch query head column"]:
        """Map each column by the derivative in forward direction."""
        return torch.stack([self.push(column) for column in value.unbind(3)], 3)

    def adjoint(self, grad: Float[Tensor, "batch query head column"]) -> Float[Tensor, "batch key head column"]:
        """Map each column by the derivative in backward direction."""
        return torch.stack([self.pull(column) for column in grad.unbind(3)], 3)

    def push(self, vectors: Float[Tensor, "batch key channel"]) -> Float[Tensor, "batch query channel"]:
        """Map vectors forward."""
        direction, gradient = self._pulled
        image = _gradient(gradient, direction, self.entered.tensor(vectors))
        return self.left.vectors(image)

    def pull(self, vectors: Float[Tensor, "batch query channel"]) -> Float[Tensor, "batch key channel"]:
        """Map vectors backward."""
        return self.entered.vectors(_gradient(self.left.edge, self.entered.edge, self.left.tensor(vectors)))

    @cached_property
    def _pulled(self) -> tuple[Tensor, Tensor]:
        """A vector at the end and its image at the beginning, whose derivative is the map in forward direction."""
        direction = torch.zeros_like(self.left.value, requires_grad=True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.left.edge, self.entered.edge, direction, create_graph=True)
        return direction, gradient

    @cached_property
    def _small(self) -> Float[Tensor, "batch head query key"] | None:
        """The matrices, None if they are large: methods read each block of them many times."""
        return self._passed(range(self.shape[2])) if prod(self.shape) <= SMALL else None

    def _rows(self, rows: Sequence[int]) -> Float[Tensor, "batch head row key"]:
        """Return rows of the matrices of all channels."""
        return self._passed(rows) if self._small is None else self._small[:, :, [*rows]]

    def _passed(self, rows: Sequence[int]) -> Float[Tensor, "batch head row key"]:
        """Return rows of the matrices of all channels, one pass for each."""
        batch, heads, length, keys = self.shape
        block = self.zeros((batch, heads, len(rows), keys))
        for place, row in enumerate(rows):
            unit = self.zeros((batch, length, heads))
            unit[:, row] = 1
            block[:, :, place] = self.pull(unit).mT
        return flushed(block)

    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Read the columns of some rows."""
        return self._rows(range(self.shape[2])[rows])[:, heads, :, cols]

    def blocks(self, rows: int) -> Iterator[tuple[slice, Block]]:
        """Yield blocks of rows; all columns of a block take the passes of its rows once."""
        for tokens in parts(self.shape[2], rows):
            block = self._rows(range(self.shape[2])[tokens])
            yield tokens, partial(_columns, block)

    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Read the diagonal of each row."""
        every = range(self.shape[2])
        return torch.cat([self._rows([row])[..., row] for row in every], 2)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the graph."""
        return self.entered.value.new_zeros(shape)


def _columns(block: Tensor, cols: slice) -> Tensor:
    return block[..., cols]


@dataclass(frozen=True)
class InnerCore:
    """The core of a frozen module.

    Attributes:
        entered, left: the cuts around the mixer and the skip.
        mixer: its matrices.
        skip: the factors of what enters that are added to the mixer's output, None without.
        bias: what constants between the cuts add to that, None without.
    """

    entered: Cut
    left: Cut
    mixer: Channelwise
    skip: Float[Tensor, "batch token channel"] | None
    bias: Float[Tensor, "batch token channel"] | None


def inner_core(result: Tensor, source: Tensor, made: Made) -> InnerCore | None:
    """Return the innermost part of a graph with all that mixes tokens but convolutions, None if it mixes channels too.

    Args:
        result: the end of the graph, (batch, token, channel).
        source: its leaf, (batch, token, channel).
        made: the tensors in it that may be cuts.
    """
    if source.shape[:2] != result.shape[:2] or source.shape[1] < 2:
        return None
    first, last = Cut(get_gradient_edge(source), source, 1), Cut(get_gradient_edge(result), result, 1)
    between = [_candidates(edge, source, made) for edge in _cuts(result, source) if (edge.node, edge.output_nr) in made]
    for passes in (_convolves, lambda begin, end: False):
        entered = _walked(first, [*reversed(between), [last]], lambda cut, other: (cut, other), passes)
        if entered is last:
            continue
        left = _walked(last, [*between, [first]], lambda cut, other: (other, cut), passes)
        if not _is_channelwise(core := Channelwise(entered, left)):
            return None
        return InnerCore(entered, left, *_without_skip(core, made), _bias_of(core))
    return None


def _candidates(edge: GradientEdge, source: Tensor, made: Made) -> list[Cut]:
    """Return a tensor of a graph with each axis that may be that of the tokens of the source."""
    value, level = made[edge.node, edge.output_nr]
    length = source.shape[1]
    axes = range(1, value.ndim) if value.ndim > 2 else ()
    return [Cut(edge, value, axis, level) for axis in axes if value.shape[axis] == length]


def _cuts(result: Tensor, source: Tensor) -> Iterator[GradientEdge]:
    """Yield the tensors through which all paths of a graph pass, from its end on, without the end and the leaf."""
    leaf = get_gradient_edge(source).node
    uses = _uses(result.grad_fn, leaf)
    pending: dict[Node, set[int]] = {get_gradient_edge(result).node: {get_gradient_edge(result).output_nr}}
    counts = dict.fromkeys(pending, 0)
    ready = list(pending)
    while ready:
        node = ready.pop()
        numbers = pending.pop(node)
        if not pending and len(numbers) == 1 and node is not leaf and node is not result.grad_fn:
            yield GradientEdge(node, min(numbers))
        for inner, number in node.next_functions:
            if inner in uses:
                pending.setdefault(inner, set()).add(number)
                counts[inner] = counts.get(inner, 0) + 1
                if counts[inner] == uses[inner]:
                    ready.append(inner)


def _uses(end: Node, leaf: Node) -> dict[Node, int]:
    """Return how often each node on a path to the leaf is read by others on such a path."""
    order: list[Node] = []
    entered: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(end, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack += [(inner, False) for inner, _ in node.next_functions if inner is not None]
    reaching = {leaf}
    for node in order:
        if any(inner in reaching for inner, _ in node.next_functions):
            reaching.add(node)
    uses = dict.fromkeys(reaching, 0)
    for node in reaching:
        for inner, _ in node.next_functions:
            if inner in uses:
                uses[inner] += 1
    return uses


def _walked(
    cut: Cut,
    edges: Sequence[Sequence[Cut]],
    ordered: Callable[[Cut, Cut], tuple[Cut, Cut]],
    passes: Callable[[Cut, Cut], bool],
) -> Cut:
    """Return the last cut on a way from one end before tokens mix; what `passes` may mix them."""
    for candidates in edges:
        # Tokens usually stay where they are.
        others = sorted(candidates, key=lambda other: other.axis != cut.axis)
        pairs = [(ordered(cut, other), other) for other in others]
        after = next((other for pair, other in pairs if not _mixes(*pair)), None)
        after = after or next((other for pair, other in pairs if passes(*pair)), None)
        if after is None:
            break
        cut = after
    return cut


def _mixes(begin: Cut, end: Cut) -> bool:
    """Tell whether some tokens of the end come from other tokens of the beginning."""
    length = begin.value.shape[begin.axis]
    generator = torch.Generator().manual_seed(0)
    half = (torch.randperm(length, generator=generator, device="cpu") < length // 2).to(begin.value.device)
    probe = torch.randn(end.value.shape, generator=generator, device="cpu").to(end.value)
    for perturbed in (half, ~half):
        vectors = end.vectors(probe) * perturbed[:, None]
        image = begin.vectors(_gradient(end.edge, begin.edge, end.tensor(vectors)))
        if float(image[:, ~perturbed].norm()) > layer_tolerance(image.dtype) * float(image.norm()):
            return True
    return False


def _convolves(begin: Cut, end: Cut) -> bool:
    """Tell whether the tokens between two cuts mix by a convolution alone."""
    inside = _uses(end.edge.node, begin.edge.node).keys() - {begin.edge.node}
    names = [node.name() for node in inside]
    return any(name.startswith(CONVOLUTION) for name in names) and all(name.startswith(BESIDE) for name in names)


def _is_channelwise(core: Channelwise) -> bool:
    """Tell whether each channel of the end comes from the same channel of the beginning alone."""
    batch, channels, length, _ = core.shape
    if core.left.vectors(core.left.value).shape != (batch, length, channels):
        return False
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn((batch, length, channels), generator=generator, device="cpu").to(core.left.value)
    number = torch.rand(channels, generator=generator, device="cpu").to(probe) + 0.5
    image = core.pull(probe) * number
    return float((core.pull(probe * number) - image).norm()) <= layer_tolerance(image.dtype) * float(image.norm())


def _without_skip(core: Channelwise, made: Made) -> tuple[Channelwise, Tensor | None]:
    """Return a core without the term of its end that mixes no tokens, and the factors of this term."""
    left = core.left
    cuts = [
        Cut(GradientEdge(node, number), made[node, number][0], left.axis)
        for node, number in left.edge.node.next_functions
        if node is not None and (node, number) in made and made[node, number][0].shape == left.value.shape
    ]
    if not left.edge.node.name().startswith("AddBackward") or len(cuts) != 2:
        return core, None
    begins = core.entered.edge.node
    if any(begins not in (uses := _uses(cut.edge.node, begins)) or not uses[begins] for cut in cuts):
        return core, None
    mixing = [cut for cut in cuts if _mixes(core.entered, cut)]
    skipping = [cut for cut in cuts if cut not in mixing]
    if len(mixing) != 1:
        return core, None
    ones = torch.ones_like(left.vectors(left.value))
    return Channelwise(core.entered, mixing[0]), Channelwise(core.entered, skipping[0]).pull(ones)


def _bias_of(core: Channelwise) -> Tensor | None:
    """Return what constants between the cuts add to the tensor that leaves, None without."""
    before, after = (None if cut.level is None else cut.vectors(cut.level) for cut in (core.entered, core.left))
    carried = None if before is None or not bool(before.any()) else core.push(before)
    if after is None or carried is None:
        return after if carried is None else -carried
    bias = after - carried
    # Constants before the cut that enters come through the core.
    return None if float(bias.norm()) <= layer_tolerance(bias.dtype) * float(after.norm()) else bias


def _gradient(output: Tensor | GradientEdge, point: Tensor | GradientEdge, vectors: Tensor) -> Tensor:
    """Return the product of vectors with the derivative of an output with respect to a point."""
    is_live = torch.is_grad_enabled() and vectors.requires_grad
    (product,) = torch.autograd.grad(output, point, vectors, retain_graph=True, create_graph=is_live)
    return product
