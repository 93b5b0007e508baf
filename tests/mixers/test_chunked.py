"""Gradients through chunks: linear memory, and equality with recomputed matrices."""

import pytest
import torch
from torch import Tensor

from tests.mixers import laws
from tests.mixers.memories import MEMORIES, substep
from unilinattn.kernels.backend import using
from unilinattn.memory import max_memory
from unilinattn.mixers import NormalizedExponential, chunked
from unilinattn.mixers.chunked import Chunked
from unilinattn.mixers.cost import cost_of
from unilinattn.testing.peak import Peak, peak_of

CASES = {
    name: MEMORIES[name]
    for name in (
        "delta rule, decay by head",
        "low-rank update, decay by head",
        "exclusive bonus",
        "normalised exponential",
        "mLSTM",
    )
}

every = pytest.mark.parametrize("name", CASES)
passes = pytest.mark.parametrize("passed", ["apply", "adjoint"])


def begun(case: laws.Case, factors: laws.Factors, passed: str, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A scalar result of a pass, and the tensors with gradients."""
    leaves = {name: factor.clone().requires_grad_() for name, factor in factors.items()}
    mixer = case.build(leaves)
    torch.manual_seed(seed)
    dtype = next(iter(factors.values())).dtype
    vectors, weights = laws.values(mixer, dtype=dtype).requires_grad_(), laws.values(mixer, dtype=dtype)
    return (getattr(mixer, passed)(vectors) * weights).sum(), [*leaves.values(), vectors]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select short chunks, so that allocations per chunk dominate."""
    monkeypatch.setattr(chunked, "CHUNK", 4)
    for mixer in (Chunked, NormalizedExponential):
        monkeypatch.setattr(mixer, "tokens", 4)


@pytest.mark.long
@every
@passes
@pytest.mark.parametrize("kept", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_gradients_allocate_linearly(
    name: str, passed: str, kept: int, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "KEPT", kept)

    def made(length: int) -> int:
        total, leaves = begun(CASES[name], CASES[name].draw(length), passed)
        with Peak() as counted:
            torch.autograd.grad(total, leaves)
        return counted.made

    assert made(128) <= 2.1 * made(64)


@every
@pytest.mark.parametrize("length", [37, 50])
def test_columns_that_pass_joined_chunks_agree_with_the_matrix(name: str, length: int, short: None) -> None:
    mixer = CASES[name].build(CASES[name].draw(length))
    # A state of one coordinate needs no join.
    assert mixer.chunks_at_once == (1 if name == "normalised exponential" else 4)
    assert length > 2 * mixer.chunks_at_once * mixer.tokens
    laws.check_reductions(mixer, 2)


def test_joined_chunks_fit_in_a_quarter_of_the_memory(short: None) -> None:
    mixer = CASES["delta rule, decay by head"].build(CASES["delta rule, decay by head"].draw(50))
    with max_memory(8 * 4 * mixer.making_elements(mixer.heads, 2)):
        assert mixer.chunks_at_once == 2
    with max_memory(8 * 4 * mixer.making_elements(mixer.heads, 2) - 1):
        assert mixer.chunks_at_once == 1


@every
@passes
@pytest.mark.parametrize("length", [65, 130])
def test_recomputed_matrices_give_the_same_gradients(
    name: str, passed: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = CASES[name].draw(length)
    saved = torch.autograd.grad(*begun(CASES[name], factors, passed))
    monkeypatch.setattr(chunked, "KEPT", 64)
    for again, once in zip(torch.autograd.grad(*begun(CASES[name], factors, passed)), saved, strict=True):
        assert laws.error(again, once) <= 1e-14


@passes
def test_a_long_pass_saves_states_but_not_matrices_for_its_gradient(
    passed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "KEPT", 64)
    mixer = CASES["delta rule, decay by head"].build(CASES["delta rule, decay by head"].draw(1280))
    vectors = laws.values(mixer).requires_grad_()
    with Peak() as counted:
        passed_on = getattr(mixer, passed)(vectors)
    # The output and one state per chunk: 6 elements for 64 tokens. One matrix per chunk takes 64 per token.
    assert counted.live <= 1.25 * passed_on.nbytes


EVERY = CASES | {"sub-steps": substep(1)}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("length", [3, 27, 36])
def test_chunks_side_by_side_have_the_same_matrix(
    name: str, length: int, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chunked, "side_by_side", 3)
    mixer = EVERY[name].build(EVERY[name].draw(length))
    laws.check_forms(mixer)
    together = mixer.materialize()
    monkeypatch.setattr(Chunked, "side_by_side", 1)
    assert laws.error(together, mixer.materialize()) <= 1e-13


@pytest.mark.parametrize("name", EVERY)
@passes
@pytest.mark.parametrize("kept", [0, 1000])
def test_chunks_side_by_side_have_the_same_gradients(
    name: str, passed: str, kept: int, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "KEPT", kept)
    factors = EVERY[name].draw(29)
    alone = torch.autograd.grad(*begun(EVERY[name], factors, passed))
    monkeypatch.setattr(Chunked, "side_by_side", 3)
    for together, each in zip(torch.autograd.grad(*begun(EVERY[name], factors, passed)), alone, strict=True):
        assert laws.error(together, each) <= 1e-12


@pytest.mark.parametrize("name", EVERY)
@passes
def test_the_form_of_triton_has_the_same_values_and_gradients(name: str, passed: str, short: None) -> None:
    case, factors = EVERY[name], laws.cast(EVERY[name].draw(29), torch.float32)
    with using("triton"):
        mixer = case.build(factors)
        # Chunks of four tokens: seven whole ones at once, and one token after them.
        assert mixer.side_by_side == 7
        value = laws.values(mixer, dtype=torch.float32)
        fast = getattr(mixer, passed)(value)
        gradients = torch.autograd.grad(*begun(case, factors, passed))
    wide = laws.cast(factors, torch.float64)
    assert laws.error(fast, getattr(case.build(wide), passed)(value.double())) <= 1e-5
    for actual, expected in zip(gradients, torch.autograd.grad(*begun(case, wide, passed)), strict=True):
        assert laws.error(actual, expected) <= 1e-4


def test_chunks_side_by_side_fit_in_a_quarter_of_the_memory(short: None) -> None:
    factors = laws.cast(CASES["delta rule, decay by head"].draw(50), torch.float32)
    mixer = CASES["delta rule, decay by head"].build(factors)
    assert mixer.side_by_side == 1
    with using("triton"):
        assert mixer.side_by_side == 12
        with max_memory(5 * 4 * 4 * mixer.making_elements(mixer.heads)):
            assert mixer.side_by_side == 5
        with max_memory(1):
            assert mixer.side_by_side == 1


@every
@pytest.mark.parametrize("beside", [1, 5])
def test_the_documented_memory_covers_chunks_side_by_side(
    name: str, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chunked, "side_by_side", beside)
    mixer = CASES[name].build(CASES[name].draw(5 * Chunked.tokens))
    expected, value = cost_of(mixer), laws.values(mixer, channels=8)
    measured = {
        "pass": (expected.pass_elements(8), peak_of(lambda: mixer.apply(value)).peak),
        "map": (expected.reduced_elements(64, 1), peak_of(lambda: [None for _ in mixer.reduced_rows(64)]).peak),
        "tile": (expected.tile_elements(320, 320, mixer.heads), peak_of(mixer.tile).peak),
    }
    for operation, (elements, peak) in measured.items():
        # Scales and factors of the tokens are not counted.
        assert peak <= 1.05 * 8 * elements, operation
