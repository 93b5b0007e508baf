"""The weighted map in torch and by Triton's interpreter against its definition."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from unilinattn.kernels.backend import using
from unilinattn.kernels.scan.memories import Diagonal
from unilinattn.kernels.weighted_map import naive, tiled, triton
from unilinattn.memory import parts
from unilinattn.mixers import DiagonalDecay
from unilinattn.testing import relative_error
from unilinattn.testing.peak import peak_of

BATCH, HEADS, STATE = 2, 4, 5

FORMS = ((tiled, torch.float64, 1e-13), (triton, torch.float32, 2e-6))

pytestmark = pytest.mark.usefixtures("on_a_gpu", "poisoned")

each_form = pytest.mark.parametrize(("form", "dtype", "bound"), FORMS, ids=("torch", "triton"))


def memory_of(length: int, dtype: torch.dtype, state: int = STATE, *, groups: int = HEADS, rated: bool) -> Diagonal:
    """Return factors with segments and decays from 1 to 0, which are ten times as slow in each next head."""
    speed = 10.0 ** -torch.arange(HEADS, dtype=dtype).unsqueeze(-1)
    query = torch.randn(BATCH, state, length, groups, dtype=dtype).permute(0, 2, 3, 1)
    key = torch.randn(BATCH, length, groups, state, dtype=dtype)
    reset = torch.rand(BATCH, length) < 0.02
    if not rated:
        decay = -torch.rand(BATCH, length, HEADS, state, dtype=dtype).pow(6) * 800 * speed
        return Diagonal(query, key, decay, reset=reset)
    steps = torch.rand(BATCH, length, HEADS, 1, dtype=dtype).pow(6) * 400
    scale, rate = torch.randn(BATCH, length, HEADS, dtype=dtype), -2 * speed * torch.rand(HEADS, state, dtype=dtype)
    return Diagonal(query, key, steps, scale, rate, reset)


def weights_of(length: int, dtype: torch.dtype, lags: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
    one = torch.ones(BATCH, length, HEADS, dtype=dtype)
    taps = {lag: torch.randn_like(one[:1, :1] if lag == 2 else one) for lag in lags if lag < length}
    return torch.randn_like(one), taps


def expanded(memory: Diagonal) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and log-decay of every head."""
    query, key, decay = memory.at()
    return query.expand_as(decay), key.expand_as(decay), decay


