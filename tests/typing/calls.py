"""Calls of the public functions as a type checker sees them; `make lint` checks this file and nothing runs it.

An ignored error that does not occur is an error itself, so each `type: ignore` states that the line is refused.
"""

from typing import Any, assert_type

from torch import nn

import unilinattn as ula
from unilinattn.results.estimate import Estimate


def accepted(model: nn.Module, trace: ula.Trace, name: str, options: dict[str, Any]) -> None:
    """Methods as objects, names with options, and the default method."""
    methods = ula.methods
    assert_type(ula.explain(trace, method=methods.Latim(p=1)), ula.Attribution)
    assert_type(ula.explain(trace, method=methods.Latim(layers=1, residual=True), target=-1), ula.Attribution)
    assert_type(
        ula.explain(model, "a text", tokenizer=object(), method=methods.Logit(logit=" Paris", by="layer")),
        ula.Attribution,
    )
    assert_type(ula.explain(trace, method=methods.Raw(heads=[0, 1], layers=["mixer", 3])), ula.Attribution)
    assert_type(ula.explain(trace, method=methods.Knockout(replace=trace)), ula.Attribution)
    assert_type(ula.explain(trace, method="latim", p=1), ula.Attribution)
    assert_type(ula.explain(trace, method=name, **options), ula.Attribution)
    assert_type(ula.explain(trace, logit=" Paris"), ula.Attribution)
    assert_type(ula.estimate(trace, method=methods.Rollout(start_layer=2)), Estimate)
    assert_type(ula.compare({"a": trace}, methods=["raw", methods.Latim(p=1)]), ula.Comparison)
    assert_type(methods.Latim(p=1).p, float)
    ula.evaluate({"a": model}, [], ["raw", methods.Latim(p=1)], ["ap"])
    ula.evaluate({"a": model}, [], {"mine": methods.Latim(p=1), "raw": "raw"}, ["ap"])


def refused(model: nn.Module, trace: ula.Trace) -> None:
    """Options that the method does not take, and values that the option does not accept."""
    methods = ula.methods
    methods.Latim(q=1)  # type: ignore[call-arg]
    methods.Latim(p="2")  # type: ignore[arg-type]
    methods.Rollout(layers=1)  # type: ignore[call-arg]
    methods.Raw(heads="median")  # type: ignore[arg-type]
    methods.Logit(p=1)  # type: ignore[call-arg]
    methods.Ltim()  # type: ignore[attr-defined]
    ula.explain(trace, method=methods.Latim)  # type: ignore[arg-type]
    ula.explain(trace, method=1)  # type: ignore[arg-type]
    ula.compare({"a": trace}, methods=[1])  # type: ignore[list-item]
