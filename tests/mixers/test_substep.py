"""Sub-steps of the gated delta product: their sum, and refusals; `test_memories` has their other tests."""

import pytest
import torch

from tests.mixers import laws
from tests.mixers.memories import BATCH, COUNT, HEADS, MEMORIES, expanded
from unilinattn.errors import InputError
from unilinattn.kernels.scan import recurrences
from unilinattn.mixers.reversed import Reversed
from unilinattn.mixers.substep import Substep

draw = MEMORIES["sub-step 0"].draw


def test_the_layer_is_the_sum_of_its_substeps() -> None:
    factors = draw(70)
    mixer = expanded(factors)
    value = torch.randn(BATCH, 70, COUNT, HEADS, 2, dtype=torch.float64)
    summed = sum(Substep(mixer, COUNT, s).apply(value[:, :, s]) for s in range(COUNT))
    assert laws.error(summed, recurrences.delta_product(**factors, value=value)) <= 1e-13


@pytest.mark.parametrize(("count", "index"), [(0, 0), (2, 0), (3, 3), (3, -1)])
def test_an_invalid_number_of_substeps_is_refused(count: int, index: int) -> None:
    with pytest.raises(InputError, match=f"sub-step {index} of {count}"):
        Substep(expanded(draw(5)), count, index)


def test_another_structure_is_refused() -> None:
    with pytest.raises(InputError, match="sub-steps of Reversed are not defined"):
        Substep(Reversed(expanded(draw(2))), COUNT, 0)
