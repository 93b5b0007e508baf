"""`check_architecture`: check every law on a host model and its adapters, and print the result as a table."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from unilinattn.call.exactness import relative_error, tolerance
from unilinattn.errors import UnilinattnError
from unilinattn.operator.operator import MixerOperator
from unilinattn.testing.checks import LawViolation, left_as_found, require
from unilinattn.testing.host_laws import (
    bias_without_output,
    has_constants,
    mixing,
    own_output,
    unpadded,
    values_of_stages,
)
from unilinattn.testing.laws import HOST_LAWS, OPERATOR_LAWS, precision, reconstruction, recurrence
from unilinattn.testing.laws import padding as padding_law
from unilinattn.testing.margins import note_margin
from unilinattn.testing.promote import promoted
from unilinattn.testing.rounding import layer_rounding, rounding_limit, widened
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace, trace

Recurrence = Callable[[Layer, Tensor], Tensor]
"""The paper's recurrence, frozen on the layer's recorded input, as a function of the layer and a fresh input."""


@dataclass
class LayerVerdict:
    """The results of one layer.

    Attributes:
        name: path of the layer in the model.
        host: class of the host module.
        architecture: name of the adapter.
        kind: kind of mixer.
        errors: reconstruction error by dtype, or "promoted" for the promoted host.
        passed: names of the laws that hold.
        failed: reasons of the laws that do not hold, by name.
    """

    name: str
    host: str
    architecture: str
    kind: str
    errors: dict[str, float] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class Verdict:
    """The results of a model; `str` returns the table.

    Attributes:
        model: class of the model.
        layers: one verdict for each call of a token-mixing module.
        failed: reasons of the laws of the whole model that do not hold, by name.
        masks: sides on which the host itself keeps padding out of real tokens, None if padding was not tested.
        notes: observations that are no failures.
    """

    model: str
    layers: list[LayerVerdict]
    failed: dict[str, str] = field(default_factory=dict)
    masks: tuple[str, ...] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> dict[str, str]:
        """The laws that do not hold, each with its first reason."""
        reasons: dict[str, str] = {}
        for failed in (*(layer.failed for layer in self.layers), self.failed):
            for law, reason in failed.items():
                reasons.setdefault(law, reason)
        return reasons

    def __str__(self) -> str:
        """Return the table: the results of each layer, then the broken laws of the model and the notes."""
        summary = f"broken: {', '.join(self.failures)}" if self.failures else "every law holds"
        lines = [f"{self.model}: {len(self.layers)} layers, {summary}"]
        for layer in self.layers:
            errors = "  ".join(f"{how} {error:.1e}" for how, error in layer.errors.items())
            lines.append(f"  {layer.name}  {layer.host} as {layer.architecture} ({layer.kind})")
            lines.append(f"    reconstruction error: {errors}")
            lines.append(f"    held: {', '.join(dict.fromkeys(layer.passed)) or 'none'}")
            lines += [f"    BROKEN {law}: {reason}" for law, reason in layer.failed.items()]
        lines += [f"  BROKEN {law}: {reason}" for law, reason in self.failed.items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def check_architecture(
    model: nn.Module,
    inputs: Any,
    *,
    dtype: torch.dtype = torch.float32,
    padding: bool = True,
    recurrence: Recurrence | None = None,
) -> Verdict:
    """Check a model's adapters against every law, print the verdict and return it.

    Use a small configuration with random weights (`randomize`): the laws fill matrices and run the host a dozen times.
    The model is not changed; copies of it run in `dtype`, in `.double()`, and promoted to float64 throughout, where
    most laws are checked.

    `inputs`: token ids, or the keyword arguments of the model as a mapping. `padding`: also run padded batches, if the
    model takes `input_ids` and an `attention_mask`. `recurrence(layer, x)`: an optional third oracle, the
    architecture's own recurrence.

    Raises `LawViolation` if a law is broken.
    """
    verdict = examine(model, inputs, dtype=dtype, padding=padding, recurrence=recurrence)
    print(verdict)
    for law, reason in verdict.failures.items():
        raise LawViolation(law, f"{reason}\n{verdict}")
    return verdict


def examine(
    model: nn.Module,
    inputs: Any,
    *,
    dtype: torch.dtype = torch.float32,
    padding: bool = True,
    recurrence: Recurrence | None = None,
) -> Verdict:
    """Return the verdict of `check_architecture` without printing it or raising `LawViolation`."""
    run = _Examination(model, inputs)
    run.as_given(dtype)
    run.unpromoted()
    run.promoted(recurrence)
    run.bias_without_biases()
    if padding:
        run.padding()
    return run.verdict


class _Examination:
    """Runs copies of one model and collects the results in one verdict."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.model = model
        self.double = copy.deepcopy(model).double()
        self.inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        self.layers = trace(self.double, widened(self.inputs)).layers
        self.verdict = Verdict(
            type(model).__name__,
            [LayerVerdict(x.name, type(x.module).__name__, x.architecture, x.kind) for x in self.layers],
        )

    def as_given(self, dtype: torch.dtype) -> None:
        """Check in `dtype`: tracing leaves the model unchanged; the operators' error, dtype and repeatability."""
        host = copy.deepcopy(self.model).to(dtype)
        with self._noting(None, "untouched"), left_as_found(host):
            traced = trace(host, widened(self.inputs, dtype))
            for layer in traced.layers:
                with self._noting(None, "build"):
                    layer.operator  # noqa: B018  the property builds it
        with self._noting(None, "output"):
            failure = own_output(host, self.double, widened(self.inputs, dtype), traced)
            if failure is not None:
                self.verdict.notes.append(f"the model cannot be called with only these inputs ({failure}).")
        again = trace(host, widened(self.inputs, dtype))
        for k, (layer, second) in enumerate(zip(traced.layers, again.layers, strict=True)):
            with self._noting(k, "build"):
                op = layer.operator
                self._error(k, str(dtype).removeprefix("torch."), op)
                with self._noting(k, "reconstruction"):
                    reconstruction(op, rounding_limit(layer_rounding(layer), dtype))
                with self._noting(k, "precision"):
                    precision(op, tolerance("law", op.output.dtype))
                with self._noting(k, "repeatability"):
                    same = torch.equal(op.apply(op.inputs), second.operator.apply(second.operator.inputs))
                    require("repeatability", same, "a second trace gives another operator.")

    def unpromoted(self) -> None:
        """Check the reconstruction of the host in `.double()`, which keeps its forced float32."""
        for k, layer in enumerate(self.layers):
            with self._noting(k, "reconstruction"):
                self._error(k, "float64", layer.operator)
                reconstruction(layer.operator, rounding_limit(layer_rounding(layer), torch.float64))

    def promoted(self, frozen: Recurrence | None) -> None:
        """Check every law in float64 on the operators of the promoted host."""
        for k, layer in enumerate(promoted_trace(self.double, widened(self.inputs)).layers):
            with self._noting(k, "build"):
                op = layer.operator
                self._error(k, "promoted", op)
                for laws, limit in (
                    (HOST_LAWS, tolerance("reconstruction", torch.float64)),
                    (OPERATOR_LAWS, tolerance("law", torch.float64)),
                ):
                    for name, law in laws.items():
                        with self._noting(k, name):
                            law(op, limit)
                if frozen is not None:
                    with self._noting(k, "recurrence"):
                        recurrence(op, partial(frozen, layer), tolerance("reconstruction", torch.float64))
                with self._noting(k, "reconstruction"):
                    values_of_stages(layer, tolerance("law", torch.float64))
                with self._noting(k, "bias"):
                    bias_without_output(layer)
                with self._noting(k, "mixing"):
                    mixing(layer, tolerance("law", torch.float64))

    def bias_without_biases(self) -> None:
        """Check that the operators' biases are exactly zero for a host whose additive parameters are all zero.

        Layers that return other numbers than zeros for vectors of zeros, by functions such as a sigmoid, have a bias
        without such parameters.
        """
        bare = copy.deepcopy(self.double)
        with torch.no_grad():
            for name, parameter in bare.named_parameters():
                if "bias" in name.rsplit(".", 1)[-1]:
                    parameter.zero_()
        for k, layer in enumerate(promoted_trace(bare, widened(self.inputs)).layers):
            with self._noting(k, "bias"):
                largest = float(layer.operator.bias.abs().amax())
                message = f"it is {largest:.1e} although every bias of the host is zero."
                require("bias", largest == 0 or has_constants(layer), message)

    def padding(self) -> None:
        """Check three sequences padded on either side, and one on the left, against the unpadded sequences."""
        ids = self.inputs.get("input_ids") if isinstance(self.inputs, Mapping) else self.inputs
        alone = not isinstance(self.inputs, Mapping) or set(self.inputs) == {"input_ids"}
        takes_mask = "attention_mask" in inspect.signature(self.model.forward).parameters
        if not (isinstance(ids, Tensor) and not ids.is_floating_point() and alone and takes_mask):
            self.verdict.notes.append("padding was not tested: only ids with an attention_mask can be padded.")
            return
        self.verdict.masks = ("left", "right")
        length = ids.shape[1]
        several = [ids[b % len(ids), : max(1, length - 2 * b)] for b in range(3)]
        singles = [promoted_trace(self.double, {"input_ids": sequence[None]}) for sequence in several]
        # Some hosts ignore the mask of a single sequence.
        for side, count in (("left", 3), ("right", 3), ("left", 1)):
            self._padded(several[:count], singles[:count], side)

    def _padded(self, sequences: list[Int[Tensor, " _"]], singles: list[Trace], side: str) -> None:
        lengths = torch.tensor([len(sequence) for sequence in sequences], device="cpu")[:, None]
        width = int(lengths.max()) + 2
        position = torch.arange(width, device="cpu")
        real = position >= width - lengths if side == "left" else position < lengths
        ids = sequences[0].new_full((len(sequences), width), int(sequences[0][0]))
        ids[real] = torch.cat(sequences)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batch = promoted_trace(self.double, {"input_ids": ids, "attention_mask": real.long()})
        warned = any(f"{side} padding" in str(warning.message) for warning in caught)
        leaks = False
        where = f"padded on the {side}, batch of {len(sequences)}"
        for k, layer in enumerate(batch.layers):
            with self._noting(k, "reconstruction", where):
                reconstruction(layer.operator, tolerance("reconstruction", torch.float64))
            miss = max(
                relative_error(layer.output[b : b + 1, real[b]], single.layers[k].output)
                for b, single in enumerate(singles)
            )
            limit = tolerance("padding", torch.float64)
            # The limit separates leaks from rounding, so the margin of a leak is its distance above the limit.
            note_margin("padding", f"{layer.name}, {where}: host", *((limit, miss) if miss > limit else (miss, limit)))
            if miss > limit:
                assert self.verdict.masks is not None
                self.verdict.masks = tuple(other for other in self.verdict.masks if other != side)
                self.verdict.notes.append(f"{layer.name}, {where}: the host lets padding through ({miss:.0e}).")
                leaks = True
                continue
            with self._noting(k, "padding", where):
                padding_law(layer.operator, real, tolerance("law", torch.float64))
                unpadded(layer, real, singles, k)
        with self._noting(None, "padding", where):
            message = "the host lets padding through, and no adapter's `padding_leak` reports it."
            if warned:
                message = "the host keeps padding out, but an adapter's `padding_leak` reports a leak."
            require("padding", warned == leaks, message)

    def _error(self, layer: int, how: str, op: MixerOperator) -> None:
        self.verdict.layers[layer].errors[how] = op.reconstruction_error()

    @contextmanager
    def _noting(self, layer: int | None, law: str, where: str = "") -> Iterator[None]:
        """Record whether the law holds in the block; an error of the library counts as a violation of it."""
        of = self.verdict if layer is None else self.verdict.layers[layer]
        try:
            yield
        except (LawViolation, UnilinattnError) as error:
            name, reason = (error.law, error.reason) if isinstance(error, LawViolation) else (law, str(error))
            of.failed.setdefault(name, f"{where}: {reason}" if where else reason)
        else:
            if isinstance(of, LayerVerdict) and law != "build":
                of.passed.append(law)


def promoted_trace(model: nn.Module, inputs: Any) -> Trace:
    """Trace a host promoted to float64 and build its operators there; one that cannot be built raises on use."""
    with promoted():
        traced = trace(model, inputs)
        for layer in traced.layers:
            with suppress(UnilinattnError):
                layer.operator  # noqa: B018  the property builds it
    return traced