def check(
    form: ModuleType, memory: Diagonal, left: Tensor | None, taps: dict[int, Tensor], rows: int, bound: float
) -> None:
    """Compare the squares and the writes of every block of rows with their definitions."""
    query, key, decay = expanded(memory)
    length, reach, one = decay.shape[1], max(taps), decay.new_ones(decay.shape[:3])
    reading = one if left is None else left.expand_as(one)
    landing = {lag: tap.expand_as(one) for lag, tap in taps.items()}
    for tokens in parts(length, rows):
        here = {lag: tap[:, tokens] for lag, tap in landing.items()}
        actual = form.squares(memory, tokens, left, taps)
        expected = naive.squares(*(t[:, tokens] for t in (query, key, decay)), reading[:, tokens], here)
        for one_part, other in zip(actual, expected, strict=True):
            assert relative_error(one_part.to(other), other) < bound
        cut = tokens.start
        for cols in (slice(0, cut), slice(cut // 3, cut // 2), slice(max(0, cut - 5), cut + 3)) if cut else ():
            before = slice(cols.start, min(cols.stop + reach, cut))
            width = cols.stop - cols.start
            write = form.writes(memory, before, cut, taps, width)
            there = {lag: tap[:, before] for lag, tap in landing.items()}
            other = naive.writes(key[:, before], decay[:, before.start : cut], there, width)
            assert write.shape == other.shape
            assert relative_error(write.to(other), other) < bound


@each_form
@pytest.mark.parametrize(
    ("length", "rows"),
    [(1, 64), (3, 64), (16, 16), (37, 64), *(pytest.param(90, r, marks=pytest.mark.slow) for r in (32, 41))],
)
def test_squares_and_writes_equal_their_definition(
    form: ModuleType, dtype: torch.dtype, bound: float, length: int, rows: int
) -> None:
    left, taps = weights_of(length, dtype, (0, 1, 3, 2))
    check(form, memory_of(length, dtype, rated=False), left, taps, rows, bound)
    check(form, memory_of(length, dtype, groups=2, rated=True), None, taps, rows, bound)


@pytest.mark.long
@each_form
def test_blocks_begin_inside_a_sequence(form: ModuleType, dtype: torch.dtype, bound: float) -> None:
    left, taps = weights_of(50, dtype, (0, 2, 3))
    check(form, memory_of(50, dtype, groups=1, rated=True), left[:1, :1], taps, 23, bound)


@each_form
@pytest.mark.parametrize("lags", [(0,), (2,), (0, 16), (1, 17)])
def test_taps_of_any_lag_are_summed(form: ModuleType, dtype: torch.dtype, bound: float, lags: tuple[int, ...]) -> None:
    left, taps = weights_of(45, dtype, lags)
    check(form, memory_of(45, dtype, rated=True), left, taps, 24, bound)


@pytest.mark.long
@each_form
@pytest.mark.parametrize("state", [1, 16, pytest.param(35, marks=pytest.mark.slow)])
def test_states_have_any_size(form: ModuleType, dtype: torch.dtype, bound: float, state: int) -> None:
    left, taps = weights_of(40, dtype, (0, 1))
    check(form, memory_of(40, dtype, state, rated=False), left, taps, 20, bound)


@each_form
@pytest.mark.parametrize("strong", [-20.0, -1e3, -1e6])
def test_tokens_after_a_strong_decay_are_accurate(
    form: ModuleType, dtype: torch.dtype, bound: float, strong: float
) -> None:
    memory = memory_of(60, dtype, rated=False)
    weak = -0.05 * torch.rand_like(memory.log_decay)
    mixed = torch.where(torch.rand_like(weak) < 0.15, torch.tensor(strong, dtype=dtype), weak)
    left, taps = weights_of(60, dtype, (0, 1, 2))
    check(form, memory._replace(log_decay=mixed), left, taps, 35, bound)


@pytest.mark.long
@pytest.mark.parametrize("rows", [16, 64])
def test_allocations_are_at_most_the_documented_ones(rows: int) -> None:
    memory, (left, taps) = memory_of(200, torch.float32, 16, rated=True), weights_of(200, torch.float32, (0, 1, 2, 3))
    tokens = slice(128, 128 + rows)

    def block() -> None:
        near, read = triton.squares(memory, tokens, left, taps)
        triton.writes(memory, slice(0, 128), 128, taps, 128)
        assert len(near) == len(read)

    block()
    documented = 4 * triton.held_elements(rows, 128, (BATCH, 200, HEADS, 16), len(taps))
    assert documented / 3 <= peak_of(block).peak <= documented


@pytest.mark.long
@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_the_blocks_of_a_mixer_use_the_kernels(groups: int) -> None:
    length = 70
    memory = memory_of(length, torch.float32, groups=groups, rated=True)
    left, taps = weights_of(length, torch.float32, (0, 1, 3))
    given = (memory.query, memory.key, memory.log_decay)
    mixer = DiagonalDecay(*given, key_scale=memory.key_scale, rate=memory.rate, reset=memory.reset)
    wide = DiagonalDecay(
        *(t.double() for t in given),
        key_scale=mixer.key_scale.double(),
        rate=mixer.rate.double(),
        reset=memory.reset,
    )

    def tiles(mixer: DiagonalDecay, left: Tensor, taps: dict[int, Tensor]) -> list[Tensor]:
        blocks = mixer.weighted_blocks(32, left, taps)
        return [block(cols) for _, block in blocks for cols in parts(length, 24)]

    with using("triton"):
        actual = tiles(mixer, left, taps)
    with using("torch"):
        expected = tiles(wide, left.double(), {lag: tap.double() for lag, tap in taps.items()})
    assert len(actual) == 9
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        if other.any():
            assert relative_error(one.to(other), other) < 2e-6
        else:
            assert not one.any()
