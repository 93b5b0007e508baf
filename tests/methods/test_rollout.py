"""Rollout against the product of the maps, computed entry by entry."""

import pytest
import torch
from torch import Tensor

from tests.methods.hosts import BATCH, CASES, LENGTH, close, real_map, references, traced
from unilinattn.methods import rollout
from unilinattn.mixers import DiagonalDecay, ScalarDecay
from unilinattn.mixers.base import CoreMixer
from unilinattn.tracing.layer import Step


def product(alphas: list[Tensor], padding: str) -> Tensor:
    """rho = A_n ... A_1, A_l = I + mean_h alpha_l, entry by entry (HMA ACL Eq. 21-22)."""
    rho = torch.eye(LENGTH, dtype=torch.float64).repeat(BATCH, 1, 1)
    for alpha in alphas:
        a = alpha.mean(1) * real_map(padding)
        rows = rho.clone()
        for b in range(BATCH):
            for i in range(LENGTH):
                for k in range(LENGTH):
                    rows[b, i] += a[b, i, k] * rho[b, k]
        rho = rows
    return rho * real_map(padding)


def alphas(name: str, padding: str) -> list[Tensor]:
    return [reference.alpha for reference in references(name, padding)]


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_rollout_is_the_product_of_the_maps(name: str, padding: str) -> None:
    result = rollout(traced(name, padding))
    assert result.dims == ("batch", "query", "key")
    assert close(result.scores, product(alphas(name, padding), padding))


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_perturbed_products_give_other_scores(name: str, padding: str) -> None:
    scores = rollout(traced(name, padding)).scores
    first, second = alphas(name, padding)
    eye, real = torch.eye(LENGTH, dtype=torch.float64), real_map(padding)
    without_delta = (second.mean(1) * real) @ (first.mean(1) * real)
    added_up = (eye + first.mean(1) + second.mean(1)) * real
    assert not close(scores, without_delta)
    assert not close(scores, added_up)
    # The maps of a fixed convolution commute.
    assert name == "s4d" or not close(scores, product([second, first], padding))
    assert not close(scores, product([first * 2, second], padding))
    assert not close(scores, product([first.transpose(2, 3), second.transpose(2, 3)], padding))


def test_the_row_of_a_target_needs_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a map was built")

    cases = {name: (traced(name), rollout(traced(name), target=-1).scores) for name in ("mamba", "mamba2")}
    for cls in (CoreMixer, DiagonalDecay, ScalarDecay):
        for operation in ("rows", "tile", "materialize", "blocks", "reduced_rows", "row_product"):
            monkeypatch.setattr(cls, operation, refused)
    for trace, expected in cases.values():
        assert torch.equal(rollout(trace, target=-1).scores, expected)
        with pytest.raises(AssertionError, match="a map was built"):
            rollout(trace, target=-1, sign="clamp")


def test_scores_of_a_causal_model_are_lower_triangular() -> None:
    scores = rollout(traced("mamba")).scores
    assert torch.equal(scores, scores.tril())
    assert (scores.diagonal(dim1=1, dim2=2) != 0).all()


def test_layers_before_start_layer_are_the_identity() -> None:
    result = rollout(traced("mamba2"), start_layer=1)
    assert close(result.scores, product(alphas("mamba2", "none")[1:], "none"))
    assert result.layers == (traced("mamba2").layers[1].name,)
    assert set(result.reconstruction_error) == set(result.layers)


def test_layers_of_one_step_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced("mamba2", "left")
    monkeypatch.setattr(trace, "steps", (Step(trace.layers),))
    first, second = alphas("mamba2", "left")
    expected = product([first + second], "left")
    assert close(rollout(trace).scores, expected)
    assert close(rollout(trace, target=1).scores[0], expected[0, 1])


def test_the_target_column_is_never_discarded() -> None:
    trace = traced("gpt2")
    discarded = rollout(trace, target=2, discard=0.8).scores
    row = rollout(trace, target=2).scores
    assert (discarded[:, 2] > 1).all()
    assert not close(discarded, row)
    # Without a target each row keeps its diagonal, which for a causal mask gives the same row.
    assert close(discarded, rollout(trace, discard=0.8).scores[:, 2])
