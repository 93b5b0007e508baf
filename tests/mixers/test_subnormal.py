"""No product of any structure reads a subnormal number, for any decays."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.subnormal import counted
from unilinattn.kernels.reduced_map import tiled
from unilinattn.mixers import (
    MLSTM,
    CoreMixer,
    DeltaRule,
    Dense,
    DiagonalDecay,
    ExclusiveBonus,
    LowRankUpdate,
    NormalizedExponential,
    Reversed,
    ScalarDecay,
    Softmax,
    Substep,
    Toeplitz,
    ToeplitzLowRank,
    diagonal_decay,
)
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Matrix, Mix, Scale

HEADS, STATE, CHANNELS = 4, 5, 2

MAIN = ("diagonal decay, S6", "diagonal decay", "scalar decay", "delta rule, a decay a head")
"""Structures tested with every decay, and with `LONG` tokens of mixed ones; else there are `SHORT`, five chunks."""

LONG, SHORT = 520, 270

DECAYS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "weak": lambda u: -1e-3 * u,
    "-5 a step": lambda u: -5 * u,
    "-100 a step": lambda u: -100 * u,
    # Decays from 1 to 0.
    "mixed": lambda u: -(10 ** (8 * u - 5)),
}
"""Log-decays per step, from uniform random numbers."""

DRAWN = (
    (torch.float32, "mixed"),
    pytest.param(torch.float32, "-5 a step", marks=pytest.mark.slow),
    # In float64 only strong decays reach subnormal numbers.
    pytest.param(torch.float64, "-100 a step", marks=pytest.mark.slow),
)
"""Dtypes and decays."""


class Draw:
    """Draws factors of one sequence; all except the decays have ordinary magnitudes."""

    def __init__(self, decay: str, dtype: torch.dtype, length: int) -> None:
        self.decay, self.dtype, self.length = decay, dtype, length

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(1, self.length, *shape, dtype=self.dtype)

    def decays(self, *shape: int) -> Tensor:
        return DECAYS[self.decay](torch.rand(1, self.length, *shape, dtype=torch.float64)).to(self.dtype)

    def head_decays(self) -> Tensor:
        return self.decays(HEADS)[0, 0]

    def gates(self, *shape: int) -> Tensor:
        return torch.rand(1, self.length, *shape, dtype=self.dtype)

    def kernel(self) -> Tensor:
        fading = torch.exp(self.head_decays().double()[:, None] * torch.arange(self.length))
        return (torch.randn(HEADS, self.length) * fading).to(self.dtype)


def _states(d: Draw, count: int) -> list[Tensor]:
    return [torch.nn.functional.normalize(d.normal(HEADS, STATE), dim=-1) for _ in range(count)]


STRUCTURES: Mapping[str, Callable[[Draw], CoreMixer]] = {
    "diagonal decay, S6": lambda d: DiagonalDecay(
        d.normal(1, STATE),
        d.normal(1, STATE),
        -d.decays(HEADS, 1),
        key_scale=d.gates(HEADS),
        rate=-torch.arange(1.0, STATE + 1).expand(HEADS, -1).to(d.dtype),
    ),
    "diagonal decay": lambda d: DiagonalDecay(*_states(d, 2), d.decays(HEADS, STATE)),
    "diagonal decay, resets": lambda d: DiagonalDecay(
        *_states(d, 2), d.decays(HEADS, STATE), reset=torch.rand(1, d.length) < 0.02
    ),
    "scalar decay": lambda d: ScalarDecay(
        d.normal(2, STATE), d.normal(2, STATE), d.decays(HEADS), key_scale=d.gates(HEADS)
    ),
    "dense": lambda d: Dense((10 * d.decays(HEADS, d.length).transpose(1, 2)).softmax(-1)),
    "softmax": lambda d: Softmax(
        *(6 * d.normal(heads, STATE).transpose(1, 2) for heads in (HEADS, HEADS // 2)), scale=1.0, causal=True
    ),
    "Toeplitz": lambda d: Toeplitz(d.kernel(), batch=1, length=d.length),
    "Toeplitz, short": lambda d: Toeplitz(d.kernel()[:, :30], batch=1, length=d.length),
    "Toeplitz x low rank": lambda d: ToeplitzLowRank(d.kernel(), *_states(d, 2)),
    "delta rule": lambda d: DeltaRule(*_states(d, 2), d.gates(HEADS)),
    "delta rule, a decay a head": lambda d: DeltaRule(*_states(d, 2), d.gates(HEADS), d.decays(HEADS)),
    "delta rule, a decay a coordinate": lambda d: DeltaRule(*_states(d, 2), d.gates(HEADS), d.decays(HEADS, STATE)),
    "diagonal plus low rank": lambda d: LowRankUpdate(
        *_states(d, 2), d.decays(HEADS, STATE), *(0.1 * part for part in _states(d, 2))
    ),
    "exclusive bonus": lambda d: ExclusiveBonus(
        *_states(d, 2), d.decays(HEADS, STATE), torch.randn(HEADS, STATE, dtype=d.dtype)
    ),
    "mLSTM": lambda d: MLSTM(*_states(d, 2), d.decays(HEADS), d.normal(HEADS), eps=1e-6),
    "mLSTM, gates far apart": lambda d: MLSTM(*_states(d, 2), d.decays(HEADS), 60 * d.normal(HEADS), eps=1e-6),
    "normalised exponential": lambda d: NormalizedExponential(
        d.normal(HEADS), d.head_decays(), torch.randn(HEADS, dtype=d.dtype)
    ),
    "normalised exponential, keys far apart": lambda d: NormalizedExponential(
        60 * d.normal(HEADS), d.head_decays(), torch.randn(HEADS, dtype=d.dtype)
    ),
    "sub-steps": lambda d: Substep(STRUCTURES["delta rule, a decay a head"](d), 2, 1),
    "reversed": lambda d: Reversed(STRUCTURES["diagonal decay"](d)),
}


def passes(mixer: CoreMixer) -> None:
    _, heads, length, _ = mixer.shape
    for channels in (1, 3):
        value = mixer.zeros((1, length, heads, channels)).normal_()
        mixer.apply(value)
        mixer.adjoint(value)
    mixer.adjoint(value[:, :, :1, :1].expand(-1, -1, heads, -1))
    mixer.rows(torch.tensor([[0, length // 2, length - 1]]))


def tiles(mixer: CoreMixer) -> None:
    length = mixer.shape[2]
    mixer.materialize()
    mixer.tile(slice(length // 2, length), slice(0, length // 3))
    for _, block in mixer.blocks(64):
        block(slice(0, length))


def maps(mixer: CoreMixer) -> None:
    length, heads = mixer.shape[2], mixer.heads
    for channels in (None, heads, heads * CHANNELS):
        for rows in (64, 512) if channels == heads else (64,):
            for _ in mixer.reduced_rows(rows, *_weights(mixer, channels)):
                pass
            row = mixer.zeros((1, length)).normal_()
            mixer.row_product(row, row, "clamp", rows, *_weights(mixer, channels))


def weighted(mixer: CoreMixer) -> None:
    length, heads = mixer.shape[2], mixer.heads
    for channels in (heads, heads * CHANNELS):
        for _, block in mixer.weighted_blocks(64, *_weights(mixer, channels)):
            block(slice(0, length))


def layers(mixer: CoreMixer) -> None:
    """Row products, maps and norms of a layer: the structure between two matrices, with a gate."""
    length, width = mixer.shape[2], mixer.heads * CHANNELS
    x = mixer.zeros((1, length, width)).normal_()
    weight = mixer.zeros((width, width)).normal_()
    chain = Matrix("input", weight), Mix("core", mixer), Scale("gate", torch.rand_like(x)), Matrix("output", weight.mT)
    op = MixerOperator({"x": chain}, inputs={"x": x}, output=torch.zeros_like(x))
    row = torch.nn.functional.one_hot(torch.tensor([[length - 1, length // 2]]), length).to(x)
    op.left_multiply(row)
    op.apply(op.inputs)
    op.adjoint(x)
    op.matrix()
    op.rows(-1)
    op.contributions(length - 1)
    op.row_product(row[:, 0], row[:, 0], "clamp")
    for order in (1.0, 2.0):
        for tile in op.pairwise().tiles(mixer.causal):
            tile.norms(order)


def _weights(mixer: CoreMixer, channels: int | None) -> tuple[Tensor | None, dict[int, Tensor] | None]:
    if channels is None:
        return None, None
    drawn = [mixer.zeros((1, mixer.shape[2], channels)).normal_() for _ in range(3)]
    return drawn[0], {0: drawn[1], 2: drawn[2]}


OPERATIONS: Mapping[str, Callable[[CoreMixer], None]] = {
    "passes": passes,
    "tiles": tiles,
    "maps": maps,
    "weighted": weighted,
    "layers": layers,
}


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "decay"), DRAWN)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_product_of_any_structure_reads_a_subnormal_number(structure: str, dtype: torch.dtype, decay: str) -> None:
    require_no_subnormal_operand(structure, dtype, decay)


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["weak", "-100 a step"])
@pytest.mark.parametrize("structure", MAIN)
def test_no_product_reads_a_subnormal_number_for_random_decays(structure: str, decay: str) -> None:
    require_no_subnormal_operand(structure, torch.float32, decay)


def require_no_subnormal_operand(structure: str, dtype: torch.dtype, decay: str) -> None:
    length = LONG if structure in MAIN and decay == "mixed" else SHORT
    mixer = STRUCTURES[structure](Draw(decay, dtype, length))
    with torch.no_grad():
        counts = {name: counted(partial(operation, mixer)) for name, operation in OPERATIONS.items()}
    assert {name: count.found for name, count in counts.items() if count.found} == {}
    assert sum(count.operands for count in counts.values()) > 0


def test_without_flushing_the_count_is_in_the_thousands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "flushed_", lambda tensor: tensor)
    monkeypatch.setattr(diagonal_decay, "flushed_", lambda tensor: tensor)
    mixer = STRUCTURES["diagonal decay, S6"](Draw("-5 a step", torch.float32, 520))
    with torch.no_grad():
        assert sum(counted(lambda: maps(mixer)).found.values()) > 1000


def test_the_counter_counts_one_planted_number() -> None:
    planted = torch.ones(3, 3)
    planted[1, 2] = 1e-40
    assert counted(lambda: planted @ torch.ones(3, 3)).found == {"mm": 1}
    assert counted(lambda: torch.einsum("bij,bjk->bik", planted[None], torch.ones(1, 3, 3))).found == {"bmm": 1}
    assert counted(lambda: torch.ones(3, 3).addmm_(torch.ones(3, 3), planted)).found == {"addmm_": 1}
