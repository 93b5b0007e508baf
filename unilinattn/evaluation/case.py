"""One method's scores of one sample, which metrics measure, and the perturbation tests of several."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.errors import InputError
from unilinattn.evaluation.masking import Masking
from unilinattn.evaluation.metrics import RowScores, batch_scores, earlier_keys
from unilinattn.evaluation.perturbation import PerturbationTest
from unilinattn.evaluation.samples import Sample
from unilinattn.evaluation.segmentation import SegmentationScores, segmentation_scores
from unilinattn.operator.edges import is_causal
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace


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
        shared: values that the cases of one batch share.

    Raises `InputError` for a result with a layer axis or of several sequences.
    """

    model: nn.Module
    sample: Sample
    trace: Trace
    result: Attribution
    seed: int = 0
    row: int = 0
    shared: dict[Any, Any] = field(default_factory=dict)

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
        return ranked([self], [self.relevant])[0]

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

    def perturbation(self, masking: Masking = "zero", mask_token_id: int | None = None) -> PerturbationTest:
        """Return the perturbation test of the scores."""
        return perturbation_test([self], masking, mask_token_id)

    @property
    def units(self) -> Float[Tensor, "1 *unit"]:
        """The scores of the units that a perturbation test removes: tokens, or patches of an image."""
        return self.one_row()[None] if self.sample.grid is None else self.patches()

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
        # The same for all methods and samples of the trace.
        if is_causal not in self.shared:
            self.shared[is_causal] = all(is_causal(layer.operator) for layer in self.trace.layers if not layer.opaque)
        others = earlier_keys(keys) if self.shared[is_causal] else ~torch.eye(keys, dtype=torch.bool, device="cpu")
        return (others if queries else others[self.position]) & real


def ranked(cases: Sequence[Case], relevant: Sequence[Bool[Tensor, "*query key"]]) -> list[RowScores]:
    """Return the ranking metrics of cases for some relevant keys of each; scores of one shape are ranked in one step.

    Raises `InputError` for a case without a ranking.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, case in enumerate(cases):
        groups.setdefault((case.scores.shape, case.scores.dtype), []).append(index)
    rankings: dict[int, RowScores] = {}
    for group in groups.values():
        rows = [(cases[index].scores, relevant[index], cases[index].valid) for index in group]
        stacked = (torch.stack(list(map(torch.atleast_2d, tensors))) for tensors in zip(*rows, strict=True))
        rankings |= zip(group, batch_scores(*stacked), strict=True)
    return [rankings[index] for index in range(len(cases))]


def rankings(cases: Sequence[Case]) -> list[RowScores]:
    """Return `Case.ranking` of each case, computed in one step."""
    missing = [case for case in cases if "ranking" not in vars(case)]
    for case, ranking in zip(missing, ranked(missing, [case.relevant for case in missing]), strict=True):
        vars(case)["ranking"] = ranking
    return [case.ranking for case in cases]


def joined(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases of one method in groups whose perturbed inputs are one batch: all of them, or each by itself."""

    def fits(case: Case) -> bool:
        inputs, reference = case.sample.inputs, case.sample.reference
        tokens = isinstance(inputs, Tensor) and inputs.ndim == 2 and case.sample.grid is None
        return tokens and (reference is None or reference.shape == inputs.shape)

    labelled = len({case.label is None for case in cases}) == 1
    referenced = len({case.sample.reference is None for case in cases}) == 1
    if len(cases) > 1 and labelled and referenced and not cases[0].model.training and all(map(fits, cases)):
        return [list(cases)]
    return [[case] for case in cases]


def perturbation_test(
    cases: Sequence[Case], masking: Masking = "zero", mask_token_id: int | None = None
) -> PerturbationTest:
    """Return the perturbation test of the scores of cases that are `joined`.

    The tests of several methods on one batch share the runs with equal removals.
    """
    relevance = torch.cat([case.units for case in cases])
    valid = None if cases[0].sample.grid is not None else torch.stack([case.valid for case in cases])
    key, shared = (masking, mask_token_id, tuple(case.row for case in cases)), cases[0].shared
    before, mask = shared.get(key, (None, None))
    if before is not None and (valid is None or torch.equal(valid, mask)):
        test: PerturbationTest = before.of_scores(relevance)
        return test
    first, labels = cases[0], [case.label for case in cases]
    inputs: Any = first.trace.arguments if isinstance(first.sample.inputs, str) else first.sample.inputs
    if len(cases) > 1:
        inputs = torch.cat([case.sample.inputs for case in cases])
    references = [case.sample.reference for case in cases if case.sample.reference is not None]
    test = PerturbationTest(
        first.model,
        inputs,
        relevance,
        masking=masking,
        mask_token_id=mask_token_id,
        reference=torch.cat(references) if masking == "reference" and references else None,
        labels=None if labels[0] is None else torch.cat([label for label in labels if label is not None]),
        target=first.target if len({case.target for case in cases}) == 1 else [case.target for case in cases],
        valid=valid,
        seed=[case.seed for case in cases],
    )
    shared[key] = test, valid
    return test
