"""The explained number of runs of the model on other inputs, and its function of the tokens' vectors for captum."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.frozen.token_pass import Case, shared_cases, shared_run
from unilinattn.host.isolation import in_gradient_mode, with_own_random_numbers
from unilinattn.host.logits import Logit, picked
from unilinattn.host.probabilities import log_probabilities, logit_kind
from unilinattn.host.scalars import OutputScalar, values_of
from unilinattn.memory import allowed, require_result
from unilinattn.optional import import_extra
from unilinattn.options.bases import ScalarOptions
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.reruns.embedded import EmbeddedModel
from unilinattn.reruns.rerun import Rerun, repeats
from unilinattn.reruns.separate import is_separate
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.base import stored_options, trace_bytes
from unilinattn.scoring.joint import Axes
from unilinattn.scoring.maps import ONE_ROW
from unilinattn.scoring.selection import every_position, only_target
from unilinattn.tracing.trace import Target, Trace

TOKENS = 4096
"""Most tokens in one run of the model on several variants of its inputs."""


def run_bytes(trace: Trace, logit: Logit) -> int:
    """Estimate the bytes of a run without gradients by those of its trace and logits, for each sequence."""
    elements = trace.explained_logit.elements(trace.host, logit)
    return (trace_bytes(trace) + 4 * elements) // trace.token_shape[0]


def runs_at_once(trace: Trace, length: int, size: int, logit: Logit) -> int:
    """Return how many variants of a sequence one run of the model reads: those that `TOKENS` and `max_memory` allow.

    At least one, and only one of inputs of which a run computes no copies (see `repeats`) and for a function whose
    number other variants may change (see `is_separate`). `length` is the number of tokens, and `size` the bytes that a
    run takes for each variant.
    """
    most = max(1, min(TOKENS // length, allowed() // max(1, size)))
    in_copies = most > 1 and repeats(trace) and (not callable(logit) or is_separate(trace, logit) is True)
    return most if in_copies else 1


@dataclass(frozen=True)
class Scores:
    """The scores of the rows of a `TokenFunction`.

    Attributes:
        tokens: one score for each token.
        extras: further numbers of each row, by name.
        gap: the completeness gap, None for methods that state none.
    """

    tokens: Float[Tensor, "row token"]
    extras: Mapping[str, Float[Tensor, " row"]] = field(default_factory=dict)
    gap: float | None = None


class ExplainedNumber:
    """The number that a method explains, of each row of a run of the traced model.

    A row is a sequence in a case: row c * batch + b is traced sequence b with the target and the logit of case c. The
    logit is that of the model's prediction on the traced inputs, which are those of the first run.

    Attributes:
        positions: the target's position in each row, None without a target and for a function.
        has_queries: whether each query of the last run has a number.
    """

    def __init__(self, trace: Trace, cases: Sequence[tuple[Target | None, Logit]], measure: str = "logit") -> None:
        """Store the arguments of the method, of which `measure` is "logit" or "log-probability".

        A case without a target, or with a function for a logit, is the only one.
        """
        self._explained, self._cases, self._measure = trace.explained_logit, cases, measure
        self._host, self._batch = trace.host, trace.layers[-1].output.shape[0]
        for _, logit in cases:
            if isinstance(logit, OutputScalar) and logit.count != self._batch:
                raise UncoveredError(
                    f"the last layer of {trace.model} has {self._batch} sequences, such as windows, of the "
                    f"{logit.count} of its input, so the rows of one sequence are unknown and it cannot run again by "
                    "itself."
                )
        alone = any(target is None or callable(logit) for target, logit in cases)
        assert not alone or len(cases) == 1
        targets = [target for target, _ in cases if target is not None]
        self.positions = None if alone else torch.cat([trace.positions(target) for target in targets])
        self.has_queries = False
        self._ids: Int[Tensor, "row *query id"] | None = None

    def __call__(self, run: Rerun, rows: Int[Tensor, " run"]) -> Float[Tensor, "run *query"]:
        """Return the numbers of a run on some of the rows, in float32 or more."""
        if callable(function := self._cases[0][1]):
            return values_of(function, run.output, rows % self._batch)
        logits = run.logits(None if self.positions is None else self.positions[rows])
        self.has_queries = logits.ndim == 3 and self.positions is None
        logits = logits if self.has_queries else logits.flatten(0, -2)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._measure == "log-probability":
            log_p = log_probabilities(logits, logit_kind(self._host, self._explained.logits))
            assert log_p is not None
            logits = log_p
        if self._ids is None:
            by_case = zip(self._cases, logits.split(self._batch), strict=True)
            self._ids = torch.cat([self._explained.ids(*case, logits_of_case) for case, logits_of_case in by_case])
        return picked(logits, self._ids[rows.to(logits.device)])


class TokenFunction:
    """The explained number of each row (see `ExplainedNumber`) as a function of the vectors of its tokens.

    The logit is that of the model's prediction on the traced inputs, for any vectors.

    Attributes:
        vectors: the vectors of the traced inputs, again for each case; they require a gradient.
        rows: the indices of the rows, the function's second argument.
        real: the real tokens.
    """

    vectors: Float[Tensor, "row token channel"]
    rows: Int[Tensor, " row"]
    real: Bool[Tensor, "row token"]

    def __init__(self, trace: Trace, model: EmbeddedModel, cases: Sequence[Case]) -> None:
        """Store the arguments; the function is called inside `EmbeddedModel.isolated`."""
        self._model, self._number = model, ExplainedNumber(trace, cases)
        self._trace, self._logit = trace, cases[0][1]
        self.vectors = model.vectors.repeat(len(cases), 1, 1).requires_grad_()
        self.rows = torch.arange(len(self.vectors), device=self.vectors.device)
        mask = Axes(trace, model.streams, model.streams).mask()
        shape, device = model.vectors.shape[:2], self.vectors.device
        # A copy, since no gradient passes a mask that was made in inference mode.
        real = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask.to(device, copy=True)
        self.real = real.repeat(len(cases), 1)

    @cached_property
    def value(self) -> Float[Tensor, " row"]:
        """The number on the traced inputs; the first run, since it decides for which logit the others are."""
        return in_gradient_mode(False, lambda: self._run(self.vectors, self.rows))

    def __call__(self, vectors: Float[Tensor, "run token channel"], rows: Int[Tensor, " run"]) -> Float[Tensor, " run"]:
        """Return the number of each run; `rows` are those whose vectors these replace."""
        if vectors is not self.vectors:
            _ = self.value
        return self._run(vectors, rows)

    def _run(self, vectors: Tensor, rows: Tensor) -> Tensor:
        rows, positions = rows.long().cpu(), self._number.positions
        sequences = rows % len(self._model.vectors)
        run = self._model.run(vectors, sequences, None if positions is None else positions[rows])
        value = self._number(run, rows)
        if not bool(value.isfinite().all()):
            raise InputError("the explained number is NaN or infinite in a run of the model, so it has no scores.")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise UncoveredError("the explained number does not depend on the tokens' vectors, so it has no gradient.")
        return value

    def baseline(self, baseline: str | int) -> Float[Tensor, "row token channel"]:
        """Return the vectors with every real token replaced by a baseline (see `EmbeddedModel.baseline`)."""
        absent = self._model.baseline(baseline).expand_as(self.vectors)
        return torch.where(self.real.unsqueeze(-1), absent, self.vectors.detach())

    def of_real(
        self, row: int
    ) -> Callable[[Float[Tensor, "run token channel"], Int[Tensor, " run"]], Float[Tensor, " run"]]:
        """Return the number of one row as a function of the vectors of its real tokens."""
        real, padded = self.real[row], self.vectors.detach()[row]

        def function(vectors: Tensor, rows: Tensor) -> Tensor:
            whole = padded.repeat(len(vectors), 1, 1)
            whole[:, real] = vectors
            return self(whole, rows)

        return function

    def of_presence(
        self, baseline: str | int, row: int
    ) -> Callable[[Float[Tensor, "run token"], Int[Tensor, " run"]], Float[Tensor, " run"]]:
        """Return the number of one row as a function of its real tokens: present (1) or a baseline (0)."""
        of_real, real = self.of_real(row), self.real[row]
        present, absent = (x[row, real] for x in (self.vectors.detach(), self.baseline(baseline)))

        def function(presence: Tensor, rows: Tensor) -> Tensor:
            weight = presence.unsqueeze(-1).to(present)
            return of_real(weight * present + (1 - weight) * absent, rows)

        return function

    def each_row(self, score: Callable[[int], Float[Tensor, " real"]]) -> Float[Tensor, "row token"]:
        """Return the scores that `score` gives to the real tokens of each row, zero at padding."""
        scores = torch.zeros_like(self.real, dtype=self.value.dtype)
        for row, real in enumerate(self.real):
            scores[row, real] = score(row).to(scores)
        return scores

    def runs(self, rows: int = 1, *, gradients: bool) -> int:
        """Return the number of variants of `rows` rows in one run of the model (see `runs_at_once`)."""
        size = self._graph_bytes if gradients else run_bytes(self._trace, self._logit)
        return runs_at_once(self._trace, rows * self.vectors.shape[1], rows * size, self._logit)

    def cases_at_once(self) -> int:
        """Return the number of cases in one run with gradients, each row of which has logits at the targets of all."""
        rows, length = self._model.vectors.shape[:2]
        # The logits, those in float32 and their gradients.
        logits = 3 * 4 * self._trace.explained_logit.elements_at(length)
        return runs_at_once(self._trace, rows * length, rows * self._graph_bytes + logits, self._logit)

    @cached_property
    def _graph_bytes(self) -> int:
        """The bytes that a run keeps for its backward pass, for each row, counted in one run."""
        sizes: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            value = self(self.vectors, self.rows)
        for weight in chain(self._trace.host.parameters(), self._trace.host.buffers()):
            sizes.pop(weight.untyped_storage().data_ptr(), None)
        return sum(sizes.values()) // len(value)

    def seeded(self, seed: int, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()` with random numbers from a seed; the generators are restored afterwards."""

        def run() -> Tensor:
            torch.manual_seed(seed)
            return compute()

        devices = [self.vectors.device] if self.vectors.is_cuda else []
        return with_own_random_numbers(devices, run)


