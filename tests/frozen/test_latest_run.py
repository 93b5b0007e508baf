"""Methods that ask in turn for a run by one rule share it inside of `latest_run`, as those of an evaluation do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unilinattn as ula
from unilinattn.errors import ModelStateError
from unilinattn.evaluation import task_samples
from unilinattn.examples import TASKS, load
from unilinattn.frozen.live import LiveRun, live
from unilinattn.frozen.passes import HALF
from unilinattn.frozen.run import FrozenRun, frozen
from unilinattn.frozen.token_pass import latest_run
from unilinattn.tracing.trace import Trace

LENGTH = 8
THIRDS = ula.methods.AttnLrp(split="thirds")
METHODS = ["alti_logit", "logit", "lrp", "transformer_attribution", "attn_lrp", THIRDS]


def traced(host: str = "transformer") -> Trace:
    return ula.trace(load("induction", host), TASKS["induction"].sample(2, 0).input_ids[:, :LENGTH], progress=False)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The kinds of the runs, in the order in which they are made."""
    kinds: list[type] = []
    for kind in (FrozenRun, LiveRun):

        def counted(self: Any, *args: Any, original: Callable[..., None] = kind.__init__, **options: Any) -> None:
            kinds.append(type(self))
            original(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", counted)
    return kinds


@pytest.mark.parametrize("host", ["transformer", "mamba"])
def test_methods_in_turn_have_the_same_scores_from_fewer_runs(host: str, made: list[type]) -> None:
    trace = traced(host)
    alone = [ula.explain(trace, method=method, target=-2, progress=False) for method in METHODS]
    assert len(made) == 6
    with latest_run(trace):
        shared = [ula.explain(trace, method=method, target=-2, progress=False) for method in METHODS]
    # `transformer_attribution` needs edges that the run of `lrp` lacks.
    assert made[6:] == [FrozenRun, FrozenRun, FrozenRun, LiveRun]
    for one, other in zip(alone, shared, strict=True):
        assert torch.equal(one.scores, other.scores)
        assert all(torch.equal(values, other.extras[name]) for name, values in one.extras.items())


def test_another_rule_or_target_or_trace_has_another_run(made: list[type]) -> None:
    trace, other = traced(), traced()
    with latest_run(trace):
        first = frozen(trace, [-1])
        assert frozen(trace, [[LENGTH - 1, LENGTH - 1]]) is first
        runs = [frozen(trace, [-1], rule=HALF), frozen(trace, [-2], rule=HALF), frozen(trace), live(trace, [-1])]
        # Only the latest one is kept.
        assert len({id(run) for run in (first, *runs, frozen(trace, [-1]))}) == 6
        assert frozen(other, [-1]) is not frozen(other, [-1])
    assert len(made) == 8
    assert frozen(trace, [-1]) is not frozen(trace, [-1])


@pytest.mark.parametrize("method", ["logit", "attn_lrp"])
def test_changed_weights_are_refused(method: str) -> None:
    trace = traced()
    with latest_run(trace):
        ula.explain(trace, method=method, target=-1, progress=False)
        with torch.no_grad():
            next(trace.host.parameters()).mul_(2)
        with pytest.raises(ModelStateError):
            (frozen if method == "logit" else live)(trace, [-1])


def test_gradients_of_other_logits_are_not_shared() -> None:
    trace = traced()
    logits = {logit: ula.explain(trace, method="gradient", target=-1, logit=logit, progress=False) for logit in (3, 4)}
    with latest_run(trace):
        for logit, alone in logits.items():
            scores = ula.explain(trace, method="gradient", target=-1, logit=logit, progress=False).scores
            assert torch.equal(scores, alone.scores)


@pytest.mark.long
def test_methods_of_an_evaluation_share_runs(made: list[type]) -> None:
    samples = task_samples("copying", 2, seed=0, target=24)
    options: dict[str, Any] = dict(baselines=[], batch_size=2, progress=False)
    model = {"mamba": load("copying", "mamba")}
    together = ula.evaluate(model, samples, METHODS, ["ap"], **options)
    runs = len(made)
    each = [row for method in METHODS for row in ula.evaluate(model, samples, [method], ["ap"], **options)]
    assert sorted(map(str, together)) == sorted(map(str, each))
    assert (runs, len(made) - runs) == (4, 6)
