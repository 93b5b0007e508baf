"""Perturbation tests: remove tokens or patches in the order of their relevance, and watch the model's prediction."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from unilinattn.call.exactness import layer_tolerance
from unilinattn.errors import InputError, OptionError
from unilinattn.evaluation.masking import EMBEDS, Masking, real_tokens, removal
from unilinattn.evaluation.metrics import tensor_text
from unilinattn.host.inputs import host_arguments
from unilinattn.host.isolation import in_gradient_mode
from unilinattn.host.logits import positions_of
from unilinattn.host.probabilities import log_probabilities, logit_kind
from unilinattn.host.recomputation import captures
from unilinattn.host.run import run
from unilinattn.memory import parts
from unilinattn.tracing.trace import Target

TENTHS = tuple(k / 10 for k in range(11))
"""Fractions of the activation and pruning curves, 0 to 1; the perturbation curves leave out both ends."""

ERASER_FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)
"""Fractions of tokens that comprehensiveness and sufficiency are averaged over (ERASER 4.2)."""

MOST_LOGITS = 1 << 24
"""Largest number of logits of a batch of fractions, 64 MiB in float32, and of the runs that a test remembers."""

AT_ONCE = 64
"""Most inputs in one run of several removals."""

Measure = Callable[[Float[Tensor, "batch class"]], Float[Tensor, " batch"]]
"""A number for each sequence or image, given its logits."""


@dataclass(frozen=True, eq=False)
class PerturbationCurve:
    """A number for each sequence or image at growing fractions of removed (or added) tokens or patches."""

    fractions: tuple[float, ...]
    values: Float[Tensor, "batch fraction"]

    @property
    def mean(self) -> Float[Tensor, " fraction"]:
        """The curve averaged over the batch."""
        return self.values.mean(0)

    @property
    def area(self) -> float:
        """The area under the averaged curve by the trapezoidal rule, divided by the range of the fractions.

        So the area of a constant curve is its height, whatever the fractions are.
        """
        fractions = torch.tensor(self.fractions, dtype=torch.float64, device=self.values.device)
        return float(torch.trapezoid(self.mean, fractions) / (fractions[-1] - fractions[0]))


class PerturbationTest:
    """A model, a batch of inputs and their relevance scores, for perturbation curves and the ERASER metrics.

    The units that are removed are tokens or image patches. A fraction f of the n valid units of a sequence is
    ceil(f n) of them; units with tied scores are taken in a random order, which `seed` fixes. Each fraction of a curve
    is one run of the model on the whole batch: as a trace runs it, without gradients, in the mode that it is in. The
    fractions of a single image, or of a single sequence of tokens without a mask, are batches in evaluation mode, of at
    most `MOST_LOGITS` logits. The model is restored after each run.

    Attributes:
        logits: (batch, class), of the unperturbed inputs, in float64.
        labels: (batch,), the class of each sequence or image.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        relevance: Float[Tensor, "batch *unit"],
        *,
        masking: Masking,
        mask_token_id: int | None = None,
        reference: Tensor | None = None,
        labels: Int[Tensor, " batch"] | None = None,
        target: Target = -1,
        valid: Bool[Tensor, "batch *unit"] | None = None,
        seed: int | Sequence[int] = 0,
    ) -> None:
        """Run the model on the unperturbed inputs.

        inputs: token ids, pixels, or a mapping of the model's keyword arguments, as `unilinattn.trace` takes them.
        relevance: scores of tokens (batch, token), or of patches (batch, row, column) that divide the image; a map at
            the size of the image scores pixels.
        masking: the values that replace a removed unit. "token": the id `mask_token_id`. "zero": zeros, in place of
            the token's embedding or of the model's own pixel values (not black, if these are normalised). "mean": the
            mean over the sequence's real tokens of their embeddings, or the image's mean colour. "blur": the image
            under a Gaussian blur with a standard deviation of 10 of 224 pixels of its shorter side. "reference": the
            same unit of `reference`, another input of the same shape, such as the image without its object.
        labels: the true class of each sequence or image; by default the model's prediction.
        target: the position, counted over real tokens, whose logits a model with logits at every token is tested on.
        valid: units that may be removed; by default all, and only real tokens where there is an `attention_mask`.
        seed: seed of the order of units with equal scores, one for all inputs or one for each.

        Raises `InputError` if shapes, labels or target do not fit, scores of valid units are NaN, a sequence has no
        valid unit, the model returns no logits or NaN, or its logits depend on token ids beside their embeddings; and
        `OptionError` for a masking that is unknown or does not fit the inputs.
        """
        self._model, self._mask_token_id, self._target = model, mask_token_id, target
        arguments = in_gradient_mode(False, lambda: tree_map_only(Tensor, torch.clone, host_arguments(model, inputs)))
        units = _shape_of(relevance)
        self._removal = in_gradient_mode(
            False, lambda: removal(model, arguments, units, masking, mask_token_id, reference)
        )
        device = self._removal.values.device
        self._relevance, self._seeds = relevance.detach().to(device, torch.float64), _seeds(seed, len(relevance))
        self._real = real_tokens(arguments, units).to(device) if len(units) == 2 else None
        self._valid = _valid_units(valid, self._relevance, self._real)
        self.logits = self._run(arguments)
        nothing = torch.zeros_like(self._valid)
        self._remembered = {} if self._removal.name == EMBEDS else {_key(nothing): self.logits}
        if self._removal.name == EMBEDS and not model.training:
            self._require_same(*self._runs([nothing]))
        self.labels = self.logits.argmax(-1) if labels is None else _labels(labels, self.logits)

    def of_scores(self, relevance: Float[Tensor, "batch *unit"]) -> "PerturbationTest":
        """Return the test of other scores of the same units, which shares the runs with equal removals.

        Raises `InputError` for scores of another shape, and for NaN at valid units.
        """
        if not isinstance(relevance, Tensor) or relevance.shape != self._relevance.shape:
            raise InputError(
                f"relevance must have the shape {tuple(self._relevance.shape)} of the test's; got "
                f"{tensor_text(relevance)}."
            )
        other = copy(self)
        other._relevance = relevance.detach().to(self._relevance)
        _require_ranked(other._relevance, self._valid)
        return other

    def positive(self, fractions: Sequence[float] = TENTHS[1:-1]) -> PerturbationCurve:
        """Return the top-1 accuracy while the most relevant units are removed first: a good order has a small area.

        Source: HMA ACL 4.2, Table 1.
        """
        return self._curve(fractions, self._relevance, self._correct)

    def negative(self, fractions: Sequence[float] = TENTHS[1:-1]) -> PerturbationCurve:
        """Return the top-1 accuracy while the least relevant units are removed first: a good order has a large area.

        Source: HMA ACL 4.2, Table 1.
        """
        return self._curve(fractions, -self._relevance, self._correct)

    def deletion(self, fractions: Sequence[float] = TENTHS) -> PerturbationCurve:
        """Return the label's probability while the most relevant units are removed first.

        A good order has a small area. Source: Petsiuk et al., "RISE" (BMVC 2018), 3.3.
        """
        return self._curve(fractions, self._relevance, self._probability)

    def activation(self, fractions: Sequence[float] = TENTHS) -> PerturbationCurve:
        """Return the label's probability while the most relevant units are added first to an input without any.

        The area is the AUAC; a good order has a large one. Source: HMA ACL 4.3, App. A, Table 3.
        """
        return self._curve(fractions, self._relevance, self._probability, keep=True)

    def pruning(self, fractions: Sequence[float] = TENTHS) -> PerturbationCurve:
        """Return ||y_0 - y||^2 of the logits y while the units of least absolute relevance are removed first.

        y_0 are the logits of the unperturbed input; the square is summed over the classes. The area is the AU-MSE; a
        good order has a small one.

        Raises `InputError` if a logit is infinite, which has no squared change.
        Source: HMA ACL 4.3, App. A (Fig. 5: absolute relevance), Table 3; the sum is that of the code of Ali et al.,
        "XAI for Transformers" (2022).
        """
        if not bool(self.logits.isfinite().all()):
            raise InputError("the model returns infinite logits, whose squared change is undefined.")
        return self._curve(fractions, -self._relevance.abs(), self._squared_change)

    def comprehensiveness(self, fractions: Sequence[float] = ERASER_FRACTIONS) -> float:
        """Return mean_f p(x) - p(x without its top f): the fall of the label's probability p, averaged over the batch.

        A good order has a large one.
        Source: ERASER (DeYoung et al. 2020), 4.2, Eq. 1; averaged over `fractions` as by its published scorer.
        """
        return float(self.falls(fractions, keep=False).mean())

    def sufficiency(self, fractions: Sequence[float] = ERASER_FRACTIONS) -> float:
        """Return mean_f p(x) - p(only the top f of x): the fall of the label's probability p, averaged over the batch.

        A good order has a small one.
        Source: ERASER (DeYoung et al. 2020), 4.2, Eq. 2; averaged over `fractions` as by its published scorer.
        """
        return float(self.falls(fractions, keep=True).mean())

    def falls(self, fractions: Sequence[float] = ERASER_FRACTIONS, *, keep: bool = False) -> Float[Tensor, " batch"]:
        """Return the comprehensiveness of each input, or with `keep` its sufficiency."""
        wanted = _fractions(fractions, at_least=1)
        after = self._values(wanted, self._relevance, self._probability, keep=keep)
        return (self._probability(self.logits)[:, None] - after).mean(1)

    def _curve(
        self, fractions: Sequence[float], order: Float[Tensor, "batch *unit"], measure: Measure, *, keep: bool = False
    ) -> PerturbationCurve:
        wanted = _fractions(fractions, at_least=2)
        return PerturbationCurve(wanted, self._values(wanted, order, measure, keep=keep))

    def _values(
        self, fractions: tuple[float, ...], order: Float[Tensor, "batch *unit"], measure: Measure, *, keep: bool
    ) -> Float[Tensor, "batch fraction"]:
        """Measure the logits after the first units of an order are removed, or after only those are kept."""
        rank, count = self._ranks(order), self._valid.flatten(1).sum(1)
        removed = []
        for fraction in fractions:
            # The small number keeps the rounding of a product from counting one unit too many.
            taken = torch.ceil(fraction * count - 1e-9).view(-1, *[1] * (rank.ndim - 1))
            removed.append(self._valid & ((rank >= taken) if keep else (rank < taken)))
        return torch.stack([measure(logits) for logits in self._runs(removed)], -1)

    def _runs(self, removed: Sequence[Bool[Tensor, "batch *unit"]]) -> list[Float[Tensor, "batch class"]]:
        """Return the logits after each removal; equal removals run once, also those of the test's other scores."""
        keys = [_key(mask) for mask in removed]
        masks = {key: mask for key, mask in zip(keys, removed, strict=True) if key not in self._remembered}
        distinct = list(masks.values())
        runs = [logits for some in parts(len(distinct), self._at_once()) for logits in self._joined(distinct[some])]
        new = dict(zip(masks, runs, strict=True))
        results = [new[key] if key in new else self._remembered[key] for key in keys]
        if (len(self._remembered) + len(new)) * self.logits.numel() <= MOST_LOGITS:
            self._remembered.update(new)
        return results

    def _at_once(self) -> int:
        """Return the number of removals whose inputs run together."""
        tensors = sum(isinstance(value, Tensor) for value in self._removal.arguments.values())
        if tensors > 1 or self._model.training:
            return 1
        batch, tokens = len(self._relevance), self._relevance.shape[1] if self._relevance.ndim == 2 else 1
        most = MOST_LOGITS // (batch * tokens * self.logits.shape[1])
        return max(1, most if batch == 1 else min(most, AT_ONCE // batch))

    def _joined(self, removed: Sequence[Bool[Tensor, "batch *unit"]]) -> Sequence[Float[Tensor, "batch class"]]:
        """Return the logits after each removal, in one run."""
        return self._run(self._removal(torch.stack(list(removed))), len(removed)).split(len(self._relevance))

    def _ranks(self, order: Float[Tensor, "batch *unit"]) -> Int[Tensor, "batch *unit"]:
        """Return each valid unit's rank by descending score, from 0; the number of all units elsewhere."""
        rank = torch.full(order.flatten(1).shape, order[0].numel(), device=order.device)
        for row, scores, valid, seed in zip(rank, order.flatten(1), self._valid.flatten(1), self._seeds, strict=True):
            units = valid.nonzero().squeeze(1)
            # A generator for each sequence, so that the other sequences of a batch change nothing.
            generator = torch.Generator().manual_seed(seed)
            units = units[torch.randperm(len(units), generator=generator, device="cpu").to(units.device)]
            units = units[scores[units].argsort(descending=True, stable=True)]
            row[units] = torch.arange(len(units), device=row.device)
        return rank.view(order.shape)

    def _run(self, arguments: Mapping[str, Any], fractions: int = 1) -> Float[Tensor, "batch class"]:
        """Return the logits of one run: those of a classifier, or those at the target.

        `fractions`: number of fractions, each of which has the batch of the relevance.
        """
        # Without captures, RWKV would rescale its weights in place.
        output = run(self._model, arguments, mixers=captures(self._model))
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        batch, name = fractions * len(self._relevance), type(self._model).__name__
        if not isinstance(logits, Tensor) or logits.ndim not in (2, 3) or len(logits) != batch:
            got = tensor_text(output if logits is None else logits)
            raise InputError(f"{name} returned {got}; logits (batch, class) or (batch, token, class) are needed.")
        if logits.ndim == 3:
            if self._real is None or logits.shape[1] != self._real.shape[1]:
                raise InputError(
                    f"{name} returned logits of shape {tuple(logits.shape)}, and relevance has the shape "
                    f"{tuple(self._relevance.shape)}; logits of each scored token, or of a class, are needed."
                )
            positions = positions_of(self._target, self._real.cpu()).to(logits.device).repeat(fractions)
            logits = logits[torch.arange(batch, device=logits.device), positions]
        elif self._mask_token_id is not None and self._mask_token_id == _padding_token(self._model):
            raise OptionError(
                f"mask_token_id={self._mask_token_id} is the padding token of {name}; a classifier may find the last "
                "token by it, and would read another position. Give another id."
            )
        if bool(logits.isnan().any()):
            raise InputError(f"{name} returned NaN among its logits, so nothing can be measured on them.")
        return logits.detach().to(self._relevance.device, torch.float64)

    def _require_same(self, again: Float[Tensor, "batch class"]) -> None:
        # Logits of impossible tokens may be infinite in both runs.
        change = torch.where(self.logits == again, 0.0, self.logits - again).norm()
        allowed = layer_tolerance(self._removal.values.dtype) * self.logits[self.logits.isfinite()].norm()
        if not bool(change <= allowed):
            raise InputError(
                f"{type(self._model).__name__} gives other logits for {EMBEDS} than for the ids (changed by "
                f"{float(change):.1e}, {float(allowed):.1e} is accepted): it also reads the ids themselves. Use "
                "masking='token'."
            )

    def _correct(self, logits: Float[Tensor, "batch class"]) -> Float[Tensor, " batch"]:
        return (logits.argmax(-1) == self.labels).double()

    def _probability(self, logits: Float[Tensor, "batch class"]) -> Float[Tensor, " batch"]:
        log_p = log_probabilities(logits, logit_kind(self._model, logits))
        if log_p is None:
            raise InputError(
                f"{type(self._model).__name__} is a regression, whose outputs have no probabilities; take `pruning`, "
                "the squared change of the outputs."
            )
        return log_p.exp().gather(-1, self.labels[:, None]).squeeze(-1)

    def _squared_change(self, logits: Float[Tensor, "batch class"]) -> Float[Tensor, " batch"]:
        return ((logits - self.logits) ** 2).sum(-1)


def _key(removed: Bool[Tensor, "batch *unit"]) -> bytes:
    return sha256(removed.cpu().numpy().tobytes()).digest()


def _padding_token(model: nn.Module) -> int | None:
    padding: int | None = getattr(getattr(model, "config", None), "pad_token_id", None)
    return padding


def _shape_of(relevance: Tensor) -> tuple[int, ...]:
    scores = isinstance(relevance, Tensor) and relevance.is_floating_point() and relevance.numel()
    if not scores or relevance.ndim not in (2, 3):
        raise InputError(
            "relevance must be floating point, (batch, token) or (batch, row, column), with entries; got "
            f"{tensor_text(relevance)}."
        )
    return tuple(relevance.shape)


def _valid_units(
    valid: Tensor | None, relevance: Float[Tensor, "batch *unit"], real: Bool[Tensor, "batch token"] | None
) -> Bool[Tensor, "batch *unit"]:
    units = torch.ones_like(relevance, dtype=torch.bool) if real is None else real
    if valid is not None:
        if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.shape != relevance.shape:
            raise InputError(
                f"valid must be boolean, of the relevance's shape {tuple(relevance.shape)}; got {tensor_text(valid)}."
            )
        outside = valid.to(units.device) & ~units
        if bool(outside.any()):
            raise InputError(f"valid marks {int(outside.sum())} padded tokens, which cannot be removed.")
        units = valid.to(units.device)
    empty = ~units.flatten(1).any(1)
    if bool(empty.any()):
        raise InputError(f"sequence {int(empty.nonzero()[0])} has no valid unit, so there is nothing to remove.")
    _require_ranked(relevance, units)
    return units


def _require_ranked(relevance: Float[Tensor, "batch *unit"], valid: Bool[Tensor, "batch *unit"]) -> None:
    if bool((relevance.isnan() & valid).any()):
        raise InputError("relevance holds NaN at valid units, which have no place in the order.")


def _seeds(seed: int | Sequence[int], batch: int) -> list[int]:
    seeds = [seed] * batch if isinstance(seed, int) else list(seed)
    if len(seeds) != batch:
        raise InputError(f"seed names {len(seeds)} seeds for {batch} inputs; give one each, or one int.")
    return seeds


def _labels(labels: Tensor, logits: Float[Tensor, "batch class"]) -> Int[Tensor, " batch"]:
    batch, classes = logits.shape
    integer = isinstance(labels, Tensor) and labels.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
    if not integer or labels.shape != (batch,):
        raise InputError(
            f"labels must be integers of shape ({batch},), one class for each input; got {tensor_text(labels)}."
        )
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(
            f"labels reach from {int(labels.min())} to {int(labels.max())}; the model has classes 0 to {classes - 1}."
        )
    return labels.to(logits.device, torch.int64)


def _fractions(fractions: Sequence[float], *, at_least: int) -> tuple[float, ...]:
    wanted = tuple(float(fraction) for fraction in fractions)
    rising = all(a < b for a, b in pairwise(wanted))
    if len(wanted) < at_least or not rising or not all(0 <= fraction <= 1 for fraction in wanted):
        raise OptionError(f"fractions={list(fractions)}; give {at_least} or more from 0 to 1, in rising order.")
    return wanted
