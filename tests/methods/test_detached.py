"""`logit` and `lrp` against hosts of five kinds that are written out with hand-placed detaches."""

import pytest
import torch

import unilinattn as ula
from tests.methods.explicit import FIVE, Rule, detached
from tests.methods.hosts import close, references, traced
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


@pytest.mark.parametrize("name", FIVE)
def test_shares_by_depth_and_by_layer_are_those_of_the_detached_model(name: str) -> None:
    expected = detached(name, "freeze")
    slopes = zip(expected.slopes, references(name), strict=True)
    parts = torch.stack([torch.einsum("bio,bijo->bj", slope, reference.shares) for slope, reference in slopes])
    with promoted():
        depth, layer = (ula.explain(traced(name), method="logit", target=-1, by=by) for by in ("depth", "layer"))
    assert close(depth.scores, expected.depths)
    assert close(layer.scores, parts)
    assert not close(depth.scores[0], expected.depths[1])
    assert not close(layer.scores[0], parts[1])
