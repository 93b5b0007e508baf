"""The checker of signatures: the first calls of a function in each test."""

import pytest
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation

from tests import signatures


def half(number: int) -> int:
    return number / 2  # type: ignore[return-value]  # a wrong annotation


def test_a_wrong_annotation_is_found_in_the_first_calls_of_each_test() -> None:
    checked = signatures.check(half)
    for _ in range(signatures.CALLS):
        with pytest.raises(BeartypeCallHintReturnViolation):
            checked(3)
    assert checked(3) == 1.5
    signatures.next_test()
    with pytest.raises(BeartypeCallHintParamViolation):
        checked("3")
