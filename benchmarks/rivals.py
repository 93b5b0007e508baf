"""The reference calls of the measured operations: floors, counts of calls, exponentials."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import models, plain
from benchmarks.memory import usage
from benchmarks.models import Sizes
from unilinattn.operator.operator import MixerOperator
from unilinattn.tracing.trace import Trace

TILE_PAIRS = 64 * 64
"""Pairs of tokens in one product of a floor."""

EXPONENTIALS = 1 << 17
"""Exponentials that are computed at a time."""


@dataclass(frozen=True)
class Rival:
    """A reference for an operation: a call, and the number of calls that make one reference."""

    call: Callable[[], Any]
    times: float = 1.0


@dataclass(frozen=True)
class Place:
    """The widths of the layers, and the device."""

    sizes: Sizes
    device: str

    def traced(self, kind: str, length: int) -> Trace:
        """Trace a model of one layer."""
        return models.traced(kind, length, self.sizes, self.device)

    def operator(self, structure: str, length: int) -> MixerOperator:
        """Return the operator of a layer."""
        if structure == "delta rule":
            return models.delta_rule(length, self.sizes, self.device)
        return self.traced(structure, length).layers[0].operator

    def numbers(self, *shape: int) -> Tensor:
        """Draw a random tensor."""
        return torch.randn(*shape, device=self.device)


def calls_of(operation: Callable[[], Any], place: Place) -> Rival:
    """As many operations of torch as `operation` calls, each on one number."""
    count: list[int] = []

    def call() -> None:
        if not count:
            count.append(usage(operation, "cpu").calls)
        number = torch.zeros(1, device=place.device)
        for _ in range(count[0]):
            number.add_(1)

    return Rival(call)


def exponentials(structure: str, length: int, place: Place) -> Rival:
    """One exponential for each token, channel and state, in pieces that stay in cache."""
    piece = -place.numbers(EXPONENTIALS).abs()
    out, times = torch.empty_like(piece), length * place.sizes.inner * place.sizes.state / EXPONENTIALS

    def call() -> None:
        for _ in range(max(1, round(times))):
            torch.exp(piece, out=out)

    return Rival(call, times / max(1, round(times)))


def row_steps(structure: str, length: int, place: Place) -> Rival:
    """The steps of a row's contributions: the product that gives the values, the exponentials, the projections."""
    sizes = place.sizes
    powers = exponentials(structure, length, place)
    values, projected = (
        product(place, length, sizes.width, sizes.inner),
        product(place, length, sizes.inner, sizes.width),
    )

    def call() -> None:
        values()
        powers.call()
        projected()

    return Rival(call)


def rollout_steps(length: int, place: Place, forward: Callable[[], Any]) -> Rival:
    """The steps of a rollout through a Mamba-1 layer: the three projections that give its factors, and `forward`."""
    sizes, rank = place.sizes, -(-place.sizes.width // 16)
    shapes = ((sizes.width, sizes.inner), (sizes.inner, rank + 2 * sizes.state), (rank, sizes.inner))
    products = [product(place, length, *shape) for shape in shapes]

    def call() -> None:
        for step in (*products, forward):
            step()

    return Rival(call)


def memory_steps(length: int, place: Place) -> Rival:
    """The products of the delta rule's map with chunks of N tokens, four of which are joined before columns pass them.

    For each chunk: pairs of keys with queries and keys, a triangular solve, its application to the erased keys, and
    two levels of joins; for four chunks, the transition of all earlier columns, and the reading of all columns.
    """
    heads, state = place.sizes.delta_heads, place.sizes.delta_state
    square, wide = 0.1 * place.numbers(heads, state, state), place.numbers(heads, 2 * state, state)
    columns, read = place.numbers(heads, state, length), place.numbers(4 * state, heads * state)

    def call() -> None:
        for start in range(0, length, 4 * state):
            for _ in range(4):
                torch.linalg.solve_triangular(square, wide @ square, upper=False, left=False, unitriangular=True)
                for _ in range(3):
                    wide @ square
            square @ columns[..., :start]
            read @ columns.flatten(0, 1)[:, : start + 4 * state]

    return Rival(call)


def map_floor(structure: str, length: int, place: Place, operator: MixerOperator) -> Rival:
    """Half of the product, or the pass over memory, that determines the mean of the maps."""
    sizes = place.sizes
    if structure == "softmax":
        weights = plain.core_of(operator).tile()
        return Rival(lambda: weights.sum())
    if structure == "s4d":
        kernels = plain.core_of(operator).taps
        return Rival(lambda: (kernels.sum(0), torch.full((length, length), 0.5, device=place.device)))
    inner = {
        "mamba": sizes.inner * sizes.state,
        "mamba2": sizes.mamba2_state + sizes.mamba2_heads,
        "delta rule": sizes.delta_heads * sizes.delta_state,
    }[structure]
    # `product` draws its two large operands at its first call, so that cases without a floor need no memory for them.
    return Rival(product(place, length, inner, length), 0.5)


def vectors_floor(structure: str, length: int, place: Place) -> Rival:
    """Apply one output projection for each pair of tokens, in tiles of `TILE_PAIRS` pairs."""
    sizes = place.sizes
    if structure == "softmax":
        # Every key has one vector per head: 64 keys, with 64 queries each.
        left, right = place.numbers(64, 64, sizes.softmax_heads), place.numbers(64, sizes.softmax_heads, sizes.width)
    else:
        left, right = place.numbers(sizes.width, sizes.inner), place.numbers(sizes.inner, TILE_PAIRS)
    out = torch.matmul(left, right)
    count = length * length / 2 / TILE_PAIRS
    times = max(1, round(count))

    def call() -> None:
        for _ in range(times):
            torch.matmul(left, right, out=out)

    return Rival(call, count / times)


def product(place: Place, rows: int, inner: int, columns: int) -> Callable[[], Tensor]:
    """Return a product of two matrices, which are drawn at its first call."""
    operands: list[Tensor] = []

    def call() -> Tensor:
        if not operands:
            operands.extend((place.numbers(rows, inner), place.numbers(inner, columns)))
        return operands[0] @ operands[1]

    return call
