"""`tools.laws`: each law holds for a real model, and notices a result that breaks it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tools import laws
from tools.sweep_run import Case, prepared
from unilinattn import Attribution
from unilinattn.errors import UncoveredError
from unilinattn.testing import promoted

LLAMA = Case("causal lm", "llama", "LlamaForCausalLM")
METHODS = ("logit", "gradient", "occlusion")

Change = Callable[[Attribution, Mapping[str, Any], str, int], Any]
"""Returns other scores for a result, given the inputs, the method and the target."""


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> laws.Subject:
    monkeypatch.setattr(laws, "METHODS", {name: {} for name in METHODS})
    model, inputs, *_ = prepared(LLAMA)
    return laws.Subject(model.double(), inputs, laws.EXACT, laws.explained_by(model))


def changed(subject: laws.Subject, change: Change) -> laws.Subject:
    """Return the subject with other results."""

    def explained(inputs: Mapping[str, Any], method: str, target: int) -> Attribution:
        result = subject.explained(inputs, method, target)
        scores = result.scores.clone()
        scores = change(replace(result, scores=scores), inputs, method, target)
        return replace(result, scores=scores)

    return replace(subject, explained=explained)


def of_future(result: Attribution, inputs: Mapping[str, Any], method: str, target: int) -> Any:
    result.scores[:, 3:] += target == 2
    return result.scores


def of_padding(result: Attribution, inputs: Mapping[str, Any], method: str, target: int) -> Any:
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    return result.scores + (mask == 0)


def without_a_token(result: Attribution, inputs: Mapping[str, Any], method: str, target: int) -> Any:
    result.scores[:, 1] *= method != "logit"
    return result.scores


def refused(result: Attribution, inputs: Mapping[str, Any], method: str, target: int) -> Any:
    if method != "gradient":
        raise UncoveredError("no rule. Methods that work here with their default options: 'gradient', 'occlusion'.")
    return result.scores


def test_every_law_holds_for_a_model(subject: laws.Subject) -> None:
    with promoted():
        assert laws.broken(subject) == []
    assert len(subject.results) == 2 * len(METHODS) and not subject.refusals


CHANGES: dict[str, tuple[Change, str]] = {
    "NaN": (lambda result, *_: result.scores * float("nan"), "finite: logit at -1: not finite"),
    "a token behind the target": (of_future, "influence: logit at 2: token 3 moves nothing"),
    "a token without a share": (without_a_token, "influence: logit at -1: token 1 moves the logits"),
    "the batch": (lambda result, *_: result.scores * len(result.scores), "batches: logit: other scores"),
    "the length": (lambda result, *_: result.scores * result.scores.shape[1], "prefixes: logit: other scores"),
    "padding": (of_padding, "padding: logit: other scores with padding on the right"),
    "advice": (refused, "advice: logit at -1 names occlusion: no rule"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_law_notices_results_that_depend_on(subject: laws.Subject, name: str) -> None:
    change, message = CHANGES[name]
    with promoted():
        messages = laws.broken(changed(subject, change))
    assert any(each.startswith(message) for each in messages), messages


def test_a_method_that_writes_into_a_weight_is_noticed(subject: laws.Subject) -> None:
    def written(result: Attribution, *_: Any) -> Any:
        with torch.no_grad():
            subject.model.model.norm.weight += 1
        return result.scores

    with promoted():
        assert "state: model.norm.weight changed" in laws.broken(changed(subject, written))


def test_the_command_counts_the_messages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(laws, "METHODS", {"logit": {}})
    assert laws.main([": LlamaForCausalLM$", "--jobs", "1"]) == 0
    assert capsys.readouterr().out == "1 classes, 0 messages.\n"


def test_a_pattern_that_finds_no_class_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        laws.main(["LlamaForCasualLM"])
    assert ended.value.code == 2 and "matches 'LlamaForCasualLM'" in capsys.readouterr().err
