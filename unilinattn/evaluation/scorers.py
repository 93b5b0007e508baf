"""The rows of an evaluation: registered methods with options, functions, and baselines that ignore the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.evaluation.samples import Sample, function_name
from unilinattn.methods.run import explain
from unilinattn.options import Options
from unilinattn.registry import method as registered
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.maps import map_shape
from unilinattn.tracing.trace import Target, Trace
from unilinattn.tracing.trust import Trust

BASELINES = ("random", "recency", "primacy")
"""Scores independent of model and tokens: random draws, the key's position, and its negative."""

DRAWS = 4
"""Random scores for each sample, over which its metrics are averaged."""


@dataclass(frozen=True)
class Scorer:
    """One row of an evaluation.

    Attributes:
        label: its label.
        described: its method and options, to compare with those of a stored evaluation.
        function: `function(trace, samples, trust=, max_memory=)` returns its results, several for random draws.
        reads_model: whether a call takes all samples of the trace, rather than one of them.
    """

    label: str
    described: Any
    function: Callable[..., list[Attribution]]
    reads_model: bool = True


def scorer(label: str, method: str | Scorer | Callable[[Trace, Sample], Any], options: Mapping[str, Any]) -> Scorer:
    """Return a row of a registered method with options, of a function, or another row under this label.

    Raises `OptionError` for an unknown method or option.
    """
    if isinstance(method, Scorer):
        return replace(method, label=label)
    if callable(method):
        return Scorer(label, {"function": function_name(method)}, _of_function(label, method))
    entry = registered(method)
    described = dict(options)
    if entry.options is not None and issubclass(entry.options, Options):
        described = entry.options(**options).model_dump()

    def run(trace: Trace, samples: Sequence[Sample], *, trust: Trust, max_memory: int | None) -> list[Attribution]:
        arguments = {"trust": trust, "max_memory": max_memory, "progress": False, **options}
        return [explain(trace, method=method, target=target_of(samples), **arguments)]

    return Scorer(label, {"method": method, "options": described}, run)


def target_of(samples: Sequence[Sample]) -> Target | None:
    """Return the target of a batch: the only one, or that of each sample."""
    targets = [sample.target for sample in samples if sample.target is not None]
    return targets if len(set(targets)) > 1 else samples[0].target


def baseline(name: str) -> Scorer:
    """Return the row of a baseline: scores by chance, or by the keys' positions.

    Raises `OptionError` for an unknown name.
    """
    if name not in BASELINES:
        raise OptionError(f"unknown baseline {name!r}{nearest(name, BASELINES)}")

    def run(trace: Trace, samples: Sequence[Sample], **_: Any) -> list[Attribution]:
        (sample,) = samples
        queries, keys = map_shape(trace.layers[-1])[1:]
        every = sample.target is None and sample.relevant is not None and sample.relevant.ndim == 2
        shape = (queries, keys) if every else (keys,)
        position = torch.arange(keys, dtype=torch.float64, device="cpu").expand(shape)
        scores = {"recency": [position], "primacy": [-position]}
        draws = scores.get(name) or [torch.rand(*shape, dtype=torch.float64, device="cpu") for _ in range(DRAWS)]
        return [as_result(name, draw, trace) for draw in draws]

    return Scorer(name, {"baseline": name}, run, reads_model=False)


def _of_function(label: str, function: Callable[[Trace, Sample], Any]) -> Callable[..., list[Attribution]]:
    def run(trace: Trace, samples: Sequence[Sample], **_: Any) -> list[Attribution]:
        (sample,) = samples
        scores = function(trace, sample)
        if isinstance(scores, Attribution):
            return [scores]
        if not isinstance(scores, Tensor) or scores.ndim not in (1, 2) or not scores.is_floating_point():
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InputError(
                f"the function returned {got}; it returns floating-point scores (key,) or (query, key), or an "
                "`Attribution`."
            )
        return [as_result(label, scores, trace)]

    return run


def as_result(label: str, scores: Tensor, trace: Trace) -> Attribution:
    """Return scores (key,) or (query, key) of one sample as a result."""
    dims = ("batch", "key") if scores.ndim == 1 else ("batch", "query", "key")
    return Attribution(scores=scores[None], dims=dims, method=label, mask=trace.layers[-1].mask, model=trace.model)
