"""`logit` and `lrp` against hosts of five kinds that are written out with hand-placed detaches."""

import pytest

import unilinattn as ula
from tests.methods.explicit import FIVE, Rule, detached
from tests.methods.hosts import close, traced
from unilinattn.testing import promoted


@pytest.mark.parametrize(("method", "rule", "other"), [("logit", "freeze", "half"), ("lrp", "half", "freeze")])
@pytest.mark.parametrize("name", FIVE)
def test_scores_are_those_of_the_detached_model(name: str, method: str, rule: Rule, other: Rule) -> None:
    expected = detached(name, rule)
    with promoted():
        result = ula.explain(traced(name), method=method, target=-1)
    assert close(result.scores, expected.tokens)
    assert close(result.extras["logit"], expected.logit)
    assert float((result.extras["bias"] - expected.bias).abs().max()) <= 1e-10 * float(expected.tokens.abs().max())
    assert not close(result.scores, detached(name, other).tokens)
