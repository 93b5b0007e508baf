"""The reduced map against its definition."""

from types import ModuleType

import pytest
import torch

from tests.kernels.maps import Factors, map_error
from unilinattn.kernels.reduced_map import tiled

BATCH, HEADS, STATE = 2, 5, 3

numba = pytest.importorskip("unilinattn.kernels.reduced_map.numba", reason="the extra `cpu` (numba) is not installed")

FORMS = ((tiled, torch.float64, 1e-13), (numba, torch.float32, 5e-6))


def factors(length: int) -> Factors:
    torch.manual_seed(length)
    query, key = (torch.randn(BATCH, length, HEADS, STATE, dtype=torch.float64) for _ in range(2))
    # Decays from 1 to 0.
    return query, key, -torch.rand(BATCH, length, HEADS, STATE, dtype=torch.float64).pow(6) * 800


@pytest.mark.long
@pytest.mark.parametrize("length", [1, 3, 8, 63, 130])
@pytest.mark.parametrize("rows", [16, pytest.param(24, marks=pytest.mark.slow), 1024])
@pytest.mark.parametrize("inner", [pytest.param(3, marks=pytest.mark.slow), 9, 1536])
@pytest.mark.parametrize(("form", "dtype", "bound"), FORMS, ids=("torch", "numba"))
def test_the_reduced_map_equals_its_definition(
    form: ModuleType,
    dtype: torch.dtype,
    bound: float,
    length: int,
    rows: int,
    inner: int,
    monkeypatch: pytest.MonkeyPatch,
    poisoned: None,
) -> None:
    monkeypatch.setattr(tiled, "INNER", inner)
    monkeypatch.setattr(tiled, "COLUMNS", 20)
    drawn = factors(length)
    left = torch.randn(BATCH, length, HEADS, dtype=torch.float64)
    taps = {0: torch.randn_like(left), 2: torch.randn_like(left[:1, :1]), 3: torch.randn_like(left)}
    for weights in ((None, None), (left, None), (None, taps), (left, taps)):
        assert map_error(form, drawn, *weights, rows, dtype) < bound


def test_a_long_inner_axis_is_computed_in_lanes() -> None:
    length, heads, state = 40, 2 * numba.loops.LEAF_LANES // 16 + 1, 16
    query, key = torch.randn(2, 2, length, heads, state)
    taps = {0: torch.randn(2, length, heads), 1: torch.randn(2, length, heads)}
    drawn = query, key, -torch.rand(2, length, heads, state)
    assert map_error(numba, drawn, None, taps, length, torch.float32) < 2e-6