def captum() -> ModuleType:
    """Import captum's algorithms; raise `MissingExtraError` if captum is not installed."""
    return import_extra("captum.attr", "captum")


Score = Callable[[TokenFunction, Any, ModuleType], Scores]
"""Scores the tokens of each row, given a method and captum's algorithms."""


def captum_method(
    method: type[ScalarOptions], *, every_query: bool = True
) -> Callable[[Score], Callable[..., Attribution]]:
    """Register a method that scores the tokens by an algorithm of captum.

    Without a target every position with a logit is a target; with every_query=False this raises `OptionError`. A method
    of gradients explains as many targets in one run as `TokenFunction.cases_at_once` allows. Padding has a score of
    zero. The result names no layers, since no operator takes part.
    """

    def decorate(score: Score) -> Callable[..., Attribution]:
        @wraps(score)
        def run(trace: Trace, options: Any, *, target: Target | None = None) -> Attribution:
            algorithms, target = captum(), only_target(trace, target, options.scalar)

            def explained(cases: Sequence[Case]) -> _Explained:
                # Tensors of the caller's inference mode could not be written into.
                return in_gradient_mode(
                    True,
                    lambda: _explained(trace, options, cases, lambda function: score(function, options, algorithms)),
                )

            if target is not None:
                case = target, options.scalar
                cases = shared_cases(trace, case)
                if len(cases) == 1:
                    return explained(cases).of_case(0, options, target)
                # The same method explains each of them in turn.
                of_any_logit = options.model_copy(update={"logit": None})
                every = shared_run(trace, [target], of_any_logit, lambda _: explained(cases))
                return every.of_case(cases.index(case), options, target)
            if not every_query:
                raise OptionError(
                    f"{options.name} runs the model many times for each target; give a position as target, such as "
                    "target=-1."
                )
            targets = every_position(trace)
            return explained([(each, options.scalar) for each in targets]).of_queries(targets, options)

        return register_method(method)(run)

    return decorate


