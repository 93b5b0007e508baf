"""The example in the description of each method."""

import doctest

import pytest

from unilinattn.options import METHODS, Options


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_example_of_a_method_runs(method: type[Options]) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(method, globs={})
    assert f"method=ula.methods.{method.__name__}(" in example.docstring
    results = doctest.DocTestRunner().run(example)
    assert (results.failed, results.attempted) == (0, 5)


def test_a_wrong_output_is_detected() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None).failed == 1
