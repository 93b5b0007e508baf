"""The row product against its definition: in torch, and in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unilinattn.kernels.reduced_map import triton as reduced
from unilinattn.kernels.reduced_map.tiled import HeadMap
from unilinattn.kernels.reduced_map.triton_kernels import far_tiles
from unilinattn.kernels.row_product import naive, tiled
from unilinattn.kernels.row_product import triton as form
from unilinattn.testing import relative_error

BATCH, HEADS, STATE = 2, 3, 3


@pytest.fixture(autouse=True)
def small(on_a_gpu: None, poisoned: None, monkeypatch: pytest.MonkeyPatch, pinned: Callable[..., None]) -> None:
    """Select small tiles."""
    monkeypatch.setattr(reduced, "CHUNK", 32)
    monkeypatch.setattr(form, "NUMBERS", 32 * BATCH * HEADS * STATE * 2)
    pinned(far_tiles, ROWS=32, COLS=16, INNER=16)


def given(length: int, dtype: torch.dtype) -> tuple:
    torch.manual_seed(length)
    query, key = torch.randn(2, BATCH, length, HEADS, STATE).to(dtype)
    decay = (-torch.rand(BATCH, length, HEADS, STATE).pow(6) * 300).to(dtype)
    row, weight = torch.randn(2, BATCH, length).to(dtype)
    left = torch.randn(BATCH, length, HEADS).to(dtype)
    taps = {0: left.flip(1), 3: torch.randn(1, 1, HEADS).to(dtype)}

    def of(tokens: slice, heads: slice) -> tuple[Tensor, Tensor, Tensor]:
        return query[:, tokens, heads], key[:, tokens, heads], decay[:, tokens, heads]

    return of, (query, key, decay), row, weight, left, taps


@pytest.mark.parametrize("sign", ["keep", "clamp", "abs"])
@pytest.mark.parametrize("length", [1, 3, 63, 130])
@pytest.mark.parametrize("module", [tiled, form], ids=["torch", "triton"])
def test_the_map_equals_its_definition(module, length: int, sign: str) -> None:
    dtype, bound = (torch.float64, 1e-13) if module is tiled else (torch.float32, 1e-5)
    of, factors, row, weight, left, taps = given(length, dtype)
    one = torch.ones(BATCH, length, HEADS, dtype=dtype)
    shape = (BATCH, length, HEADS, STATE)
    # With weights and taps in blocks of 50 rows; without them in default blocks.
    actual = module.row_product(HeadMap(of, shape, left, taps), row, weight, sign=sign, rows=50)
    every = {lag: tap.expand_as(one) for lag, tap in taps.items()}
    assert relative_error(actual, naive.row_product(*factors, left, every, row, weight, sign)) < bound
    if sign != "keep":
        actual = module.row_product(HeadMap(of, shape), row, sign=sign)
        assert (
            relative_error(actual, naive.row_product(*factors, one, {0: one}, row, torch.ones_like(row), sign)) < bound
        )


@pytest.mark.long
def test_rows_and_weights_may_be_strided() -> None:
    of, factors, _, _, left, _ = given(100, torch.float32)
    row = torch.randn(100, BATCH).T
    weight = torch.randn(BATCH, 1).expand(-1, 100)
    one = torch.ones(BATCH, 100, HEADS)
    actual = form.row_product(HeadMap(of, (BATCH, 100, HEADS, STATE), left), row, weight, sign="abs")
    assert relative_error(actual, naive.row_product(*factors, left, {0: one}, row, weight, "abs")) < 1e-5
