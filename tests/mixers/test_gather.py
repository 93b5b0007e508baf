"""Gather: a query reads one token or none, in every operation."""

import pytest
import torch

from unilinattn.mixers import Gather

INDEX = torch.tensor([[2, 0, -1, 4, 4], [1, 3, 0, -1, 2]])


@pytest.mark.parametrize("index", [INDEX, INDEX.clamp_min(0)], ids=["with holes", "without"])
def test_every_operation_is_that_of_the_matrix(index: torch.Tensor) -> None:
    mixer = Gather(index, 6, like=torch.empty(0, dtype=torch.float64))
    matrix = torch.zeros(2, 1, 5, 6, dtype=torch.float64)
    for sequence, query in torch.cartesian_prod(torch.arange(2), torch.arange(5)).tolist():
        if index[sequence, query] >= 0:
            matrix[sequence, 0, query, index[sequence, query]] = 1
    assert torch.equal(mixer.materialize(), matrix)
    assert torch.equal(mixer.tile(slice(1, 4), slice(0, 5, 2)), matrix[:, :, 1:4, 0:5:2])
    assert torch.equal(mixer.diagonal(), matrix.diagonal(dim1=2, dim2=3))
    assert torch.equal(mixer.rows(torch.tensor([[3], [0]]))[:, 0, 0], matrix[[0, 1], 0, [3, 0]])
    value, grad = (torch.randn(2, n, 1, 3, dtype=torch.float64) for n in (6, 5))
    assert torch.equal(mixer.apply(value), torch.einsum("bhij,bjhp->bihp", matrix, value))
    torch.testing.assert_close(mixer.adjoint(grad), torch.einsum("bhij,bihp->bjhp", matrix, grad))