@dataclass(frozen=True)
class _Explained:
    """The scores of the rows of some cases.

    Attributes:
        trace: the traced model.
        axes: the axes of the results.
        scores: the scores, without padding's.
    """

    trace: Trace
    axes: Axes
    scores: Scores

    def of_case(self, case: int, options: ScalarOptions, target: Target) -> Attribution:
        """Return the scores of one case, whose target and options the result names."""
        batch = self.axes.shape[0]
        rows = slice(case * batch, (case + 1) * batch)
        extras = {name: values[rows] for name, values in self.scores.extras.items()}
        return self._result(options, target, self.scores.tokens[rows], extras)

    def of_queries(self, targets: Sequence[Target], options: ScalarOptions) -> Attribution:
        """Return the scores with a query for the target of each case."""
        batch, queries, _ = self.axes.shape
        sequences = torch.arange(batch, device="cpu").repeat(len(targets))
        cells = sequences, torch.cat([self.trace.positions(target) for target in targets])

        def by_query(values: Tensor) -> Tensor:
            return values.new_zeros(batch, queries, *values.shape[1:]).index_put(cells, values)

        extras = {name: by_query(values) for name, values in self.scores.extras.items()}
        return self._result(options, None, by_query(self.scores.tokens), extras)

    def _result(
        self, options: ScalarOptions, target: Target | None, scores: Tensor, extras: Mapping[str, Tensor]
    ) -> Attribution:
        return Attribution(
            scores=scores,
            dims=("batch", *(("query",) if target is None else ()), "key"),
            method=options.name,
            options=stored_options(options, target),
            mask=self.axes.mask(),
            streams=self.axes.names,
            model=self.trace.model,
            versions=self.trace.versions,
            completeness_gap=self.scores.gap,
            extras=dict(extras),
        )


