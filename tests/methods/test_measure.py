"""Log-odds as the explained number: linear in the logits with frozen probabilities, and far from saturation."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForSequenceClassification

import unilinattn as ula
from tests.methods.hosts import traced
from unilinattn.host.logits import relative
from unilinattn.testing import promoted


def explained(trace: ula.Trace, method: str, **options: object) -> ula.Attribution:
    return ula.explain(trace, method=method, target=-1, progress=False, **options)


@pytest.mark.long
@pytest.mark.parametrize("method", ["logit", "lrp", "attn_lrp"])
@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_log_odds_weight_the_other_logits_by_their_probabilities(name: str, method: str) -> None:
    trace = traced(name)
    with promoted():
        result = explained(trace, method, logit=3, measure="log-odds")
        logits = trace.output.logits[:, -1].double()
        weights = logits.index_fill(1, torch.tensor([3]), -torch.inf).softmax(1)
        expected = explained(trace, method, logit=3, measure="logit").scores.double()
        for token in range(logits.shape[1]):
            of_token = explained(trace, method, logit=token, measure="logit").scores.double()
            expected -= weights[:, token, None] * of_token
    assert torch.allclose(result.scores.double(), expected, rtol=1e-5, atol=1e-9)
    p = logits.softmax(1)[:, 3]
    assert torch.allclose(result.extras["logit"], p.log() - (1 - p).log(), rtol=1e-6)


def test_the_parts_of_log_odds_add_up() -> None:
    with promoted():
        trace = traced("mamba")
        result = explained(trace, "logit", measure="log-odds", logit=3)
    total = result.scores.double().sum(1) + result.extras["bias"] + result.extras["remainder"]
    assert torch.allclose(total, result.extras["logit"], rtol=1e-6, atol=1e-9)
    others = trace.output.logits[:, -1].double().index_fill(1, torch.tensor([3]), -torch.inf).softmax(1)
    assert torch.allclose(result.extras["remainder"], others.xlogy(others).sum(1), rtol=1e-6)


def test_a_certain_prediction_has_log_odds_whose_shares_do_not_vanish() -> None:
    bert = BertForMaskedLM(BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).eval()
    with torch.no_grad():
        bert.cls.predictions.decoder.bias[7] = 500
    result = ula.explain(bert, torch.randint(40, (1, 5)), method="lrp", target=2, measure="log-odds")
    with torch.no_grad():
        assert float(bert(torch.zeros(1, 5, dtype=torch.long)).logits[0, 2].softmax(0)[7]) == 1
    assert 400 < float(result.extras["logit"]) < 600
    assert bool((result.scores.abs() > 1e-6).any()) and result.completeness_gap is not None
    assert result.completeness_gap < 1e-5


@pytest.mark.parametrize("measure", ["log-odds", "centered"])
def test_a_single_logit_is_itself(measure: str) -> None:
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=40, num_labels=1, pad_token_id=0, **sizes)
    trace = ula.trace(LlamaForSequenceClassification(config).eval(), torch.randint(1, 40, (2, 5)), progress=False)
    results = [ula.explain(trace, method="lrp", logit=0, measure=each) for each in (measure, "logit")]
    assert torch.equal(results[0].scores, results[1].scores) and bool(results[0].scores.any())


def test_logits_far_below_the_largest_have_no_gradient_below_the_normal_numbers() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -95.0]], requires_grad=True)
    relative(logits, torch.tensor([[0]]), "log-odds").sum().backward()
    assert logits.grad is not None and logits.grad[0, 3] == 0
    assert torch.allclose(logits.grad[0, 1:3], -torch.tensor([2.0, 1.0]).softmax(0))
