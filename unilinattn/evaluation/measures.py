"""The metrics of `evaluate` by name: each a number of one method's scores on one sample."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.evaluation.case import Case, joined, perturbation_test, rankings
from unilinattn.evaluation.masking import Masking
from unilinattn.evaluation.metrics import alignment_error_rate, completeness_gap
from unilinattn.evaluation.perturbation import TENTHS, PerturbationCurve
from unilinattn.evaluation.samples import Sample, function_name
from unilinattn.evaluation.segmentation import foreground_of, overlaps
from unilinattn.methods.check import Explained, check_of, without

Part = tuple[float, float]
"""Numerator and denominator of a ratio, which add up over samples."""


@dataclass(frozen=True)
class Measurement:
    """A metric of one sample.

    Attributes:
        value: the metric.
        parts: pairs of numerator and denominator that are summed over samples; the metric of several samples is the
            ratio of each pair's sums, averaged over pairs.
    """

    value: float
    parts: tuple[Part, ...]

    @classmethod
    def mean(cls, value: float, weight: float = 1.0) -> "Measurement":
        """Return a metric whose value over several samples is their mean, weighted by `weight`."""
        return cls(value, ((value * weight, weight),))


@dataclass(frozen=True)
class Metric:
    """A metric with its options.

    Attributes:
        name: name of the metric, or of the function.
        measure: the metric of a case, or with `of_batch` of each case of a batch; None for a case that has none.
        needs: the fields of a sample that it needs.
        larger_is_better: the direction, None for a function.
        options: options by name.
        of_batch: whether `measure` takes the cases of one method on the samples of a batch, because it runs the model
            or ranks them in one step.
    """

    name: str
    measure: Callable[..., Any]
    needs: tuple[str, ...] = ()
    larger_is_better: bool | None = None
    options: Mapping[str, Any] | None = None
    of_batch: bool = False

    def __call__(self, case: Case) -> Measurement | None:
        """Measure a case; raise `InputError` for a value that is not finite."""
        return self.of_cases([case])[0]

    def of_cases(self, cases: Sequence[Case]) -> list[Measurement | None]:
        """Measure the cases of a batch; raise `InputError` for a value that is not finite."""
        options = self.options or {}
        measured = (
            self.measure(cases, **options) if self.of_batch else [self.measure(case, **options) for case in cases]
        )
        for measurement in measured:
            if measurement is not None and not isfinite(measurement.value):
                raise InputError(f"the value is {measurement.value}; a metric that is undefined raises an error.")
        return list(measured)


def summed(measured: Sequence[Sequence[Part]]) -> list[Part]:
    """Return the sums of each part's numerators and denominators."""
    return [(sum(top for top, _ in terms), sum(bottom for _, bottom in terms)) for terms in zip(*measured, strict=True)]


def metric(name: str, options: Mapping[str, Any]) -> Metric:
    """Return a metric by name with options.

    Raises `OptionError` for an unknown name or option.
    """
    if name not in METRICS:
        raise OptionError(f"unknown metric {name!r}{nearest(name, METRICS)}")
    default = METRICS[name]
    accepted = ("masking", "mask_token_id") if name in PERTURBATIONS else ()
    for option in options:
        if option not in accepted:
            raise OptionError(f"metric {name} takes no option {option!r}{nearest(option, accepted)}")
    masking = options.get("masking", "zero")
    if masking not in get_args(Masking):
        raise OptionError(f"metric {name}: unknown masking {masking!r}{nearest(masking, get_args(Masking))}")
    needs = (*default.needs, "reference") if masking == "reference" else default.needs
    return replace(default, needs=needs, options=dict(options))


def function_metric(function: Callable[[Case], float]) -> Metric:
    """Return a function from a case to a number as a metric, which is averaged over samples."""
    return Metric(function_name(function), lambda case: Measurement.mean(float(function(case))))


def _ranking(field: str) -> Callable[[Sequence[Case]], list[Measurement]]:
    # Weighted by rows, so that the metric over samples is the mean over all rows.
    return lambda cases: [Measurement.mean(getattr(rank, field), float(rank.rows)) for rank in rankings(cases)]


def _alignment(case: Case) -> Measurement:
    possible = None if case.sample.possible is None else torch.atleast_2d(case.mask("possible"))
    scores, sure, valid = map(torch.atleast_2d, (case.scores, case.relevant, case.valid))
    links = int(valid.any(-1).sum()) + int(sure.sum())
    return Measurement.mean(alignment_error_rate(scores, sure, possible, valid), float(links))


def _curve(name: str) -> Callable[..., list[Measurement]]:
    return lambda cases, **options: [Measurement.mean(curve.area) for curve in _curves(name, cases, options)]


def _curves(name: str, cases: Sequence[Case], options: Mapping[str, Any]) -> list[PerturbationCurve]:
    """Return a curve of the perturbation test of each case."""
    curves = [getattr(perturbation_test(group, **options), name)() for group in joined(cases)]
    return [PerturbationCurve(curve.fractions, values[None]) for curve in curves for values in curve.values]


