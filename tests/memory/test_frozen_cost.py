"""The estimate of a frozen run against the bytes that are counted while it runs."""

import pytest

from tests.memory.hosts import traced
from unilinattn.frozen.passes import FREEZE, HALF, Rule
from unilinattn.frozen.run import frozen
from unilinattn.testing.peak import Peak


@pytest.mark.parametrize(
    "name",
    ["wide mamba", "gpt2", "wide mamba2", "qwen3 next"],
)
def test_the_estimate_of_a_frozen_run_is_within_a_factor_of_two(name: str) -> None:
    trace = traced(name, 256)
    for kind, rule in (("freeze", FREEZE), ("half", HALF), ("gamma", Rule(half=True, gamma=0.25))):
        frozen(trace, [-1], rule=rule).shares(-1)
        with Peak() as counted:
            frozen(trace, [-1], rule=rule).shares(-1)
        assert counted.peak / 2 <= trace.frozen_cost(1, rule=kind) <= 2 * counted.peak, kind
