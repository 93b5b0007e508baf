"""The Triton implementation of the reduced map against its definition, in the interpreter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.maps import Factors, map_error
from unilinattn.kernels.reduced_map import triton as form
from unilinattn.kernels.reduced_map.tiled import HeadMap
from unilinattn.kernels.reduced_map.triton_kernels import far_tiles
from unilinattn.memory import max_memory
from unilinattn.testing.peak import peak_of

BATCH, HEADS, STATE = 2, 3, 3


pytestmark = pytest.mark.usefixtures("on_a_gpu", "poisoned")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, pinned: Callable[..., None]) -> None:
    monkeypatch.setattr(form, "CHUNK", 32)
    monkeypatch.setattr(form, "COLUMNS", 32)
    monkeypatch.setattr(form, "INNER", 6)
    monkeypatch.setattr(form, "allowed", lambda: 0)
    pinned(far_tiles, ROWS=16, COLS=32, INNER=16)


def factors(length: int) -> Factors:
    torch.manual_seed(length)
    query, key = (torch.randn(BATCH, length, HEADS, STATE) for _ in range(2))
    # Decays from 1 to 0, and resets between segments.
    decay = -torch.rand(BATCH, length, HEADS, STATE).pow(6) * 800
    return query, key, decay.masked_fill(torch.rand(BATCH, length, 1, 1) < 0.02, -torch.inf)


def compared(length: int, rows: int, weights: tuple, precision: str = "ieee", given: Factors | None = None) -> float:
    drawn = factors(length) if given is None else given
    return map_error(form, drawn, *weights, rows, torch.float32, precision=precision)


def weights(length: int) -> tuple[Tensor, dict[int, Tensor]]:
    one = torch.ones(BATCH, length, HEADS)
    return torch.randn_like(one), {0: torch.randn_like(one), 2: torch.randn(1, 1, HEADS), 3: torch.randn_like(one)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("length", "rows"),
    [(1, 16), (3, 1024), (63, 24), *(pytest.param(130, rows, marks=pytest.mark.slow) for rows in (1024, 50))],
)
def test_the_map_equals_its_definition(length: int, rows: int) -> None:
    left, taps = weights(length)
    assert compared(length, rows, (None, None)) < 1e-5
    assert compared(length, rows, (left, taps)) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("length", "rows"),
    [(63, 1024), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((130, 1024), (130, 72), (70, 17)))],
)
def test_the_map_equals_its_definition_in_many_tiles(length: int, rows: int, small: None) -> None:
    left, taps = weights(length)
    for inputs in ((None, taps), (left, None)):
        assert compared(length, rows, inputs) < 1e-5


@pytest.mark.slow
def test_factors_may_be_shared_strided_and_taps_reach_far(small: None) -> None:
    length = 100
    _, key, decay = factors(length)
    query = torch.randn(BATCH, STATE, length, 1).permute(0, 2, 3, 1)
    key = key.transpose(1, 3).contiguous().transpose(1, 3)
    left = torch.randn(1, 1, HEADS).expand(BATCH, length, HEADS)
    far = {0: torch.randn(1, 1, HEADS), 31: torch.randn(1, 1, HEADS), 32: torch.randn(1, length, HEADS)}
    assert compared(length, 64, (left, far), given=(query, key, decay)) < 1e-5
    beyond = {5: torch.randn(1, 1, HEADS), 40: torch.randn(1, 1, HEADS)}
    assert compared(length, 64, (left, beyond), given=(query.expand_as(decay), key, decay)) < 1e-5


@pytest.mark.long
def test_a_low_precision_product_rounds_only_its_inputs() -> None:
    assert 1e-5 < compared(130, 1024, (None, None), precision="bf16") < 8e-3


@pytest.mark.slow
def test_tokens_after_a_strong_decay_are_accurate() -> None:
    query, key, decay = factors(130)
    weak = -0.05 * torch.rand_like(decay)
    for strong in (-20.0, -1e3, -1e6):
        mixed = torch.where(torch.rand_like(decay) < 0.15, torch.tensor(strong), weak)
        assert compared(130, 1024, (None, None), given=(query, key, mixed)) < 2e-6


@pytest.mark.long
@pytest.mark.parametrize("programs", [pytest.param(1, marks=pytest.mark.slow), 40, 1024])
def test_parts_of_the_inner_axis_are_summed_in_their_order(
    programs: int, monkeypatch: pytest.MonkeyPatch, pinned: Callable[..., None]
) -> None:
    pinned(far_tiles)
    monkeypatch.setattr(form, "LEAST", 32)
    monkeypatch.setattr(form, "PROGRAMS", programs)
    length, heads, state = 40, 11, 9
    query, key = torch.randn(2, BATCH, length, heads, state)
    decay = -torch.rand(BATCH, length, heads, state).pow(6) * 80
    given = query, key, decay.masked_fill(torch.rand(BATCH, length, 1, 1) < 0.02, -torch.inf)
    one = torch.ones(BATCH, length, heads)
    taps = {0: torch.randn_like(one), 3: torch.randn_like(one)}
    assert compared(length, 1024, (torch.randn_like(one), taps), given=given) < 1e-5

    def rows() -> Tensor:
        of = HeadMap(lambda tokens, some: tuple(t[:, tokens, some] for t in given), tuple(decay.shape))
        return torch.cat([block for _, block in form.reduced_rows(of, [slice(0, length)])])

    assert torch.equal(rows(), rows())


@pytest.mark.long
@pytest.mark.parametrize(("limit", "heads_at_once"), [(1 << 14, 4), (1 << 20, 7), (1 << 30, 24)])
def test_panels_take_the_memory_that_is_documented(
    limit: int, heads_at_once: int, monkeypatch: pytest.MonkeyPatch, pinned: Callable[..., None]
) -> None:
    pinned(far_tiles)
    monkeypatch.setattr(form, "INNER", 64)
    length, heads, state = 70, 24, 16
    factors = -torch.rand(3, 1, length, heads, state)
    of = HeadMap(lambda tokens, some: tuple(2 * t[:, tokens, some] for t in factors), tuple(factors.shape[1:]))

    def block() -> None:
        for _, rows in form.reduced_rows(of, [slice(10, length)]):
            assert rows.shape == (1, 60, length)

    with max_memory(limit):
        assert form._heads_at_once(60, of.shape) == heads_at_once
        block()
        documented = 4 * form.held_elements(60, of.shape)
        assert documented / 4 <= peak_of(block).peak <= documented
