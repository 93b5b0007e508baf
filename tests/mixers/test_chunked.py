"""Gradients through chunks: linear memory, and equality with recomputed matrices."""

import pytest
import torch
from torch import Tensor

from tests.mixers import (
    laws,
    test_delta_rule,
    test_exclusive_bonus,
    test_low_rank_update,
    test_mlstm,
    test_normalized_exponential,
)
from unilinattn.memory import max_memory
from unilinattn.mixers import NormalizedExponential, chunked
from unilinattn.mixers.chunked import Chunked
from unilinattn.testing.peak import Peak

CASES = {
    "delta rule": test_delta_rule.case("head"),
    "low-rank update": test_low_rank_update.case(),
    "exclusive bonus": test_exclusive_bonus.CASE,
    "normalised exponential": test_normalized_exponential.CASE,
    "mLSTM": test_mlstm.CASE,
}

every = pytest.mark.parametrize("name", CASES)
passes = pytest.mark.parametrize("passed", ["apply", "adjoint"])


def begun(case: laws.Case, factors: laws.Factors, passed: str, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A scalar result of a pass, and the tensors with gradients."""
    leaves = {name: factor.clone().requires_grad_() for name, factor in factors.items()}
    mixer = case.build(leaves)
    torch.manual_seed(seed)
    vectors, weights = laws.values(mixer).requires_grad_(), laws.values(mixer)
    return (getattr(mixer, passed)(vectors) * weights).sum(), [*leaves.values(), vectors]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select short chunks, so that allocations per chunk dominate."""
    monkeypatch.setattr(chunked, "CHUNK", 4)
    for mixer in (Chunked, NormalizedExponential):
        monkeypatch.setattr(mixer, "tokens", 4)


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
    mixer = CASES["delta rule"].build(CASES["delta rule"].draw(50))
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
    mixer = CASES["delta rule"].build(CASES["delta rule"].draw(1280))
    vectors = laws.values(mixer).requires_grad_()
    with Peak() as counted:
        passed_on = getattr(mixer, passed)(vectors)
    # The output and one state per chunk: 6 elements for 64 tokens. One matrix per chunk takes 64 per token.
    assert counted.live <= 1.25 * passed_on.nbytes
