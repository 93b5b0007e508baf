"""Counted multiplications of each structure's operations, and their fast paths: a table of the performance page."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from unilinattn.kernels import backend
from unilinattn.kernels.toeplitz_map import tiled
from unilinattn.mixers import (
    MLSTM,
    CoreMixer,
    DeltaRule,
    Dense,
    DiagonalDecay,
    ExclusiveBonus,
    Gather,
    LowRankUpdate,
    NormalizedExponential,
    Reversed,
    ScalarDecay,
    Softmax,
    Substep,
    Toeplitz,
    ToeplitzLowRank,
)
from unilinattn.mixers.chunked import Chunked
from unilinattn.testing.peak import peak_of

HEADS, STATE, CHANNELS, ROWS = 4, 16, 8, 64
"""Sizes of the counted mixers: `CHANNELS` channels per head (one for S6), blocks of `ROWS` rows."""

S6 = "diagonal decay, one channel per head (S6)"

SHORT, LONG = 256, 512
"""Counted lengths: costs per pair are those of the longer one, growth compares the two."""


def _drawn(length: int, *shape: int) -> Tensor:
    return torch.randn(1, length, *shape)


def _fading(length: int, *shape: int) -> Tensor:
    return -torch.rand(1, length, *shape)


def _states(length: int, count: int) -> list[Tensor]:
    return [_drawn(length, HEADS, STATE) for _ in range(count)]


STRUCTURES: Mapping[str, Callable[[int], CoreMixer]] = {
    S6: lambda n: DiagonalDecay(_drawn(n, 1, STATE), _drawn(n, 1, STATE), _fading(n, HEADS, STATE)),
    "diagonal decay": lambda n: DiagonalDecay(*_states(n, 2), _fading(n, HEADS, STATE)),
    "scalar decay": lambda n: ScalarDecay(_drawn(n, 1, STATE), _drawn(n, 1, STATE), _fading(n, HEADS)),
    "softmax": lambda n: Softmax(*(x.transpose(1, 2) for x in _states(n, 2)), scale=1.0, causal=True),
    "dense": lambda n: Dense(_drawn(n, HEADS, n).transpose(1, 2).tril()),
    "Toeplitz": lambda n: Toeplitz(torch.randn(HEADS, n), batch=1, length=n),
    "Toeplitz x low rank": lambda n: ToeplitzLowRank(torch.randn(HEADS, n), _drawn(n, HEADS, 4), _drawn(n, HEADS, 4)),
    "delta rule": lambda n: DeltaRule(*_states(n, 2), torch.rand(1, n, HEADS), _fading(n, HEADS)),
    "diagonal plus low rank": lambda n: LowRankUpdate(
        *_states(n, 2), _fading(n, HEADS, STATE), *(0.1 * part for part in _states(n, 2))
    ),
    "exclusive bonus": lambda n: ExclusiveBonus(*_states(n, 2), _fading(n, HEADS, STATE), torch.randn(HEADS, STATE)),
    "mLSTM": lambda n: MLSTM(*_states(n, 2), _fading(n, HEADS), _drawn(n, HEADS), eps=1e-6),
    "normalised exponential": lambda n: NormalizedExponential(_drawn(n, HEADS), -torch.rand(HEADS), torch.randn(HEADS)),
    "sub-steps (of a delta rule)": lambda n: Substep(STRUCTURES["delta rule"](2 * n), 2, 0),
    "reversed (diagonal decay)": lambda n: Reversed(STRUCTURES["diagonal decay"](n)),
    "gather": lambda n: Gather(torch.randint(n, (1, n)), n, like=torch.empty(0)),
}


FILLS: Mapping[str, int] = {
    "diagonal decay": STATE,
    "softmax": STATE,
    "dense": 0,
    "Toeplitz": 0,
    "Toeplitz x low rank": 4 + 1,
    "reversed (diagonal decay)": STATE,
    "gather": 0,
}
"""Multiplications that determine one entry of a head's matrix, for the structures whose maps are sums of tiles."""

LAGS = 2
"""Taps of the counted convolution."""


def tiles_floor(operation: str, structure: str) -> float:
    """Return the least multiplications per pair and head of a map that is a sum of tiles, per channel with weights.

    For each lag a gate and a tap are multiplied for each channel, and their sum with the entry for each head.
    """
    if operation == "map":
        return FILLS[structure]
    return FILLS[structure] / CHANNELS + LAGS * (1 + 1 / CHANNELS)


