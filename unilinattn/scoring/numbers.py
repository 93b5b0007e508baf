"""The explained number of runs of the model on other inputs, and its function of the tokens' vectors for captum."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.host.isolation import in_gradient_mode, with_own_random_numbers
from unilinattn.host.logits import Logit, one_each, picked
from unilinattn.memory import allowed, require_result
from unilinattn.optional import import_extra
from unilinattn.options.bases import ScalarOptions
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.reruns.embedded import EmbeddedModel
from unilinattn.reruns.rerun import Rerun
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


def runs_at_once(length: int, size: int) -> int:
    """Return how many variants of a sequence one run of the model reads: those that `TOKENS` and `max_memory` allow.

    At least one. `length` is the number of tokens, and `size` the bytes that a run takes for each variant.
    """
    return max(1, min(TOKENS // length, allowed() // max(1, size)))


@dataclass(frozen=True)
class Scores:
    """The scores of one target.

    Attributes:
        tokens: one score for each token.
        extras: further numbers of each sequence, by name.
        gap: the completeness gap, None for methods that state none.
    """

    tokens: Float[Tensor, "batch token"]
    extras: Mapping[str, Float[Tensor, " batch"]] = field(default_factory=dict)
    gap: float | None = None


class ExplainedNumber:
    """The number that a method explains, of each sequence in a run of the traced model.

    The logit is that of the model's prediction on the traced inputs, which are those of the first run.

    Attributes:
        positions: the target's position in each traced sequence, None without a target and for a function.
        has_queries: whether each query of the last run has a number.
    """

    def __init__(self, trace: Trace, target: Target | None, logit: Logit, measure: str = "logit") -> None:
        """Store the arguments of the method, of which `measure` is "logit" or "log-probability"."""
        self._trace, self._target, self._logit, self._measure = trace, target, logit, measure
        self.positions = None if target is None or callable(logit) else trace.positions(target)
        self.has_queries = False
        self._ids: Int[Tensor, "batch *query id"] | None = None

    def __call__(self, run: Rerun, sequences: Int[Tensor, " run"]) -> Float[Tensor, "run *query"]:
        """Return the numbers of a run on some of the traced sequences, in float32 or more."""
        if callable(self._logit):
            return one_each(self._logit(run.output), len(sequences))
        logits = run.logits(None if self.positions is None else self.positions[sequences])
        self.has_queries = logits.ndim == 3 and self.positions is None
        logits = logits if self.has_queries else logits.flatten(0, -2)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._measure == "log-probability":
            logits = logits.log_softmax(-1)
        if self._ids is None:
            self._ids = self._trace.explained_logit.ids(self._target, self._logit, logits)
        return picked(logits, self._ids[sequences.to(logits.device)])


class TokenFunction:
    """The explained number of each sequence as a function of the vectors of its tokens.

    The logit is that of the model's prediction on the traced inputs, for any vectors.

    Attributes:
        vectors: the vectors of the traced inputs; they require a gradient.
        sequences: the indices of the traced sequences, the function's second argument.
        real: the real tokens.
        value: the number on the traced inputs.
    """

    vectors: Float[Tensor, "batch token channel"]
    sequences: Int[Tensor, " batch"]
    real: Bool[Tensor, "batch token"]
    value: Float[Tensor, " batch"]

    def __init__(self, trace: Trace, model: EmbeddedModel, target: Target, logit: Logit) -> None:
        """Run the model once on the traced inputs; inside `EmbeddedModel.isolated`."""
        self._model, self._number = model, ExplainedNumber(trace, target, logit)
        self._trace, self._logit = trace, logit
        self.vectors = model.vectors.clone().requires_grad_()
        self.sequences = torch.arange(len(self.vectors), device=self.vectors.device)
        mask = Axes(trace, model.streams, model.streams).mask()
        shape, device = self.vectors.shape[:2], self.vectors.device
        # A copy, since no gradient passes a mask that was made in inference mode.
        self.real = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask.to(device, copy=True)
        self.value = in_gradient_mode(False, lambda: self(self.vectors, self.sequences))

    def __call__(
        self, vectors: Float[Tensor, "run token channel"], sequences: Int[Tensor, " run"]
    ) -> Float[Tensor, " run"]:
        """Return the number of each run; `sequences` are the traced sequences whose vectors these replace."""
        sequences = sequences.long().cpu()
        run = self._model.run(vectors, sequences, self._number.positions)
        value = self._number(run, sequences)
        if not bool(value.isfinite().all()):
            raise InputError("the explained number is NaN or infinite in a run of the model, so it has no scores.")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise UncoveredError("the explained number does not depend on the tokens' vectors, so it has no gradient.")
        return value

    def baseline(self, baseline: str | int) -> Float[Tensor, "batch token channel"]:
        """Return the vectors with every real token replaced by a baseline (see `EmbeddedModel.baseline`)."""
        absent = self._model.baseline(baseline).expand_as(self.vectors)
        return torch.where(self.real.unsqueeze(-1), absent, self.vectors.detach())

    def of_real(
        self, sequence: int
    ) -> Callable[[Float[Tensor, "run token channel"], Int[Tensor, " run"]], Float[Tensor, " run"]]:
        """Return the number of one sequence as a function of the vectors of its real tokens."""
        real, padded = self.real[sequence], self.vectors.detach()[sequence]

        def function(vectors: Tensor, sequences: Tensor) -> Tensor:
            whole = padded.repeat(len(vectors), 1, 1)
            whole[:, real] = vectors
            return self(whole, sequences)

        return function

    def of_presence(
        self, baseline: str | int, sequence: int
    ) -> Callable[[Float[Tensor, "run token"], Int[Tensor, " run"]], Float[Tensor, " run"]]:
        """Return the number of one sequence as a function of its real tokens: present (1) or a baseline (0)."""
        of_real, real = self.of_real(sequence), self.real[sequence]
        present, absent = (x[sequence, real] for x in (self.vectors.detach(), self.baseline(baseline)))

        def function(presence: Tensor, sequences: Tensor) -> Tensor:
            weight = presence.unsqueeze(-1).to(present)
            return of_real(weight * present + (1 - weight) * absent, sequences)

        return function

    def each_sequence(self, score: Callable[[int], Float[Tensor, " real"]]) -> Float[Tensor, "batch token"]:
        """Return the scores that `score` gives to the real tokens of each sequence, zero at padding."""
        scores = torch.zeros_like(self.real, dtype=self.value.dtype)
        for sequence, real in enumerate(self.real):
            scores[sequence, real] = score(sequence).to(scores)
        return scores

    def runs(self, sequences: int = 1, *, gradients: bool) -> int:
        """Return the number of variants of `sequences` sequences in one run of the model (see `runs_at_once`)."""
        size = self._graph_bytes if gradients else run_bytes(self._trace, self._logit)
        return runs_at_once(sequences * self.vectors.shape[1], sequences * size)

    @cached_property
    def _graph_bytes(self) -> int:
        """The bytes that a run keeps for its backward pass, for each sequence, counted in one run."""
        sizes: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            value = self(self.vectors, self.sequences)
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
"""Scores the tokens of one target, given a method and captum's algorithms."""


