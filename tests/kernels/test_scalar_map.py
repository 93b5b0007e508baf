"""The reduced map of scalar decays, in torch and by Triton's interpreter, against its definition."""

from types import ModuleType

import pytest
import torch

from unilinattn.kernels.scalar_map import tiled, triton
from unilinattn.kernels.scalar_map.naive import scalar_map
from unilinattn.kernels.scan.memories import Scalar
from unilinattn.memory import parts
from unilinattn.testing import relative_error
from unilinattn.testing.peak import peak_of

BATCH, GROUPS, HEADS, CHANNELS, STATE = 2, 2, 4, 8, 3

pytestmark = pytest.mark.usefixtures("on_a_gpu", "poisoned")


@pytest.mark.parametrize(
    ("form", "length", "rows"),
    [
        *[(tiled, length, rows) for length in (1, 3, 8, 63, 130) for rows in (16, 1024)],
        pytest.param(tiled, 130, 24, marks=pytest.mark.slow),
        (triton, 20, 16),
        pytest.param(triton, 70, 64, marks=pytest.mark.slow),
        pytest.param(triton, 70, 1024, marks=pytest.mark.slow),
    ],
)
def test_the_map_equals_its_definition(
    form: ModuleType, length: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "COLUMNS", 20)
    torch.manual_seed(length)
    dtype, limit = (torch.float64, 1e-13) if form is tiled else (torch.float32, 1e-5)
    query, key = (torch.randn(BATCH, length, GROUPS, STATE, dtype=dtype) for _ in range(2))
    # Decays from 1 to 0.
    decay = -torch.rand(BATCH, length, HEADS, dtype=dtype).pow(6) * 800
    # One head remembers tokens of all blocks of columns.
    decay[..., 0] *= 1e-4
    scale = torch.rand_like(decay)
    one = torch.ones(BATCH, length, CHANNELS, dtype=dtype)
    left = torch.randn_like(one)
    taps = {0: torch.randn_like(one), 2: torch.randn_like(one[:1, :1]), 3: torch.randn_like(one)}
    for reading, writing in ((None, None), (left[:1], None), (None, taps), (left, taps)):
        blocks = list(form.scalar_rows(Scalar(query, key, decay, scale), reading, writing, blocks=parts(length, rows)))
        expected = scalar_map(
            Scalar(query, key, decay, scale),
            one if reading is None else reading.expand_as(one),
            {lag: tap.expand_as(one) for lag, tap in (writing or {0: one}).items()},
        )
        if reading is None and writing is None:
            # The sum is over heads, each of which serves CHANNELS / HEADS channels.
            expected = expected * (HEADS / CHANNELS)
        assert [block.shape[1] for block in blocks] == [min(rows, length - at) for at in range(0, length, rows)]
        assert relative_error(torch.cat(blocks, dim=1), expected) < limit


@pytest.mark.parametrize("length", [1, 3, 8, 63, 100, 130])
@pytest.mark.parametrize("groups", [1, GROUPS])
def test_the_map_written_at_once_equals_its_definition(
    groups: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Corners of several tiles, and a second square that is padded.
    monkeypatch.setattr(tiled, "TILE", 16)
    monkeypatch.setattr(tiled, "ROWS", 32)
    torch.manual_seed(length)
    query, key = (torch.randn(BATCH, length, groups, STATE, dtype=torch.float64) for _ in range(2))
    decay = -torch.rand(BATCH, length, HEADS, dtype=torch.float64).pow(6) * 800
    scale = torch.rand_like(decay)
    one = torch.ones_like(decay)
    expected = scalar_map(Scalar(query, key, decay, scale), one, {0: one})
    assert relative_error(tiled.scalar_map(Scalar(query, key, decay, scale)), expected) < 1e-13


def test_the_map_written_at_once_holds_little_beside_it() -> None:
    def beside(length: int) -> int:
        query, key = (torch.randn(1, length, 1, 16) for _ in range(2))
        decay, scale = -torch.rand(1, length, 4), torch.rand(1, length, 4)
        return peak_of(lambda: tiled.scalar_map(Scalar(query, key, decay, scale))).peak - 4 * length**2

    assert beside(4096) < 2.3 * beside(2048)
    # Without a square of 4096 rows for those after the first 2048.
    assert beside(4000) < 4 * beside(2048)


@pytest.mark.parametrize("channels", [1, 64])
def test_the_documented_memory_is_that_of_a_call(channels: int) -> None:
    length, heads, state, rows = 256, 4, 16, 64
    query, key = (torch.randn(1, length, 1, state) for _ in range(2))
    decay, scale = -torch.rand(1, length, heads), torch.rand(1, length, heads)
    weights = (
        (None, None) if channels == 1 else (torch.randn(1, length, channels), {0: torch.randn(1, length, channels)})
    )
    documented = 4 * tiled.held_elements(rows, (1, length, heads, state), channels)

    def run() -> None:
        for _ in tiled.scalar_rows(Scalar(query, key, decay, scale), *weights, blocks=parts(length, rows)):
            pass

    counted = peak_of(run).peak
    assert documented / 2 <= counted <= 2 * documented
