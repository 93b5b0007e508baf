"""The contribution norms in torch against their definition: sizes, layouts, small vectors, Gram matrices."""

import pytest
import torch
from torch import Tensor

from unilinattn.errors import OptionError
from unilinattn.kernels.contribution_norms import gram, naive, tiled
from unilinattn.kernels.contribution_norms.naive import Order, Products
from unilinattn.testing import relative_error

ORDERS: list[Order] = [1.0, 2.0, 3.5, float("inf"), "alti", "dot"]


def drawn(
    order: Order, groups: int, sequences: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor | None]:
    vectors = torch.randn(groups, 6, 5, 7, dtype=torch.float64)
    return vectors, torch.randn(sequences, 5, 9, dtype=torch.float64) if isinstance(order, str) else None


@pytest.mark.parametrize("part", [1, 100, tiled.PART])
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_norms_equal_their_definition(order: Order, keyed: bool, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "PART", part)
    vectors, reference = drawn(order, 6, 2)
    weight = torch.randn(6 if keyed else 1, 9, 6, dtype=torch.float64)
    expected = naive.norms(Products(vectors, weight), order=order, reference=reference)
    assert relative_error(tiled.norms(Products(vectors, weight), order=order, reference=reference), expected) < 1e-13
    formed = (weight @ vectors.flatten(2)).unflatten(2, (5, 7))
    innermost = formed.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    for each in (formed, innermost):
        before = each.clone()
        assert relative_error(tiled.norms(Products(each, None), order=order, reference=reference), expected) < 1e-13
        assert torch.equal(each, before)


def test_the_alti_score_of_a_small_vector_is_accurate() -> None:
    # For a large output the difference of two norms would be only rounding.
    vectors = 1e-9 * torch.randn(1, 9, 4, 50)
    reference = torch.randn(1, 4, 9)
    reference[0, 0, :3] = 0
    y = reference.double().transpose(1, 2).unsqueeze(3)
    exact = (y.abs() - (y - vectors.double()).abs()).sum(1)
    actual = tiled.norms(Products(vectors, None), order="alti", reference=reference)
    assert torch.equal(actual > 0, exact > 0)
    assert relative_error(actual, exact) < 1e-6


def test_gram_matrices_give_the_same_norms() -> None:
    vectors, weight = torch.randn(4, 6, 5, 7), torch.randn(4, 12, 6)
    # A tolerance below the rounding of float32 products.
    assert (
        relative_error(gram.norms(vectors, gram.gram(weight)), naive.norms(Products(vectors, weight), order=2.0)) < 1e-7
    )


def test_gram_matrices_give_small_norms_for_cancelling_vectors() -> None:
    weight = torch.randn(1, 40, 1).expand(-1, -1, 2) * torch.tensor([1.0, -1.0])
    vectors = torch.ones(1, 2, 3, 3)
    vectors[:, 1] += 1e-5 * torch.randn(3, 3)
    expected = naive.norms(Products(vectors, weight), order=2.0)
    assert relative_error(gram.norms(vectors, gram.gram(weight)), expected) < 1e-4


def test_gram_matrices_give_zero_for_fully_cancelling_vectors() -> None:
    # Rounding makes some of the squares negative, which must not reach the square root.
    two = torch.randn(50, 40, 2, dtype=torch.float64)
    weight = torch.cat([two, -two.sum(2, keepdim=True)], dim=2)
    squared, ones = gram.gram(weight), torch.ones(50, 3, 2, 2)
    assert float((squared @ ones.double().flatten(2)).sum(1).min()) < 0
    actual = gram.norms(ones, squared)
    assert torch.isfinite(actual).all() and float(actual.max()) <= 1e-6


@pytest.mark.parametrize("part", [1, 100, tiled.PART])
@pytest.mark.parametrize("keyed", [False, True])
def test_the_norms_of_alti_are_two_orders(keyed: bool, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "PART", part)
    vectors, reference = drawn("alti", 6, 2)
    assert reference is not None
    weight = torch.randn(6 if keyed else 1, 9, 6, dtype=torch.float64)
    expected = naive.alti_norms(Products(vectors, weight), reference)
    assert torch.equal(expected[1], naive.norms(Products(vectors, weight), order=1.0))
    formed = (weight @ vectors.flatten(2)).unflatten(2, (5, 7))
    for actual in (
        tiled.alti_norms(Products(vectors, weight), reference),
        tiled.alti_norms(Products(formed, None), reference),
    ):
        assert all(relative_error(one, other) < 1e-13 for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("order", ["alti", "dot", -1.0, 0.0])
def test_an_unsupported_order_is_refused(order: Order) -> None:
    vectors, _ = drawn(2.0, 1, 1)
    with pytest.raises(OptionError, match="order"):
        tiled.norms(Products(vectors, None), order=order)
    with pytest.raises(OptionError, match="without a reference"):
        tiled.norms(Products(vectors, None), order=2.0, reference=torch.randn(1, 5, 6))
