"""The parts of tensors that are compared or cut: factors of a sum by every element, arguments on a prefix."""

import pytest
import torch

from unilinattn.host import substitution
from unilinattn.tracing.sums import SAMPLE, fit_factors


@pytest.mark.parametrize("place", [0, 1, 2, -1])
def test_a_sum_that_misses_one_element_has_no_factors(place: int) -> None:
    parts = [torch.randn(3 * SAMPLE) for _ in range(2)]
    total = parts[0] + 0.5 * parts[1]
    assert fit_factors(total, parts) == [1.0, pytest.approx(0.5, rel=1e-6)]
    # The factors are fitted to every third element, of which 1, 2 and the last are none.
    total[place] += 1
    assert fit_factors(total, parts) is None


def test_arguments_on_a_prefix_have_its_tokens_on_every_axis_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(substitution, "PREFIX", 5)
    shapes = {(12,): (5,), (2, 12): (2, 5), (2, 12, 3): (2, 5, 3), (2, 1, 12, 12): (2, 1, 5, 5), (4, 7): (4, 7)}
    given = [torch.randn(shape) for shape in shapes]
    cut = substitution._cut({"of": given}, 12)["of"]
    assert [tuple(part.shape) for part in cut] == list(shapes.values())
    for part, whole in zip(cut, given, strict=True):
        assert torch.equal(part, whole[tuple(map(slice, part.shape))])
