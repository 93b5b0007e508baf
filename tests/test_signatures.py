"""The checker of signatures: some calls of a function in each file of tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from tests import signatures


@pytest.fixture(autouse=True)
def new_file() -> Iterator[None]:
    signatures.next_test(Path("one"))
    yield
    signatures.next_test(Path(__file__))


@signatures.sampled(typechecker=signatures.check)
def transposed(x: Float[Tensor, "row col"]) -> Float[Tensor, "row col"]:
    return x.T  # a wrong annotation


def inner() -> Callable[[Tensor], Tensor]:
    @signatures.sampled(typechecker=signatures.check)
    def transposed(x: Float[Tensor, "row col"]) -> Float[Tensor, "row col"]:
        return x.T

    return transposed


@pytest.mark.parametrize("make", [lambda: transposed, inner], ids=["outer", "inner"])
def test_a_wrong_annotation_is_found_in_some_calls_of_each_file(make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    for call in range(1, 10):
        if call in (1, 2, 4, 8):
            with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
                make()(torch.zeros(2, 3))
        else:
            assert make()(torch.zeros(2, 3)).shape == (3, 2)
    signatures.next_test(Path("one"))
    assert make()(torch.zeros(2, 3)).shape == (3, 2)
    signatures.next_test(Path("other"))
    with pytest.raises(jaxtyping.TypeCheckError, match="parameters"):
        make()(torch.zeros(3))