def _explained(
    trace: Trace, options: ScalarOptions, cases: Sequence[Case], score: Callable[[TokenFunction], Scores]
) -> _Explained:
    model = EmbeddedModel(trace)
    axes = Axes(trace, (trace.target_stream,), model.streams)
    batch, queries, keys = axes.shape
    shape = (batch, queries if len(cases) > 1 else 1, keys)
    require_result(shape, model.vectors.element_size(), f"{options.name}: the result (batch, query, key)", ONE_ROW)
    chunks: list[Scores] = []

    def run() -> None:
        at_once = 1
        if len(cases) > 1 and "embedding gradients" in (options.needs or ()):
            at_once = TokenFunction(trace, model, cases[:1]).cases_at_once()
        for start in progress(range(0, len(cases), at_once), options.name):
            function = TokenFunction(trace, model, cases[start : start + at_once])
            scored = score(function)
            tokens = scored.tokens.detach().to(model.vectors).masked_fill(~function.real, 0)
            chunks.append(replace(scored, tokens=tokens))

    model.isolated(run)
    extras = {name: torch.cat([chunk.extras[name].double() for chunk in chunks]) for name in chunks[0].extras}
    gap = max((chunk.gap for chunk in chunks if chunk.gap is not None), default=None)
    return _Explained(trace, axes, Scores(torch.cat([chunk.tokens for chunk in chunks]), extras, gap))
