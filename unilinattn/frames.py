"""`Frame`: one call of one module of a host; and where a layer's output joins the residual stream."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unilinattn.architectures.call import Call, Seen
from unilinattn.errors import UncoveredError
from unilinattn.registry import Architecture

BLOCK = 1 << 20
"""Numbers that are compared in float64 at once."""


@dataclass(frozen=True)
class Place:
    """How a host adds a layer's output to a stream: stream + multiplier * output, seen to hold up to rounding.

    `beside` is the other layer of a block that only the sum of both explains.
    """

    stream: Tensor
    multiplier: float
    beside: "Frame | None" = None


def _no_operator(call: Call) -> Any:
    """A mixer that no adapter knows, kept by its place alone."""
    raise UncoveredError(
        f"{call.name} ({type(call.module).__qualname__}) is opaque: no adapter knows it, so it has no operator. "
        "Register one with `unilinattn.register_architecture`."
    )


OPAQUE = Architecture("opaque", "opaque", (), "", _no_operator)
"""What `trace(..., strict=False)` takes an unknown mixer for."""


@dataclass(frozen=True)
class Prefix:
    """What checked an operator that ran in a host's place: the host's own output for the first tokens, and the error.

    The error is relative: norm of the difference over norm of the host's output, worst sequence, real tokens. `ports`
    are what the whole operator reads: batch and number of tokens.
    """

    output: Float[Tensor, "batch prefix out"]
    error: float
    ports: dict[str, tuple[int, int]]


@dataclass(eq=False)
class Frame:
    """One call of one module: what went in, what came out, and the calls inside it."""

    module: nn.Module
    name: str
    arguments: dict[str, Any]
    parent: "Frame | None"
    architecture: Architecture | None = None
    seen: list[Seen] = field(default_factory=list)
    children: list["Frame"] = field(default_factory=list)
    output: Tensor | None = None
    holds_layer: bool = False
    entered: Tensor | None = None
    place: "Place | None" = None
    prefix: Prefix | None = None

    @property
    def input(self) -> Tensor | None:
        """The first floating-point tensor among the arguments."""
        return first_tensor(self.arguments.values())

    @property
    def outermost(self) -> "Frame":
        """This frame, or the outermost one around it that a registered architecture covers as a whole."""
        found, frame = self, self.parent
        while frame is not None:
            found = frame if frame.architecture is not None else found
            frame = frame.parent
        return found


def place_in_stream(layer: Frame, block: Frame) -> bool:
    """Note where a layer's output joins the stream that enters a block, if some module was seen to receive the sum.

    The sum may hold factors and one more output of the block (a parallel MLP or mixer, an earlier layer). Nothing
    is assumed from names.
    """
    added, inside = layer.output, _index(layer, block)
    if inside is None:
        return False
    # A block may norm or embed its input before it becomes the stream.
    entering = (block.input, layer.entered, *(child.output for child in block.children[:inside]))
    streams = [t for t in entering if t is not None and added is not None and t.shape == added.shape]
    if added is None or not streams:
        return False
    after = block.children[inside + 1 :]
    received = [first_tensor(child.arguments.values(), axes=2) for child in after]
    seen = [t for t in (*received, block.output) if t is not None]
    seen = [t.reshape(added.shape) for t in seen if t.numel() == added.numel() and t.device == added.device]
    others: list[Frame | None] = [
        child
        for child in block.children
        if child is not layer and child.output is not None and child.output.numel() == added.numel()
    ]
    for other in [None, *others]:
        for stream in streams:
            parts = [stream, added]
            if other is not None and other.output is not None:
                parts.append(other.output.reshape(added.shape))
            factors = next((f for total in seen if (f := _factors(total, parts)) is not None), None)
            if factors is None:
                continue
            whole = factors[0] * stream
            is_layer = other is not None and other.architecture is not None
            if is_layer and other is not None and other.place is not None and other.place.beside is None:
                # The other layer was added before this one: what it left behind is part of the stream.
                whole, other = whole + factors[2] * parts[2], None
            layer.place = Place(whole, factors[1], other if is_layer else None)
            return True
    return False


def first_tensor(values: Any, *, axes: int = 3) -> Tensor | None:
    """Return the first floating-point tensor of so many axes at least: batch, length and channel, unless told."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= axes:
            return value
    return None


def _index(layer: Frame, block: Frame) -> int | None:
    """Return which child of a block holds a layer, None if none does."""
    frame = layer
    while frame.parent is not None and frame.parent is not block:
        frame = frame.parent
    return next((at for at, child in enumerate(block.children) if child is frame), None)


def _factors(total: Tensor, parts: list[Tensor]) -> list[float] | None:
    """Return the factors with which parts add up to a total up to rounding, None if they do not."""
    columns, sums = [part.detach().flatten() for part in parts], total.detach().flatten()
    gram = torch.zeros(len(parts), len(parts), dtype=torch.float64, device=sums.device)
    moments = torch.zeros_like(gram[0])
    for basis, wanted in _blocks(columns, sums):
        gram, moments = gram + basis.T @ basis, moments + basis.T @ wanted
    if not bool(torch.isfinite(gram).all() and torch.isfinite(moments).all()):
        return None
    solution = torch.linalg.lstsq(gram, moments).solution
    # Some hosts keep the residual in float32 even where all else is float64.
    epsilon = max(torch.finfo(total.dtype).eps, torch.finfo(torch.float32).eps)
    sizes = gram.diagonal().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    size = torch.stack([wanted.square().sum() for _, wanted in _blocks(columns, sums)]).sum().sqrt()
    # What rounding every number of the total does to a factor: a factor that is one within that is one.
    slack = 8 * epsilon * size / sizes / sums.numel() ** 0.5
    solution = torch.where((solution - 1).abs() <= slack, torch.ones_like(solution), solution)
    misses = [(wanted - basis @ solution).square().sum() for basis, wanted in _blocks(columns, sums)]
    miss = torch.stack(misses).sum().sqrt()
    fits = miss <= 2 * epsilon * size and bool((miss <= 0.5 * solution.abs() * sizes).all())
    return solution.tolist() if fits and bool((solution.abs() > 10 * slack).all()) else None


def _blocks(columns: list[Tensor], sums: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield columns and their supposed sum in float64, block by block: at length the whole would be a copy too many."""
    for start in range(0, max(1, sums.numel()), BLOCK):
        rows = slice(start, start + BLOCK)
        yield torch.stack([column[rows].double() for column in columns], dim=1), sums[rows].double()
