"""The logit that is explained: one decision for every run of a traced model and for the label of a result."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unilinattn.host.isolation import in_gradient_mode
from unilinattn.host.logits import (
    KEEP,
    Logit,
    at_positions,
    chosen_ids,
    kept_positions,
    logits_at,
    logits_in,
    logits_of,
    one_each,
    picked,
    relative,
)
from unilinattn.options.bases import Relative


class ExplainedLogit:
    """The logit of a traced model that a target and a `Logit` name.

    Runs of one model round differently, so each could predict another of two nearly equal logits. The traced output
    decides for all runs; at positions whose logits the traced run did not compute (see `trace`), the first run that
    computes them.
    """

    def __init__(
        self,
        output: Any,
        arguments: Mapping[str, Any],
        tokens: tuple[int, int],
        positions: Callable[[Any], Int[Tensor, " batch"]],
        model: str,
        sizes: Collection[int] = (),
    ) -> None:
        """Store the traced output, the arguments, the (batch, length) of the layers, and the positions of targets.

        `sizes` are those by which a tensor has logits (see `logits_of`).
        """
        self._output, self._arguments, self._tokens, self.sizes = output, arguments, tokens, sizes
        self._positions, self._model = positions, model
        self._predictions: dict[tuple[int, ...] | None, Tensor] = {}

    @property
    def exists(self) -> bool:
        """Whether the traced output has logits of sequences or of positions."""
        return self._traced is not None

    @property
    def logits(self) -> Float[Tensor, "batch *position token"]:
        """The logits in the traced output; raises `InputError` for an output without them."""
        return logits_of(self._output, self._model, sizes=self.sizes)

    @property
    def _traced(self) -> Float[Tensor, "batch *position token"] | None:
        return logits_in(self._output, self.sizes)

    def ids(
        self, target: Any, logit: Logit, logits: Float[Tensor, "batch *query token"]
    ) -> Int[Tensor, "batch *query id"]:
        """Return the ids of the explained logits, one or a pair, among the `logits` of a run at a target.

        Raises `InputError` for an id that is out of range.
        """
        if logit is not None:
            return chosen_ids(logits, logit)
        prediction = self.prediction(target)
        if prediction is None:
            prediction = self._predictions[self.positions_of(target)] = logits.detach().argmax(-1)
        return prediction.to(logits.device).reshape(*logits.shape[:-1], 1)

    def prediction(self, target: Any) -> Int[Tensor, "batch *query"] | None:
        """Return the model's prediction at a target, or at every position for None.

        None if no run has computed the logits there, and for an output without logits.
        """
        positions = self.positions_of(target)
        if positions not in self._predictions and self.is_computed and self.exists:
            self._predictions[positions] = (
                self._logits(self._output, target, self._computed_positions).detach().argmax(-1)
            )
        return self._predictions.get(positions)

    def scalar(self, output: Any, target: Any, logit: Logit, computed: Int[Tensor, " position"] | None) -> Tensor:
        """Return the explained logit of each sequence in the output of a run, or the value of the function `logit`.

        `computed` are the positions of the run's logits, None for all. Raises `InputError` for an output without logits
        and for an id that is out of range.
        """
        if callable(logit):
            value = logit(output)
            return value if isinstance(value, Tensor) else one_each(value, self._tokens[0])
        logits = self._logits(output, target, computed)
        if isinstance(logit, Relative):
            return relative(logits, self.ids(target, logit.logit, logits), logit.measure)
        return picked(logits, self.ids(target, logit, logits))

    def observed(self, target: Any, logit: Logit) -> Tensor | None:
        """Return the `scalar` of the traced output, None if the traced run did not compute its logits."""
        return self.scalar(self._output, target, logit, self._computed_positions) if self.is_computed else None

    def arguments(
        self, model: nn.Module, targets: Sequence[Any] | None
    ) -> tuple[Mapping[str, Any], Int[Tensor, " position"] | None]:
        """Return the arguments of a run of the model, and the positions whose logits it computes, None for all.

        A host that accepts `logits_to_keep` computes only those of `targets`, if they are given.
        """
        run_arguments = self._arguments
        if targets is not None:
            at_targets = partial(self.kept_at, model, run_arguments, lambda: [self._positions(t) for t in targets])
            run_arguments = in_gradient_mode(False, at_targets)
        return run_arguments, kept_positions(run_arguments, self._tokens[1])

    def kept_at(
        self,
        model: nn.Module,
        arguments: Mapping[str, Any],
        positions: Callable[[], Sequence[Int[Tensor, " position"]]],
    ) -> dict[str, Any]:
        """Return the arguments of a run with `logits_to_keep` set to positions of tokens, if these name rows of logits.

        A model may add tokens, such as an image's, before those of its ids, and have logits of all or of its ids only.
        """
        ids, logits = arguments.get("input_ids", arguments.get("inputs_embeds")), self._traced
        names_rows = not isinstance(ids, Tensor) or ids.ndim < 2 or ids.shape[1] == self._tokens[1]
        if not names_rows and (logits is None or logits.ndim != 3 or logits.shape[1] != self._tokens[1]):
            return dict(arguments)
        return logits_at(model, arguments, positions, above=0)

    def elements(self, model: nn.Module, logit: Logit) -> int:
        """Return the number of logits that a run computes for one target, or for a function of the output.

        Raises `InputError` for an output without logits, unless `logit` is a function.
        """
        logits = self._traced if callable(logit) else self.logits
        if logits is None:
            return 0
        if logits.ndim != 3 or callable(logit):
            return logits.numel()
        first = [torch.tensor([0], device="cpu")]
        chooses = KEEP in self.kept_at(model, self._arguments, lambda: first)
        return logits.numel() // logits.shape[1] if chooses else logits.numel()

    def elements_at(self, targets: int) -> int:
        """Return the number of logits at `targets` positions, 0 for an output without logits."""
        logits = self._traced
        if logits is None or logits.ndim != 3:
            return 0 if logits is None else logits.numel()
        return logits.numel() // logits.shape[1] * targets

    @property
    def _computed_positions(self) -> Int[Tensor, " position"] | None:
        return kept_positions(self._arguments, self._tokens[1])

    @property
    def by_token(self) -> bool:
        """Whether the traced output has logits of positions."""
        logits = self._traced
        return logits is not None and logits.ndim == 3

    @property
    def is_computed(self) -> bool:
        """Whether the traced run computed the logits of every position that its arguments ask for."""
        logits = self._traced
        by_token = logits is not None and logits.ndim == 3
        return (
            logits is None or not by_token or self._computed_positions is not None or logits.shape[1] == self._tokens[1]
        )

    def positions_of(self, target: Any) -> tuple[int, ...] | None:
        """Return the positions of a target, None for all and for class logits, which have no positions."""
        return None if target is None or not self.by_token else tuple(self._positions(target).tolist())

    def _logits(
        self, output: Any, target: Any, computed: Int[Tensor, " position"] | None
    ) -> Float[Tensor, "batch *query token"]:
        """Return the logits of an output at a target, at every position for None."""
        logits = logits_of(output, self._model, self._tokens, computed, sizes=self.sizes)
        return logits if logits.ndim != 3 or target is None else at_positions(logits, self._positions(target), computed)
