"""The reduced map of convolutions, in torch and by Triton's interpreter, against its definition."""

from types import ModuleType

import pytest
import torch

from unilinattn.kernels.backend import using
from unilinattn.kernels.toeplitz_map import naive, tiled, triton
from unilinattn.memory import parts
from unilinattn.mixers import Toeplitz, ToeplitzLowRank
from unilinattn.testing import relative_error

BATCH, HEADS = 2, 3

pytestmark = pytest.mark.usefixtures("on_a_gpu", "poisoned")


@pytest.mark.parametrize("form", [tiled, triton], ids=["tiled", "triton"])
@pytest.mark.parametrize(
    ("length", "taps", "rows"),
    [
        (1, 1, 1),
        (3, 3, 2),
        (70, 70, 64),
        (70, 5, 100),
        pytest.param(63, 20, 16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("each", [1, 2])
def test_the_map_equals_its_definition(form: ModuleType, length: int, taps: int, rows: int, each: int) -> None:
    torch.manual_seed(length)
    dtype, limit = (torch.float64, 1e-13) if form is tiled else (torch.float32, 1e-5)
    kernel = torch.randn(HEADS, taps, dtype=dtype)
    one = torch.ones(BATCH, length, each * HEADS, dtype=dtype)
    left = torch.randn_like(one)
    lags = {0: torch.randn_like(one), 2: torch.randn_like(one[:1, :1]), 3: torch.randn_like(one), 200: left}
    query, key = (torch.randn(BATCH, length, 1, 2, dtype=dtype) for _ in range(2))
    for reading, writing in ((left[:1], None), (None, lags), (left, lags), (left[:, :, :1], {0: left})):
        # The last rows first, to find a block that depends on an earlier one.
        blocks = list(parts(length, rows))[::-1]
        options = {"batch": BATCH, "length": length, "blocks": blocks}
        landing = {lag: tap.expand_as(one) for lag, tap in (writing or {0: one}).items() if lag < length}
        weights = one if reading is None else reading.expand_as(one), landing
        every = torch.ones(BATCH, length, HEADS, 1, dtype=dtype)
        for factors, defined in (
            ((), (every, every)),
            ((query, key), [t.expand(-1, -1, HEADS, -1) for t in (query, key)]),
        ):
            found = list(form.toeplitz_rows(kernel, reading, writing, *factors, **options))
            assert [block.dtype for block in found] == [dtype] * len(blocks)
            expected = naive.toeplitz_map(kernel, *weights, *defined)
            assert relative_error(torch.cat(found[::-1], dim=1), expected) < limit


@pytest.mark.parametrize("low_rank", [False, True])
def test_convolutions_use_the_kernel(low_rank: bool) -> None:
    weights = torch.randn(4, 40), *(torch.randn(2, 70, 2, 3) for _ in range(2))
    mixer = ToeplitzLowRank(*weights) if low_rank else Toeplitz(weights[0], batch=2, length=70)
    left, taps = torch.randn(2, 70, 8), {0: torch.randn(2, 70, 8), 1: torch.randn(1, 1, 8)}
    with using("torch"):
        expected = torch.cat(list(mixer.reduced_rows(40, left, taps)), dim=1)
    with using("triton"):
        actual = torch.cat(list(mixer.reduced_rows(40, left, taps)), dim=1)
    assert not torch.equal(actual, expected)
    assert relative_error(actual, expected) < 1e-5
