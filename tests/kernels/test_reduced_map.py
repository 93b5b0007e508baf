"""The reduced map against its definition."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from unilinattn.kernels.reduced_map import tiled
from unilinattn.kernels.reduced_map.naive import reduced_map
from unilinattn.kernels.reduced_map.tiled import HeadMap
from unilinattn.memory import parts
from unilinattn.testing import relative_error

BATCH, HEADS, STATE = 2, 5, 3

numba = pytest.importorskip("unilinattn.kernels.reduced_map.numba", reason="the extra `cpu` (numba) is not installed")

FORMS = ((tiled, torch.float64, 1e-13), (numba, torch.float32, 5e-6))


def factors(length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(length)
    query, key = (torch.randn(BATCH, length, HEADS, STATE, dtype=torch.float64) for _ in range(2))
    # Decays from 1 to 0.
    return query, key, -torch.rand(BATCH, length, HEADS, STATE, dtype=torch.float64).pow(6) * 800


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
    query, key, decay = factors(length)
    one = torch.ones(BATCH, length, HEADS, dtype=torch.float64)
    left = torch.randn_like(one)
    taps = {0: torch.randn_like(one), 2: torch.randn_like(one[:1, :1]), 3: torch.randn_like(one)}

    def of(tokens: slice, heads: slice) -> tuple[Tensor, Tensor, Tensor]:
        given = query[:, tokens, heads], key[:, tokens, heads], decay[:, tokens, heads]
        return tuple(t.to(dtype) for t in given)

    for weights in ((None, None), (left, None), (None, taps), (left, taps)):
        given = (
            None if weights[0] is None else left.to(dtype),
            None if weights[1] is None else {lag: tap.to(dtype) for lag, tap in taps.items()},
        )
        blocks = list(form.reduced_rows(HeadMap(of, (BATCH, length, HEADS, STATE), *given), parts(length, rows)))
        expected = reduced_map(
            query,
            key,
            decay,
            one if weights[0] is None else left,
            {lag: tap.expand_as(one) for lag, tap in (weights[1] or {0: one}).items()},
        )
        assert [part.start for part, _ in blocks] == list(range(0, length, rows))
        assert relative_error(torch.cat([block for _, block in blocks], dim=1).double(), expected) < bound


def test_a_long_inner_axis_is_computed_in_lanes() -> None:
    length, heads, state = 40, 2 * numba.loops.LEAF_LANES // 16 + 1, 16
    query, key = torch.randn(2, length, heads, state), torch.randn(2, length, heads, state)
    decay = -torch.rand(2, length, heads, state)
    taps = {0: torch.randn(2, length, heads), 1: torch.randn(2, length, heads)}

    def of(tokens: slice, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        return query[:, tokens, part], key[:, tokens, part], decay[:, tokens, part]

    ((_, block),) = numba.reduced_rows(HeadMap(of, (2, length, heads, state), None, taps), [slice(0, length)])
    expected = reduced_map(query, key, decay, torch.ones(2, length, heads), taps)
    assert relative_error(block.double(), expected) < 2e-6
