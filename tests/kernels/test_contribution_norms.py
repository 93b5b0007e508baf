"""Reductions of vectors that are there against their definition, small ones and both memory layouts."""

import pytest
import torch

from unilinattn.kernels.contribution_norms import naive, tiled
from unilinattn.testing import relative_error

ROWS, COLS, CHANNELS, OUT = 5, 7, 6, 9


@pytest.mark.parametrize("order", ["l1", "l2", "max", 1.0, 2.0, 3.5, float("inf"), "alti", "dot"])
@pytest.mark.parametrize("innermost", [False, True])
def test_vectors_are_reduced_as_defined(order: naive.Order, innermost: bool) -> None:
    read, write = (torch.randn(2, n, CHANNELS, 3, dtype=torch.float64) for n in (ROWS, COLS))
    weight = torch.randn(OUT, CHANNELS, dtype=torch.float64)
    shape = {"alti": (2, ROWS, OUT), "dot": (OUT,)}.get(str(order))
    reference = None if shape is None else torch.randn(shape, dtype=torch.float64)
    expected = naive.norms(read, write, weight, order=order, reference=reference)
    vectors = torch.einsum("dc,bicn,bjcn->bdij", weight, read, write)
    vectors = vectors.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if innermost else vectors
    assert relative_error(tiled.reduced_vectors(vectors, order, reference), expected) < 1e-13
    assert relative_error(tiled.norms(read, write, weight, order=order, reference=reference), expected) < 1e-13


def test_what_a_small_vector_brings_keeps_its_sign_and_digits() -> None:
    # Beside a large output the difference of two norms would be rounding alone.
    vectors = 1e-9 * torch.randn(1, OUT, 4, 50)
    reference = torch.randn(1, 4, OUT)
    reference[0, 0, :3] = 0
    y = reference.double().transpose(1, 2).unsqueeze(3)
    exact = (y.abs() - (y - vectors.double()).abs()).sum(1)
    found = tiled.reduced_vectors(vectors, "alti", reference)
    assert torch.equal(found > 0, exact > 0)
    assert relative_error(found, exact) < 1e-6
