"""Methods that ask for the gradient of one logit in turn share its passes inside of `one_gradient`."""

import pytest
import torch

import unilinattn as ula
from unilinattn.errors import ModelStateError
from unilinattn.examples import TASKS, load
from unilinattn.tracing.gradients import one_gradient

LENGTH = 8


def traced():
    host = load("induction", "mamba")
    return ula.trace(host, TASKS["induction"].sample(2, 0).input_ids[:, :LENGTH], progress=False)


class Runs:
    """The number of runs of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        model.register_forward_pre_hook(self.add)

    def add(self, *_: object) -> None:
        self.count += 1


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_equal_logits_run_the_model_once() -> None:
    trace = traced()
    expected = {logit: trace.gradient(-2, logit) for logit in (None, 3, (3, 4))}
    runs = Runs(trace.host)
    with one_gradient(trace):
        for logit in (None, 3, (3, 4)):
            first, again = trace.gradient(-2, logit), trace.gradient([LENGTH - 2, LENGTH - 2], logit)
            assert equal(first, expected[logit])
            assert equal(again, expected[logit])
        assert runs.count == 3
        assert not equal(trace.gradient(-1), expected[None])
        # Only the latest one is kept.
        trace.gradient(-2)
        assert runs.count == 5
    trace.gradient(-2)
    trace.gradient(-2)
    assert runs.count == 7


def test_a_gradient_that_is_written_into_is_a_copy() -> None:
    trace = traced()
    with one_gradient(trace):
        first = trace.gradient(-1)
        expected = [gradient.clone() for gradient in first]
        for gradient in first:
            gradient.zero_()
        assert equal(trace.gradient(-1), expected)


def test_a_function_and_another_trace_are_never_shared() -> None:
    trace, other = traced(), traced()
    runs, others = Runs(trace.host), Runs(other.host)
    with one_gradient(trace):
        for at in (0, 1):
            trace.gradient(-1, lambda output, at=at: output.logits[:, at].sum(-1))
            other.gradient(-1)
    assert (runs.count, others.count) == (2, 2)


def test_changed_weights_are_refused() -> None:
    trace = traced()
    with one_gradient(trace):
        trace.gradient(-1)
        with torch.no_grad():
            next(trace.host.parameters()).mul_(2)
        with pytest.raises(ModelStateError):
            trace.gradient(-1)


def test_methods_of_an_evaluation_share_the_gradient() -> None:
    trace = traced()
    runs = Runs(trace.host)
    methods = ("attribution", "attention_grad", "contribution")
    alone = [ula.explain(trace, method=method, target=-1, progress=False).scores for method in methods]
    assert runs.count == 3
    with one_gradient(trace):
        shared = [ula.explain(trace, method=method, target=-1, progress=False).scores for method in methods]
    assert runs.count == 4
    assert equal(alone, shared)
