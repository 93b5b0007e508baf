"""The Triton contribution norms against their definition, in the interpreter, and their use in methods."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import unilinattn as ula
from unilinattn.kernels.backend import using
from unilinattn.kernels.contribution_norms import naive
from unilinattn.kernels.contribution_norms import triton as form
from unilinattn.kernels.contribution_norms.naive import Order, Products
from unilinattn.kernels.contribution_norms.triton_kernels import pair_norms
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import host
from unilinattn.testing.peak import peak_of
from unilinattn.tracing.trace import trace

ORDERS: list[Order] = [1.0, 2.0, 3.0, 1.5, float("inf"), "alti", "dot"]


pytestmark = pytest.mark.usefixtures("on_a_gpu", "poisoned")


def reference(order: Order, rows: int, outs: int, sequences: int = 2) -> Tensor | None:
    return torch.randn(sequences, rows, outs) if isinstance(order, str) else None


def check(
    vectors: Tensor, weight: Tensor, order: Order, y: Tensor | None, bound: float = 1e-5, **options: Any
) -> float:
    actual = form.norms(Products(vectors, weight), order=order, reference=y, **options)
    error = relative_error(actual, naive.norms(Products(vectors, weight), order=order, reference=y))
    assert error < bound
    return error


@pytest.mark.parametrize("order", ORDERS)
def test_norms_equal_their_definition(order: Order) -> None:
    # Several programs along pairs, outputs and groups.
    check(torch.randn(2, 35, 9, 17), torch.randn(1, 140, 35), order, reference(order, 9, 140))


@pytest.mark.parametrize("order", ORDERS)
def test_each_key_may_have_a_different_weight(order: Order) -> None:
    check(torch.randn(6, 3, 70, 1), torch.randn(6, 5, 3), order, reference(order, 70, 5))


@pytest.mark.parametrize(("rows", "cols"), [(1, 3), (3, 1), (63, 3), (3, 130)])
def test_sizes_need_not_be_multiples_of_tiles(rows: int, cols: int) -> None:
    for order in (1.0, "alti"):
        # mypy infers a list of objects.
        check(torch.randn(2, 5, rows, cols), torch.randn(1, 3, 5), order, reference(order, rows, 3))  # type: ignore[arg-type]


def test_tensors_may_be_strided_and_shared() -> None:
    vectors = torch.randn(9, 17, 35).permute(2, 0, 1).expand(2, -1, -1, -1)
    check(vectors, torch.randn(35, 20).T.expand(2, -1, -1), "alti", torch.randn(20, 9).T.expand(2, -1, -1))
    check(vectors, torch.randn(1, 20, 35), "dot", torch.randn(20).expand(1, 9, -1))


def test_a_low_precision_product_rounds_only_its_inputs() -> None:
    vectors, weight = torch.randn(2, 35, 9, 17), torch.randn(1, 60, 35)
    # Triton's interpreter truncates both inputs to bfloat16, by up to 2^-7 each.
    assert check(vectors, weight, 2.0, None, 2 * 2**-7, precision="bf16") > 1e-4


@pytest.mark.parametrize("order", [1.0, 2.0, "alti"])
def test_the_default_precision_keeps_the_digits_of_float32(order: Order, pinned: Callable[..., None]) -> None:
    pinned(pair_norms)
    check(torch.randn(1, 200, 5, 7), torch.randn(1, 40, 200), order, reference(order, 5, 40, 1), 1e-6)


@pytest.mark.parametrize("order", [1.0, float("inf")])
@pytest.mark.parametrize("outs", [100, 300])
def test_allocations_agree_with_the_documented_ones(outs: int, order: Order) -> None:
    vectors, weight = torch.randn(2, 35, 9, 17), torch.randn(1, outs, 35)
    documented = 4 * form.held_elements(vectors.shape, outs)

    def norms() -> object:
        return form.norms(Products(vectors, weight), order=order)

    def both_norms() -> object:
        return form.alti_norms(Products(vectors, weight), torch.zeros(2, 9, outs))

    # On a GPU the first call times block sizes. The scalar NaN of `poisoned` is one more element.
    for call, inputs in ((norms, 0), (both_norms, 2 * 9 * outs)):
        call()
        assert documented / 2 <= peak_of(call).peak <= documented + 4 * (inputs + 1)


def test_the_norms_of_alti_are_two_orders() -> None:
    vectors, weight, y = torch.randn(2, 5, 9, 7), torch.randn(1, 12, 5), torch.randn(2, 9, 12)
    formed = (weight @ vectors.flatten(2)).unflatten(2, (9, 7))
    for actual in (form.alti_norms(Products(vectors, weight), y), form.alti_norms(Products(formed, None), y)):
        for one, other in zip(actual, naive.alti_norms(Products(vectors, weight), y), strict=True):
            assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("name", [pytest.param("mamba", marks=pytest.mark.slow), "mamba2", "gpt2"])
@pytest.mark.parametrize(("method", "options"), [("latim", {"p": 1.0}), ("latim", {"p": 2.0}), ("alti", {})])
def test_methods_use_the_kernel(
    name: str, method: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    device = torch.get_default_device()
    with torch.device("cpu"):
        model, inputs = host(name).model(), host(name).inputs()
    host_trace = trace(model.to(device), inputs.to(device))
    called: list[object] = []
    norms = form.norms
    monkeypatch.setattr(form, "norms", lambda *a, **k: called.append(a) or norms(*a, **k))
    with using("torch"):
        expected = ula.explain(host_trace, method=method, **options).scores
    assert not called
    with using("triton"):
        actual = ula.explain(host_trace, method=method, **options).scores
    # Norms of few channels and many pairs are computed without the vectors.
    assert called or (name, options) == ("gpt2", {"p": 2.0})
    assert relative_error(actual, expected) < 1e-5
