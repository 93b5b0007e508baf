"""Log-odds as the explained number: linear in the logits with frozen probabilities, and far from saturation."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import unilinattn as ula
from tests.methods.hosts import traced
from unilinattn.errors import OptionError
from unilinattn.evaluation import PerturbationTest
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


def classifier(**settings: object) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=40)
    return BertForSequenceClassification(BertConfig(**sizes, initializer_range=0.5, **settings)).eval()


IDS = torch.arange(5, 11)[None]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_labels": 3}, "the log-odds of the model's prediction 'LABEL_"),
        (
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            "the logit of the most probable label 'LABEL_",
        ),
        ({"num_labels": 3, "problem_type": "regression"}, "the output 'LABEL_"),
        ({"num_labels": 1}, "the output 'LABEL_0'"),
    ],
)
def test_only_logits_of_a_softmax_have_log_odds_by_default(settings: dict[str, object], words: str) -> None:
    model = classifier(**settings)
    result = ula.explain(model, IDS)
    assert f"explains {words}" in str(result)
    with torch.no_grad():
        logits = model(IDS).logits[0].double()
    p = logits.softmax(0).max()
    expected = p.log() - (1 - p).log() if "log-odds" in words else logits.max()
    assert float(result.extras["logit"]) == pytest.approx(float(expected), rel=1e-5)
    assert result.options["measure"] == ("log-odds" if "log-odds" in words else "logit")
    assert str(ula.explain(model, IDS, logit=0)).count("label 0" if "label" in words else "0 'LABEL_0'") == 1


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_a_measure_by_a_softmax_is_refused_for_logits_without_one(problem: str) -> None:
    model = classifier(num_labels=3, problem_type=problem)
    with pytest.raises(OptionError, match=r"measure='log-odds' reads probabilities.*Give measure='logit'"):
        ula.explain(model, IDS, method="lrp", measure="log-odds")
    log_p = {"method": "knockout", "measure": "log-probability", "logit": 1}
    if problem == "regression":
        with pytest.raises(OptionError, match="the outputs of a regression have no probabilities"):
            ula.explain(model, IDS, **log_p)
        return
    by_logit = ula.explain(model, IDS, method="knockout", logit=1)
    with torch.no_grad():
        logit = model(IDS).logits[0, 1]
    falls = torch.nn.functional.logsigmoid(logit) - torch.nn.functional.logsigmoid(logit - by_logit.scores)
    assert torch.allclose(ula.explain(model, IDS, **log_p).scores, falls, atol=1e-6)


def test_the_probability_of_a_label_in_a_perturbation_is_that_of_its_sigmoid() -> None:
    model = classifier(num_labels=3, problem_type="multi_label_classification")
    curve = PerturbationTest(model, IDS, torch.ones(1, 6), masking="zero", labels=torch.tensor([1])).deletion(
        (0.0, 0.5)
    )
    with torch.no_grad():
        assert float(curve.values[0, 0]) == pytest.approx(float(model(IDS).logits[0, 1].sigmoid()), rel=1e-5)
