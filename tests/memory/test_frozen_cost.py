"""The estimate of a frozen run against the bytes that are counted while it runs."""

import pytest

from tests.memory.hosts import traced
from unilinattn.frozen.run import frozen
from unilinattn.testing.peak import Peak


@pytest.mark.parametrize(
    "name",
    ["wide mamba", "gpt2", "wide mamba2", "qwen3 next"],
)
def test_the_estimate_of_a_frozen_run_is_within_a_factor_of_two(name: str) -> None:
    trace = traced(name, 256)
    frozen(trace, [-1]).shares(-1)
    with Peak() as counted:
        frozen(trace, [-1]).shares(-1)
    assert counted.peak / 2 <= trace.frozen_cost(1) <= 2 * counted.peak
