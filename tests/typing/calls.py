"""Calls of the public functions as a type checker sees them; `make lint` checks this file and nothing runs it.

An ignored error that does not occur is an error itself, so each `type: ignore` states that the line is refused.
"""

from typing import Any, assert_type

from torch import nn

import unilinattn as ula
from unilinattn.results.estimate import Estimate


def accepted(model: nn.Module, trace: ula.Trace, name: str, options: dict[str, Any]) -> None:
    """Options of the named method, of the default methods, and of any method by `**options`."""
    assert_type(ula.explain(trace, method="latim", p=1), ula.Attribution)
    assert_type(ula.explain(trace, method="latim", layers=1, residual=True, target=-1), ula.Attribution)
    assert_type(ula.explain(model, "a text", tokenizer=object(), logit=" Paris", by="layer"), ula.Attribution)
    assert_type(ula.explain(trace, method="raw", heads=[0, 1], layers=["mixer", 3]), ula.Attribution)
    assert_type(ula.explain(trace, method=name), ula.Attribution)
    assert_type(ula.explain(trace, method=name, **options), ula.Attribution)
    assert_type(ula.estimate(trace, method="rollout", start_layer=2), Estimate)
    assert_type(ula.compare({"a": trace}, methods=["raw", "latim"], latim={"p": 1}, layers=0), ula.Comparison)


def refused(model: nn.Module, trace: ula.Trace, name: str) -> None:
    """Options that the method does not take, and values that the option does not accept."""
    ula.explain(trace, method="latim", q=1)  # type: ignore[call-overload]
    ula.explain(trace, method="latim", p="2")  # type: ignore[call-overload]
    ula.explain(trace, method="rollout", layers=1)  # type: ignore[call-overload]
    ula.explain(trace, method="raw", heads="median")  # type: ignore[call-overload]
    ula.explain(trace, start_layer=1)  # type: ignore[call-overload]
    ula.explain(trace, method=name, p=1)  # type: ignore[call-overload]
    ula.explain(model, targt=-1)  # type: ignore[call-overload]
    ula.estimate(trace, method="logit", p=1)  # type: ignore[call-overload]
    ula.compare({"a": trace}, latim={"q": 1})  # type: ignore[typeddict-unknown-key]
