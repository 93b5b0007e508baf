"""Which operand of a product has all axes of the other one."""

import pytest
import torch

from unilinattn.rules.letters import value_among, wide_letters

SHAPES = {
    "one text and several images": ((1, 4), (4, 3), None),
    "several texts and one image": ((2, 4), (4, 1), None),
    "one text and one image": ((1, 4), (4, 1), None),
    "scores and values": ((2, 3, 5, 5), (2, 3, 5, 4), None),
    "weights of experts": ((2, 5, 1, 3), (2, 5, 3, 4), 1),
    "weights of experts, tokens in a row": ((7, 1, 3), (7, 3, 4), 1),
    "values of experts first": ((2, 5, 4, 3), (2, 5, 3, 1), 0),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("half", [False, True])
def test_the_operand_with_more_axes_is_the_value(name: str, half: bool) -> None:
    first, second, expected = SHAPES[name]
    letters = wide_letters(torch.matmul, (torch.zeros(first), torch.zeros(second)))
    assert value_among([1, 1], letters, half=half) == expected


@pytest.mark.parametrize(("ranks", "expected"), [((0, 0), None), ((1, 0), 1), ((2, 1), 1), ((1, 2), None)])
def test_an_operand_with_fewer_axes_is_a_factor_if_it_is_activated(
    ranks: tuple[int, int], expected: int | None
) -> None:
    letters = wide_letters(torch.einsum, ("bd,bkd->bk", torch.zeros(2, 3), torch.zeros(2, 4, 3)))
    assert value_among(ranks, letters, half=False) == expected


def test_an_equation_with_a_diagonal_has_no_letters() -> None:
    assert wide_letters(torch.einsum, ("ii,ij->j", torch.zeros(3, 3), torch.zeros(3, 2))) is None
