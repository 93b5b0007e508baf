"""The reduced map against its definition."""

import pytest
import torch
from torch import Tensor

from unilinattn.kernels.reduced_map import tiled
from unilinattn.kernels.reduced_map.naive import reduced_map
from unilinattn.memory import parts
from unilinattn.testing import relative_error

BATCH, HEADS, STATE = 2, 5, 3


def factors(length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(length)
    query, key = (torch.randn(BATCH, length, HEADS, STATE, dtype=torch.float64) for _ in range(2))
    # Decays from 1 to 0.
    return query, key, -torch.rand(BATCH, length, HEADS, STATE, dtype=torch.float64).pow(6) * 800


@pytest.mark.parametrize("length", [1, 3, 8, 63, 130])
@pytest.mark.parametrize("rows", [16, pytest.param(24, marks=pytest.mark.slow), 1024])
@pytest.mark.parametrize("inner", [pytest.param(3, marks=pytest.mark.slow), 9, 1536])
def test_the_reduced_map_equals_its_definition(
    length: int, rows: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "INNER", inner)
    monkeypatch.setattr(tiled, "COLUMNS", 20)
    query, key, decay = factors(length)
    one = torch.ones(BATCH, length, HEADS, dtype=torch.float64)
    left = torch.randn_like(one)
    taps = {0: torch.randn_like(one), 2: torch.randn_like(one[:1, :1]), 3: torch.randn_like(one)}

    def of(tokens: slice, heads: slice) -> tuple[Tensor, Tensor, Tensor]:
        return query[:, tokens, heads], key[:, tokens, heads], decay[:, tokens, heads]

    for weights in ((None, None), (left, None), (None, taps), (left, taps)):
        blocks = list(tiled.reduced_rows(of, (BATCH, length, HEADS, STATE), *weights, blocks=parts(length, rows)))
        expected = reduced_map(
            query,
            key,
            decay,
            one if weights[0] is None else left,
            {lag: tap.expand_as(one) for lag, tap in (weights[1] or {0: one}).items()},
        )
        assert [part.start for part, _ in blocks] == list(range(0, length, rows))
        assert relative_error(torch.cat([block for _, block in blocks], dim=1), expected) < 1e-13
