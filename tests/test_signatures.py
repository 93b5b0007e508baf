"""The checker of signatures: the first calls of a function in each test."""

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from tests import signatures


@signatures.first_calls(typechecker=signatures.check)
def transposed(x: Float[Tensor, "row col"]) -> Float[Tensor, "row col"]:
    return x.T  # a wrong annotation


def test_a_wrong_annotation_is_found_in_the_first_calls_of_each_test() -> None:
    for _ in range(signatures.CALLS):
        with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
            transposed(torch.zeros(2, 3))
    assert transposed(torch.zeros(2, 3)).shape == (3, 2)
    signatures.next_test()
    with pytest.raises(jaxtyping.TypeCheckError, match="parameters"):
        transposed(torch.zeros(3))
