"""The tasks of induction, the construction of the paper, and the simplified model as an operator."""

import pytest
import torch

import unilinattn as ula
from evidence import bootstrap, induction_length
from evidence.conv_ssm import ConvSSM, ConvSSMForCausalLM
from evidence.induction import KEY, LENGTH, STUDY, TASKS, samples, task_of
from evidence.mechanism import VOCABULARY, constructed, last_answers
from evidence.training import scored_seed
from tests.evidence.tables import made, verdicts
from unilinattn.examples.tasks import Induction


def test_the_special_token_occurs_twice_and_the_answer_follows_the_first() -> None:
    batch = TASKS["_key"].sample(64, 0)
    for ids, labels, relevant in zip(batch.input_ids.tolist(), batch.labels.tolist(), batch.relevant, strict=True):
        first, last = [at for at, token in enumerate(ids) if token == KEY]
        assert last == LENGTH - 1
        assert labels[last] == ids[first + 1]
        assert relevant.nonzero().tolist() == [[last, first + 1]]
    assert torch.equal(batch.input_ids, TASKS["_key"].sample(64, 0).input_ids)


def test_samples_hold_the_answer_before_the_query() -> None:
    for sample in samples(20, 3):
        (at,) = sample.relevant.nonzero().flatten().tolist()
        ids = sample.inputs[0].tolist()
        assert at < LENGTH - 1
        assert ids[at - 1] == ids[-1]
        assert ids[-1] not in ids[at:-1]


def recurrence(model: ConvSSM, x: torch.Tensor) -> torch.Tensor:
    """Induction Eq. 6-11, token by token."""
    taps = model.conv.weight[:, 0]
    previous = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    u = taps[:, 0] * previous + taps[:, 1] * x
    state = torch.zeros(len(x), len(model.ssm.log_rate), x.shape[2], dtype=x.dtype)
    outputs = []
    for token in u.unbind(1):
        step = torch.nn.functional.softplus(token @ model.ssm.to_step.weight.T + model.ssm.to_step.bias)
        decay = torch.exp(-step * model.ssm.log_rate.exp())
        state = decay[..., None] * state + (step * (token @ model.ssm.to_key.weight.T))[..., None] * token[:, None]
        outputs.append(((token @ model.ssm.to_query.weight.T)[..., None] * state).sum(1))
    return torch.stack(outputs, 1)


def test_the_simplified_model_is_the_recurrence_of_the_paper() -> None:
    torch.manual_seed(0)
    model, x = ConvSSM(6, 4, conv=True, ssm=True).double(), torch.randn(2, 9, 6, dtype=torch.float64)
    torch.testing.assert_close(model(x), recurrence(model, x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("conv", "ssm"), [(True, True), (True, False), (False, True)])
def test_the_simplified_model_is_an_exact_operator(conv: bool, ssm: bool) -> None:
    torch.manual_seed(0)
    model = ConvSSMForCausalLM(VOCABULARY, 6, 4, conv=conv, ssm=ssm).double().eval()
    trace = ula.trace(model, TASKS[""].sample(2, 0).input_ids[:, :11], progress=False)
    assert trace.layers[0].operator.reconstruction_error() < 1e-14


def test_the_construction_needs_a_decay() -> None:
    batch = TASKS[""].sample(128, 0)
    assert bool(last_answers(constructed(0.5), batch).all())
    right = last_answers(constructed(1.0), batch).double().mean()
    assert float(right) < 0.5


def test_long_sequences_have_255_tokens() -> None:
    hosts = {"conv_ssm": lambda: constructed(1.0), "conv_ssm_key": lambda: constructed(0.5)}
    table = induction_length.measure(hosts, TASKS, 0, 3)
    assert {(row["method"], row["metric"], row["samples"]) for row in table.summary()} == {
        ("conv_ssm", "without", 24),
        ("conv_ssm", "with", 24),
    }
    batch = Induction(vocabulary=VOCABULARY, length=255).sample(24, scored_seed(0))
    right = constructed(1.0)(batch.input_ids).logits[:, -1].argmax(-1) == batch.labels[:, -1]
    assert [row["value"] for row in table.select(metric="without")] == right.double().tolist()
    assert 0 < float(right.double().mean()) < 1


def test_one_model_is_trained_on_long_sequences() -> None:
    assert {model: task_of(model).length for model in STUDY.models} == {
        model: 255 if model == "conv_ssm_255_key" else LENGTH for model in STUDY.models
    }
    host = STUDY.models["conv_ssm_255_key"].build()
    table = induction_length.measure({"conv_ssm_255_key": lambda: host}, TASKS, 0, 1)
    assert {(row["method"], row["metric"]) for row in table} == {("conv_ssm, trained on 255", "with")}


def test_verdicts_on_long_sequences_follow_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 50)

    def of(full: float, parts: float) -> set[str]:
        models = ["conv_ssm", "conv_ssm, trained on 255", "mamba_x1", "mamba_x2", "conv", "ssm"]
        tables = {induction_length.TABLE: ([""], models, ["without", "with"])}
        results = made(tables, lambda method, metric: parts if method in ("conv", "ssm") else full)
        return set(verdicts(induction_length.claims(), results).values())

    assert of(0.995, 0.2) == {"holds"}
    assert of(0.5, 0.6) == {"contradicted"}