def _deletion(cases: Sequence[Case], **options: Any) -> list[Measurement]:
    return [
        Measurement(curve.area, tuple((value, 1.0) for value in (curve.values[0].cpu() * _weights()).tolist()))
        for curve in _curves("deletion", cases, options)
    ]


def _weights() -> Float[Tensor, " fraction"]:
    """Return the weights of a deletion curve's values, whose weighted mean is its area by the trapezoidal rule."""
    weights = torch.ones(len(TENTHS), dtype=torch.float64, device="cpu")
    weights[[0, -1]] = 0.5
    return weights * len(weights) / weights.sum()


def deletion_curve(samples: Sequence[Sequence[Sequence[float]]]) -> PerturbationCurve:
    """Return the deletion curve of each sample from the parts of the metric `deletion`, its weighted values."""
    values = torch.tensor(
        [[top / bottom for top, bottom in terms] for terms in samples], dtype=torch.float64, device="cpu"
    )
    return PerturbationCurve(TENTHS, values / _weights())


def _fall(*, keep: bool) -> Callable[..., list[Measurement]]:
    return lambda cases, **options: [
        Measurement.mean(fall)
        for group in joined(cases)
        for fall in perturbation_test(group, **options).falls(keep=keep).tolist()
    ]


def _replacement_gain(case: Case) -> Measurement:
    """Measure the fall of the label's log probability with other tokens in place of the top ones, less random ones.

    For a model with one logit it is the fall of that logit. Source: `Attribution.check`.
    """
    text, label = case.trace.text, case.label
    explained = Explained(
        case.trace,
        case.row,
        case.target,
        None if label is None else int(label),
        None if text is None else text.tokenizer,
    )
    keys = without(case.one_row(), (case.result.sinks or ((),))[0]) & case.valid.cpu()
    check = check_of(explained, case.one_row(), keys, seed=case.seed)
    return Measurement.mean((check.value if check.log_p is None else check.log_p).difference.mean)


def _segmentation(field: str, *, by_pixels: bool = False) -> Callable[[Case], Measurement]:
    def measure(case: Case) -> Measurement:
        value = getattr(case.segmentation, field)
        return Measurement.mean(value, float(case.heat_map.numel()) if by_pixels else 1.0)

    return measure


def _mean_iou(case: Case) -> Measurement:
    assert case.sample.foreground is not None
    regions = overlaps(foreground_of(case.heat_map), case.sample.foreground[None].cpu())
    return Measurement(case.segmentation.mean_iou, tuple((float(shared), float(either)) for shared, either in regions))


def _completeness(case: Case) -> Measurement | None:
    extras = case.result.extras
    if not {"bias", "logit"} <= extras.keys():
        return None
    constant = extras["bias"] + extras.get("remainder", 0)
    gaps = completeness_gap(case.result.scores, constant, extras["logit"]).relative.flatten()
    return Measurement.mean(float(gaps.mean()), float(len(gaps)))


PERTURBATIONS: Mapping[str, tuple[Callable[..., list[Measurement]], bool]] = {
    "positive_perturbation": (_curve("positive"), False),
    "negative_perturbation": (_curve("negative"), True),
    "deletion": (_deletion, False),
    "activation_auac": (_curve("activation"), True),
    "pruning_au_mse": (_curve("pruning"), False),
    "comprehensiveness": (_fall(keep=False), True),
    "sufficiency": (_fall(keep=True), False),
}
"""Metrics that run the model on changed inputs, with their direction; options `masking` and `mask_token_id`."""

_IMAGE = ("foreground", "grid")

METRICS: Mapping[str, Metric] = {
    made.name: made
    for made in (
        Metric("auc", _ranking("auc"), ("relevant",), True, of_batch=True),
        Metric("ap", _ranking("ap"), ("relevant",), True, of_batch=True),
        Metric("recall_at_k", _ranking("recall_at_k"), ("relevant",), True, of_batch=True),
        Metric("hit_at_1", _ranking("hit_at_1"), ("relevant",), True, of_batch=True),
        Metric("aer", _alignment, ("relevant",), False),
        *(Metric(name, measure, (), larger, of_batch=True) for name, (measure, larger) in PERTURBATIONS.items()),
        Metric("replacement_gain", _replacement_gain, (), True),
        Metric("pixel_accuracy", _segmentation("pixel_accuracy", by_pixels=True), _IMAGE, True),
        Metric("mean_iou", _mean_iou, _IMAGE, True),
        Metric("mean_ap", _segmentation("mean_ap"), _IMAGE, True),
        Metric("foreground_ap", _segmentation("foreground_ap"), _IMAGE, True),
        Metric("completeness_gap", _completeness, (), False),
    )
}
"""The metrics by name."""


def require_fields(metrics: Sequence[Metric], samples: Sequence[Sample]) -> None:
    """Raise `InputError` if a sample lacks a field that a metric needs."""
    for metric in metrics:
        for index, sample in enumerate(samples):
            for field in metric.needs:
                if getattr(sample, field) is None:
                    free = ", ".join(name for name, other in METRICS.items() if not other.needs)
                    raise InputError(
                        f"metric {metric.name} needs `{field}`, and sample {sample.name or index} has none; give it, "
                        f"or take metrics that need no known answer: {free}."
                    )
