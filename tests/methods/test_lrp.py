"""The method `lrp`: its relevances are those of the frozen run by the half rule, for every row and scalar."""

import pytest
import torch

import unilinattn as ula
from tests.methods.hosts import traced
from unilinattn.frozen.passes import HALF
from unilinattn.frozen.run import frozen


@pytest.mark.parametrize("name", ["mamba", "llama"])
def test_scores_and_extras_are_those_of_the_half_rule(name: str) -> None:
    trace = traced(name)
    result = ula.explain(trace, method="lrp", target=-1, logit=(2, 5))
    relevance = frozen(trace, rule=HALF).shares(-1, (2, 5))
    assert result.dims == ("batch", "key") and result.method == "lrp" and result.scope is None
    assert torch.allclose(result.scores, relevance.tokens.to(result.scores), rtol=1e-9)
    assert torch.allclose(result.extras["bias"], relevance.bias, rtol=1e-9)
    assert result.completeness_gap is not None and result.completeness_gap <= 1e-6
    shares = ula.explain(trace, method="logit", target=-1, logit=(2, 5))
    assert torch.allclose(result.extras["logit"], shares.extras["logit"])
    assert (result.scores - shares.scores).abs().max() > 1e-3 * shares.scores.abs().max()


def test_each_row_is_the_target_at_its_position() -> None:
    trace = traced("mamba", "left")
    every = ula.explain(trace, method="lrp")
    place = trace.positions(-2)
    one = ula.explain(trace, method="lrp", target=-2)
    assert torch.allclose(one.scores, every.scores[torch.arange(len(place)), place], rtol=1e-9, atol=1e-12)
    assert not every.scores.triu(1).any()
    total = every.scores.double().sum(-1) + every.extras["bias"]
    assert torch.allclose(total, every.extras["logit"], rtol=1e-6, atol=1e-9)
