"""The metrics of `evaluate` by name: each a number of one method's scores on one sample."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.evaluation.masking import Masking
from unilinattn.evaluation.metrics import RowScores, alignment_error_rate, completeness_gap, earlier_keys, row_scores
from unilinattn.evaluation.perturbation import TENTHS, PerturbationCurve, PerturbationTest
from unilinattn.evaluation.samples import Sample, function_name
from unilinattn.evaluation.segmentation import SegmentationScores, foreground_of, overlaps, segmentation_scores
from unilinattn.methods.check import Explained, check_of, without
from unilinattn.operator.edges import is_causal
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace

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


@dataclass(frozen=True, eq=False)
class Case:
    """One method's scores of one sample, which a metric measures.

    Attributes:
        model: the host model.
        sample: the sample.
        trace: the trace of the model on the sample, or on a batch with the sample.
        result: the method's result, of one layer or of all layers composed, with or without a batch axis.
        seed: seed of the metric's own random choices.
        row: index of the sample in the batch of the trace.

    Raises `InputError` for a result with a layer axis or of several sequences.
    """

    model: nn.Module
    sample: Sample
    trace: Trace
    result: Attribution
    seed: int = 0
    row: int = 0

    def __post_init__(self) -> None:
        axes = tuple(axis for axis in self.result.dims if axis != "batch")
        if axes not in (("key",), ("query", "key")) or self.result.sizes.get("batch", 1) != 1:
            raise InputError(
                f"scores with the axes {dict(self.result.sizes)}; a metric takes those of one sequence and one layer, "
                "(batch, key) or (batch, query, key)."
            )

    @property
    def scores(self) -> Float[Tensor, "*query key"]:
        """The scores: (query, key), or (key,) without a query axis."""
        return (self.result.scores[0] if "batch" in self.result.dims else self.result.scores).cpu()

    @cached_property
    def position(self) -> int | None:
        """The position of the explained query, None if every query is explained."""
        return None if self.sample.target is None else int(self.trace.positions(self.sample.target)[self.row])

    @cached_property
    def relevant(self) -> Bool[Tensor, "*query key"]:
        """The relevant keys, of the scores' shape.

        Raises `InputError` for a sample without them, or if they do not fit.
        """
        return self.mask("relevant")

    @cached_property
    def valid(self) -> Bool[Tensor, "*query key"]:
        """The keys that are ranked or removed, of the scores' shape: those of the sample, or its default.

        Raises `InputError` if they do not fit.
        """
        return self._default_keys() if self.sample.valid is None else self.mask("valid")

    def mask(self, name: str) -> Bool[Tensor, "*query key"]:
        """Return a mask of the sample in the scores' shape: its row at the target if the scores have no query axis.

        Raises `InputError` for a sample without it, or if it does not fit.
        """
        mask: Tensor | None = getattr(self.sample, name)
        if mask is None:
            raise InputError(f"the sample has no `{name}`.")
        row = mask[self.position] if mask.ndim > self.scores.ndim and self.position is not None else mask
        if row.shape != self.scores.shape:
            hint = "; give the sample a target" if self.sample.target is None else ""
            raise InputError(
                f"{name} of shape {tuple(mask.shape)} does not fit scores of shape {tuple(self.scores.shape)}{hint}."
            )
        return row

    @cached_property
    def ranking(self) -> RowScores:
        """The ranking metrics."""
        return row_scores(*map(torch.atleast_2d, (self.scores, self.relevant, self.valid)))

    @cached_property
    def heat_map(self) -> Float[Tensor, "1 height width"]:
        """The scores of the patches, scaled bilinearly to the size of the foreground mask."""
        foreground = self.sample.foreground
        if foreground is None:
            raise InputError("the sample has no `foreground`.")
        patches = self.patches().double()
        return functional.interpolate(patches[None], tuple(foreground.shape), mode="bilinear")[0]

    @cached_property
    def segmentation(self) -> SegmentationScores:
        """The segmentation metrics."""
        heat_map = self.heat_map
        assert self.sample.foreground is not None
        return segmentation_scores(heat_map, self.sample.foreground[None].cpu())

    def patches(self) -> Float[Tensor, "1 row column"]:
        """Return the scores of an image's patches, which are the valid keys in order.

        Raises `InputError` without a grid, without a target, or if the grid has another number of patches.
        """
        if self.sample.grid is None:
            raise InputError("the sample has no `grid`.")
        scores = self.one_row()[self.valid]
        rows, columns = self.sample.grid
        if len(scores) != rows * columns:
            raise InputError(
                f"a grid of {rows} x {columns} patches does not fit {len(scores)} valid keys; mark the keys of the "
                "patches by `valid`."
            )
        return scores.view(1, rows, columns)

    def one_row(self) -> Float[Tensor, " key"]:
        """Return the scores of the target; raise `InputError` if every query has scores."""
        if self.scores.ndim == 2:
            raise InputError("the metric needs the scores of one query; give the sample a target.")
        return self.scores

    @cached_property
    def _tests(self) -> dict[tuple[Any, ...], PerturbationTest]:
        return {}

    def perturbation(self, masking: Masking = "zero", mask_token_id: int | None = None) -> PerturbationTest:
        """Return the perturbation test of the scores, made once for each kind of masking."""
        key = (masking, mask_token_id)
        if key not in self._tests:
            if self.sample.grid is None:
                units = {"relevance": self.one_row()[None], "valid": self.valid[None]}
            else:
                units = {"relevance": self.patches()}
            self._tests[key] = PerturbationTest(
                self.model,
                self.trace.arguments if isinstance(self.sample.inputs, str) else self.sample.inputs,
                masking=masking,
                mask_token_id=mask_token_id,
                reference=self.sample.reference if masking == "reference" else None,
                labels=self.label,
                target=self.target,
                seed=self.seed,
                **units,
            )
        return self._tests[key]

    @property
    def target(self) -> int:
        """The target of the sample, by default the last token."""
        return -1 if self.sample.target is None else self.sample.target

    @property
    def label(self) -> Tensor | None:
        """The sample's label, by default the prediction that its trace explains."""
        if self.sample.label is not None:
            return torch.tensor([self.sample.label], device="cpu")
        predicted = self.trace.explained_logit.prediction(self.target)
        return None if predicted is None else predicted[self.row : self.row + 1]

    def _default_keys(self) -> Bool[Tensor, "*query key"]:
        *queries, keys = self.scores.shape
        real = (
            torch.ones(keys, dtype=torch.bool, device="cpu") if self.result.mask is None else self.result.mask[0].cpu()
        )
        if not queries and self.position is None:
            return real
        if queries and queries != [keys]:
            raise InputError(f"scores of shape {tuple(self.scores.shape)} have no default keys; give `valid`.")
        causal = all(is_causal(layer.operator) for layer in self.trace.layers if not layer.opaque)
        others = earlier_keys(keys) if causal else ~torch.eye(keys, dtype=torch.bool, device="cpu")
        return (others if queries else others[self.position]) & real


