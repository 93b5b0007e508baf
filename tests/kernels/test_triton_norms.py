"""The Triton contribution norms against their definition, interpreted on the CPU."""

import pytest
import torch
from torch import Tensor

from unilinattn.errors import OptionError
from unilinattn.kernels.contribution_norms import naive
from unilinattn.kernels.contribution_norms import triton as form
from unilinattn.testing import relative_error

ORDERS = ["l1", "l2", "max", 3.0, 1.5, float("inf"), "alti", "dot"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))


def reference(order: object, rows: int, outs: int) -> Tensor | None:
    return {"alti": torch.randn(2, rows, outs), "dot": torch.randn(outs)}.get(order)  # type: ignore[call-overload]


@pytest.mark.parametrize("order", ORDERS)
def test_they_are_their_definition(order) -> None:
    read, write = torch.randn(2, 9, 35, 3), torch.randn(2, 17, 35, 3)
    weight = torch.randn(70, 35)
    y = reference(order, 9, 70)
    got = form.norms(read, write, weight, order=order, reference=y)
    assert relative_error(got, naive.norms(read, write, weight, order=order, reference=y)) < 1e-5


@pytest.mark.parametrize(("rows", "cols"), [(1, 3), (3, 1), (63, 3), (3, 130)])
def test_sizes_are_ragged(rows: int, cols: int) -> None:
    read, write, weight = torch.randn(2, rows, 5, 2), torch.randn(2, cols, 5, 2), torch.randn(3, 5)
    for order in ("l1", "alti"):
        y = reference(order, rows, 3)
        got = form.norms(read, write, weight, order=order, reference=y)
        assert relative_error(got, naive.norms(read, write, weight, order=order, reference=y)) < 1e-5


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_map_gives_the_vectors_too(order, weighted: bool) -> None:
    alpha, value = torch.randn(2, 3, 9, 17).tril(), torch.randn(2, 17, 36)
    left = torch.randn(2, 9, 36) if weighted else None
    weight, y = torch.randn(40, 36), reference(order, 9, 40)
    got = form.mapped_norms(alpha, value, weight, order=order, left=left, reference=y)
    expected = naive.mapped_norms(alpha, value, weight, order=order, left=left, reference=y)
    assert relative_error(got, expected) < 1e-5


def test_factors_may_be_strided_and_shared() -> None:
    read = torch.randn(3, 35, 9).permute(2, 1, 0).expand(2, -1, -1, -1)
    write = torch.randn(2, 17, 1, 1).expand(-1, -1, 35, 3)
    weight = torch.randn(35, 20).T
    y = torch.randn(20, 9).T.expand(2, -1, -1)
    got = form.norms(read, write, weight, order="alti", reference=y)
    assert relative_error(got, naive.norms(read, write, weight, order="alti", reference=y)) < 1e-5
    alpha, value = torch.randn(2, 9, 17, 5).permute(0, 3, 1, 2), torch.randn(35, 17).T.expand(2, -1, -1)
    got = form.mapped_norms(alpha, value, weight, order="l2")
    assert relative_error(got, naive.mapped_norms(alpha, value, weight, order="l2")) < 1e-5


def test_a_coarse_product_rounds_its_inputs_alone() -> None:
    read, write, weight = torch.randn(2, 9, 35, 3), torch.randn(2, 17, 35, 3), torch.randn(70, 35)
    got = form.norms(read, write, weight, order="l2", precision="bf16")
    assert 1e-5 < relative_error(got, naive.norms(read, write, weight, order="l2")) < 8e-3


@pytest.mark.parametrize("order", ["alti", "dot", -1.0, 0.0])
def test_an_order_that_does_not_fit_is_refused(order) -> None:
    read = torch.randn(1, 2, 3, 1)
    with pytest.raises(OptionError, match="order"):
        form.norms(read, read, torch.randn(4, 3), order=order)
    with pytest.raises(OptionError, match="without a reference"):
        form.norms(read, read, torch.randn(4, 3), order="l2", reference=torch.randn(4))