@dataclass(frozen=True)
class Counted:
    """Multiplications of an operation, whether it ran the default implementation, and the kernels it requested."""

    multiplications: int
    plain: bool
    kernels: frozenset[str]


def counted(operation: str, structure: str, length: int) -> Counted:
    """Run an operation of a mixer and count its multiplications."""
    torch.manual_seed(0)
    mixer = STRUCTURES[structure](length)
    with _watched() as (plain, kernels):
        channels = HEADS * (1 if structure == S6 else CHANNELS)
        multiplications = peak_of(lambda: OPERATIONS[operation](mixer, channels)).multiplications
    return Counted(multiplications, bool(plain), frozenset(kernels))


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        "| structure | mean map | mean map with weights | $T_{ij} x_j$ of all pairs | row of a target | Triton |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for structure in STRUCTURES:
        counts = {name: counted(name, structure, LONG) for name in OPERATIONS}
        growth = counts["row"].multiplications / max(1, counted("row", structure, SHORT).multiplications)
        kernels = sorted(set().union(*(each.kernels for each in counts.values())))
        channels = HEADS * (1 if structure == S6 else CHANNELS)
        cells = [
            _cell(counts[name], HEADS if name == "map" else channels, name, structure)
            for name in ("map", "weighted map", "vectors")
        ]
        lines.append(f"| {structure} | {' | '.join(cells)} | x {growth:.1f} | {', '.join(kernels) or 'no'} |")
    return "\n".join(lines)


def each_pair(count: Counted, channels: int) -> float:
    """Return the multiplications per pair below the diagonal and head or channel."""
    return count.multiplications / (channels * LONG**2 / 2)


def _cell(count: Counted, channels: int, operation: str, structure: str) -> str:
    each = f"{each_pair(count, channels):.1f}"
    return f"{each} (tiles, floor {tiles_floor(operation, structure):.1f})" if count.plain else each


def _map(mixer: CoreMixer, _: int) -> None:
    if mixer.mean_map() is None:
        for _block in mixer.reduced_rows(ROWS):
            pass


def _weighted_map(mixer: CoreMixer, channels: int) -> None:
    for _block in mixer.reduced_rows(ROWS, *_weights(mixer, channels)):
        pass


def _vectors(mixer: CoreMixer, channels: int) -> None:
    for part, block in mixer.weighted_blocks(ROWS, *_weights(mixer, channels)):
        for start in range(0, part.stop, ROWS):
            block(slice(start, min(start + ROWS, part.stop)))


def _row(mixer: CoreMixer, _: int) -> None:
    mixer.adjoint(_drawn(mixer.shape[2], mixer.heads, 1))


def _streamed(mixer: CoreMixer, _: int) -> None:
    row = _drawn(mixer.shape[2])
    mixer.row_product(row, row, "clamp", ROWS)


def _weights(mixer: CoreMixer, channels: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Return random weights of a map: a gate, and a convolution with two taps."""
    return _drawn(mixer.shape[2], channels), {lag: _drawn(mixer.shape[2], channels) for lag in range(LAGS)}


OPERATIONS: Mapping[str, Callable[[CoreMixer, int], None]] = {
    "map": _map,
    "weighted map": _weighted_map,
    "vectors": _vectors,
    "row": _row,
    "streamed": _streamed,
}


@contextmanager
def _watched() -> Iterator[tuple[list[None], set[str]]]:
    """Record calls of the default `reduced_parts`, and the operations whose kernels are imported."""
    plain: list[None] = []
    kernels: set[str] = set()
    imported = importlib.import_module

    def noted(default):  # type: ignore[no-untyped-def]  # any signature
        def serve(*args, **options):  # type: ignore[no-untyped-def]
            plain.append(None)
            return default(*args, **options)

        return serve

    def ask(name: str, package: str | None = None) -> object:
        if name.startswith("unilinattn.kernels."):
            kernels.add(name.split(".")[-2].replace("_", " "))
        return imported(name, package)

    # The torch form of a convolution's weighted map sums tiles too.
    tiles = patch.object(tiled, "toeplitz_rows", noted(tiled.toeplitz_rows))
    default = patch.object(CoreMixer, "reduced_parts", noted(CoreMixer.reduced_parts))
    # Two chunks at once: a single one, as on a CPU, needs no kernel for the states between chunks.
    chunks = patch.object(Chunked, "side_by_side", 2)
    with tiles, chunks, default, patch.object(backend.importlib, "import_module", ask):
        yield plain, kernels