@dataclass(frozen=True)
class Metric:
    """A metric with its options.

    Attributes:
        name: name of the metric, or of the function.
        measure: the metric of a case; None if the case has none.
        needs: the fields of a sample that it needs.
        larger_is_better: the direction, None for a function.
        options: options by name.
    """

    name: str
    measure: Callable[..., Measurement | None]
    needs: tuple[str, ...] = ()
    larger_is_better: bool | None = None
    options: Mapping[str, Any] | None = None

    def __call__(self, case: Case) -> Measurement | None:
        """Measure a case; raise `InputError` for a value that is not finite."""
        measured = self.measure(case, **(self.options or {}))
        if measured is not None and not isfinite(measured.value):
            raise InputError(f"the value is {measured.value}; a metric that is undefined raises an error.")
        return measured


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
    return Metric(name, default.measure, needs, default.larger_is_better, dict(options))


def function_metric(function: Callable[[Case], float]) -> Metric:
    """Return a function from a case to a number as a metric, which is averaged over samples."""
    return Metric(function_name(function), lambda case: Measurement.mean(float(function(case))))


def _ranking(field: str) -> Callable[[Case], Measurement]:
    # Weighted by rows, so that the metric over samples is the mean over all rows.
    return lambda case: Measurement.mean(getattr(case.ranking, field), float(case.ranking.rows))


def _alignment(case: Case) -> Measurement:
    possible = None if case.sample.possible is None else torch.atleast_2d(case.mask("possible"))
    scores, sure, valid = map(torch.atleast_2d, (case.scores, case.relevant, case.valid))
    links = int(valid.any(-1).sum()) + int(sure.sum())
    return Measurement.mean(alignment_error_rate(scores, sure, possible, valid), float(links))


def _curve(name: str) -> Callable[..., Measurement]:
    return lambda case, **options: Measurement.mean(getattr(case.perturbation(**options), name)().area)


def _deletion(case: Case, **options: Any) -> Measurement:
    curve = case.perturbation(**options).deletion()
    return Measurement(curve.area, tuple((value, 1.0) for value in (curve.values[0].cpu() * _weights()).tolist()))


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


def _fall(name: str) -> Callable[..., Measurement]:
    return lambda case, **options: Measurement.mean(getattr(case.perturbation(**options), name)())


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


PERTURBATIONS: Mapping[str, tuple[Callable[..., Measurement], bool]] = {
    "positive_perturbation": (_curve("positive"), False),
    "negative_perturbation": (_curve("negative"), True),
    "deletion": (_deletion, False),
    "activation_auac": (_curve("activation"), True),
    "pruning_au_mse": (_curve("pruning"), False),
    "comprehensiveness": (_fall("comprehensiveness"), True),
    "sufficiency": (_fall("sufficiency"), False),
}
"""Metrics that run the model on changed inputs, with their direction; options `masking` and `mask_token_id`."""

_IMAGE = ("foreground", "grid")

METRICS: Mapping[str, Metric] = {
    made.name: made
    for made in (
        Metric("auc", _ranking("auc"), ("relevant",), True),
        Metric("ap", _ranking("ap"), ("relevant",), True),
        Metric("recall_at_k", _ranking("recall_at_k"), ("relevant",), True),
        Metric("hit_at_1", _ranking("hit_at_1"), ("relevant",), True),
        Metric("aer", _alignment, ("relevant",), False),
        *(Metric(name, measure, (), larger) for name, (measure, larger) in PERTURBATIONS.items()),
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