def captum_method(
    method: type[ScalarOptions], *, every_query: bool = True
) -> Callable[[Score], Callable[..., Attribution]]:
    """Register a method that scores the tokens by an algorithm of captum, target after target.

    Without a target every position with a logit is a target; with every_query=False this raises `OptionError`. Padding
    has a score of zero. The result names no layers, since no operator takes part.
    """

    def decorate(score: Score) -> Callable[..., Attribution]:
        @wraps(score)
        def run(trace: Trace, options: Any, *, target: Target | None = None) -> Attribution:
            algorithms = captum()

            def scored(function: TokenFunction) -> Scores:
                return score(function, options, algorithms)

            # Tensors of the caller's inference mode could not be written into.
            return in_gradient_mode(True, lambda: _explained(trace, options, target, scored, every_query))

        return register_method(method)(run)

    return decorate


def _explained(
    trace: Trace,
    options: ScalarOptions,
    target: Target | None,
    score: Callable[[TokenFunction], Scores],
    every_query: bool,
) -> Attribution:
    method, target = options.name, only_target(trace, target, options.scalar)
    if target is None and not every_query:
        raise OptionError(
            f"{method} runs the model many times for each target; give a position as target, such as target=-1."
        )
    model = EmbeddedModel(trace)
    targets = every_position(trace) if target is None else [target]
    axes = Axes(trace, (trace.target_stream,), model.streams)
    batch, queries, keys = axes.shape
    shape = (batch, queries if target is None else 1, keys)
    require_result(shape, model.vectors.element_size(), f"{method}: the result (batch, query, key)", ONE_ROW)
    scores = model.vectors.new_zeros(shape)
    extras: dict[str, Tensor] = {}
    gaps: list[float] = []

    def run() -> None:
        for position in progress(targets, method):
            function = TokenFunction(trace, model, position, options.scalar)
            scored = score(function)
            rows = trace.positions(position) if target is None else torch.zeros(batch, dtype=torch.long, device="cpu")
            cells = torch.arange(batch, device="cpu"), rows
            scores[cells] = scored.tokens.detach().to(scores).masked_fill(~function.real, 0)
            for name, values in scored.extras.items():
                numbers = extras.setdefault(name, scores.new_zeros(shape[:2], dtype=torch.float64))
                numbers[cells] = values.to(numbers)
            gaps.extend([] if scored.gap is None else [scored.gap])

    model.isolated(run)
    if target is not None:
        scores, extras = scores.squeeze(1), {name: values.squeeze(1) for name, values in extras.items()}
    return Attribution(
        scores=scores,
        dims=("batch", *(("query",) if target is None else ()), "key"),
        method=method,
        options=stored_options(options, target),
        mask=axes.mask(),
        streams=axes.names,
        model=trace.model,
        versions=trace.versions,
        completeness_gap=max(gaps, default=None),
        extras=extras,
    )
