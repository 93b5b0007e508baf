"""`check_architecture`: run every law on a host model and its adapter, and say in a table what held."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from unilinattn.errors import UnilinattnError
from unilinattn.operator import MixerOperator
from unilinattn.recorder import host_arguments
from unilinattn.testing.checks import LawViolation, left_as_found, outputs, require, require_close
from unilinattn.testing.laws import HOST_LAWS, OPERATOR_LAWS, precision, reconstruction, recurrence
from unilinattn.testing.laws import padding as padding_law
from unilinattn.testing.promote import promoted
from unilinattn.testing.tolerances import relative_error, tolerance
from unilinattn.trace import Layer, Trace, trace

Recurrence = Callable[[Layer, Tensor], Tensor]
"""Given a layer and a fresh input, runs the paper's recurrence on it, frozen on the layer's own input."""


@dataclass
class LayerVerdict:
    """What was found about one layer.

    Attributes:
        name: the layer's path in the model.
        host: class of the host's module.
        architecture: name of the adapter.
        kind: what mixes the tokens.
        errors: reconstruction error by how the host was run.
        passed: names of the laws that held.
        failed: why a law did not hold, by its name.
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
    """What was found about a model; `str` gives the table.

    Attributes:
        model: its class.
        layers: one verdict for each call of a token-mixing module.
        failed: laws of the model as a whole that did not hold, with the reason.
        masks: sides on which the host itself keeps padding out of real tokens, None if that was not tried.
        notes: what was seen that is no failure.
    """

    model: str
    layers: list[LayerVerdict]
    failed: dict[str, str] = field(default_factory=dict)
    masks: tuple[str, ...] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> dict[str, str]:
        """Every law that did not hold, with the first reason."""
        found: dict[str, str] = {}
        for failed in (*(layer.failed for layer in self.layers), self.failed):
            for law, reason in failed.items():
                found.setdefault(law, reason)
        return found

    def __str__(self) -> str:
        """Show a row for each layer, then what failed."""
        held = f"broken: {', '.join(self.failures)}" if self.failures else "every law holds"
        lines = [f"{self.model}: {len(self.layers)} layers, {held}"]
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
    """Hold a model's adapters to every law, print what was found, and raise `LawViolation` if one is broken.

    Use a small configuration with random weights (`randomize`): the laws fill matrices, and run the host a dozen
    times. The model itself is not changed; copies of it run in `dtype`, in `.double()`, and promoted to float64
    throughout, where most laws are tested. `padding` also runs padded batches where the model takes `input_ids` and
    an `attention_mask`. `recurrence(layer, x)` is an optional third oracle: the architecture's own recurrence.
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
    """Return what `check_architecture` finds, without raising or printing."""
    run = _Examination(model, inputs)
    run.as_given(dtype)
    run.unpromoted()
    run.promoted(recurrence)
    run.bias_without_biases()
    if padding:
        run.padding()
    return run.verdict


class _Examination:
    """Runs copies of one model and notes in one verdict what held."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.model = model
        self.double = copy.deepcopy(model).double()
        self.inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        found = trace(self.double, self._cast(torch.float64))
        self.verdict = Verdict(
            type(model).__name__,
            [LayerVerdict(x.name, type(x._module).__name__, x.architecture, x.kind) for x in found.layers],
        )

    def as_given(self, dtype: torch.dtype) -> None:
        """Reconstruct in the dtype asked for; leave the model alone; hold the operator's own precision."""
        host = copy.deepcopy(self.model).to(dtype)
        with self._noting(None, "untouched"), left_as_found(host):
            found = trace(host, self._cast(dtype))
            for layer in found.layers:
                with self._noting(None, "build"):
                    layer.operator  # noqa: B018  the property builds it
        with self._noting(None, "output"):
            _require_own_output(host, self._cast(dtype), found, tolerance("reconstruction", dtype))
        again = trace(host, self._cast(dtype))
        limit = tolerance("reconstruction", dtype)
        for k, (layer, second) in enumerate(zip(found.layers, again.layers, strict=True)):
            with self._noting(k, "build"):
                op = layer.operator
                self._error(k, str(dtype).removeprefix("torch."), op)
                with self._noting(k, "reconstruction"):
                    reconstruction(op, limit)
                with self._noting(k, "precision"):
                    precision(op, limit)
                with self._noting(k, "repeatability"):
                    same = torch.equal(op.apply(op.inputs), second.operator.apply(second.operator.inputs))
                    require("repeatability", same, "a second trace gives another operator.")

    def unpromoted(self) -> None:
        """Reconstruct what the host computes in `.double()`, its forced float32 included."""
        for k, layer in enumerate(trace(self.double, self._cast(torch.float64)).layers):
            with self._noting(k, "reconstruction"):
                self._error(k, "float64", layer.operator)
                reconstruction(layer.operator, tolerance("unpromoted", torch.float64))

    def promoted(self, frozen: Recurrence | None) -> None:
        """Hold every operator of the promoted host to every law in float64."""
        for k, layer in enumerate(_promoted_trace(self.double, self._cast(torch.float64)).layers):
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
                with self._noting(k, "bias"):
                    _require_bias_without_output(layer)

    def bias_without_biases(self) -> None:
        """Zero every additive parameter of the host: whatever bias the operators have must vanish bit for bit."""
        bare = copy.deepcopy(self.double)
        with torch.no_grad():
            for name, parameter in bare.named_parameters():
                if "bias" in name.rsplit(".", 1)[-1]:
                    parameter.zero_()
        for k, layer in enumerate(_promoted_trace(bare, self._cast(torch.float64)).layers):
            with self._noting(k, "bias"):
                largest = float(layer.operator.bias.abs().amax())
                message = f"it is {largest:.1e} where every bias of the host is zero, so it is made of something else."
                require("bias", largest == 0, message)

    def padding(self) -> None:
        """Pad on both sides, three sequences and one: reconstruct, and compare with the sequences by themselves."""
        ids = self.inputs.get("input_ids") if isinstance(self.inputs, Mapping) else self.inputs
        alone = not isinstance(self.inputs, Mapping) or set(self.inputs) == {"input_ids"}
        takes_mask = "attention_mask" in inspect.signature(self.model.forward).parameters
        if not (isinstance(ids, Tensor) and not ids.is_floating_point() and alone and takes_mask):
            self.verdict.notes.append("padding was not tried: the model takes no ids with an attention_mask alone.")
            return
        self.verdict.masks = ("left", "right")
        length = ids.shape[1]
        several = [ids[b % len(ids), : max(1, length - 2 * b)] for b in range(3)]
        singles = [_promoted_trace(self.double, {"input_ids": sequence[None]}) for sequence in several]
        for side in ("left", "right"):
            for count in (3, 1):
                self._padded(several[:count], singles[:count], side)

    def _padded(self, sequences: list[Int[Tensor, " _"]], singles: list[Trace], side: str) -> None:
        lengths = torch.tensor([len(sequence) for sequence in sequences])[:, None]
        width = int(lengths.max()) + 2
        place = torch.arange(width)
        real = place >= width - lengths if side == "left" else place < lengths
        ids = sequences[0].new_full((len(sequences), width), int(sequences[0][0]))
        ids[real] = torch.cat(sequences)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batch = _promoted_trace(self.double, {"input_ids": ids, "attention_mask": real.long()})
        warned = any(f"{side} padding" in str(warning.message) for warning in caught)
        leaks = False
        for k, layer in enumerate(batch.layers):
            where = f"padded on the {side}, batch of {len(sequences)}"
            with self._noting(k, "reconstruction", where):
                reconstruction(layer.operator, tolerance("reconstruction", torch.float64))
            miss = max(
                relative_error(layer.output[b : b + 1, real[b]], single.layers[k].output)
                for b, single in enumerate(singles)
            )
            if miss > tolerance("padding", torch.float64):
                assert self.verdict.masks is not None
                self.verdict.masks = tuple(other for other in self.verdict.masks if other != side)
                self.verdict.notes.append(f"{layer.name}, {where}: the host lets padding through ({miss:.0e}).")
                leaks = True
                continue
            with self._noting(k, "padding", where):
                padding_law(layer.operator, real, tolerance("law", torch.float64))
                _require_unpadded(layer, real, singles, k)
        with self._noting(None, "leak", f"padded on the {side}, batch of {len(sequences)}"):
            message = "the host lets padding through, and no adapter says so by its `leak`."
            if warned:
                message = "the host keeps padding out, yet an adapter's `leak` warns of it."
            require("leak", warned == leaks, message)

    def _cast(self, dtype: torch.dtype) -> Any:
        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        if isinstance(self.inputs, Mapping):
            return {name: cast(value) for name, value in self.inputs.items()}
        return cast(self.inputs)

    def _error(self, layer: int, how: str, op: MixerOperator) -> None:
        self.verdict.layers[layer].errors[how] = op.reconstruction_error()

    @contextmanager
    def _noting(self, layer: int | None, law: str, where: str = "") -> Iterator[None]:
        """Note under a law whether the block held; an error of the library counts as a failure of that law."""
        of = self.verdict if layer is None else self.verdict.layers[layer]
        try:
            yield
        except (LawViolation, UnilinattnError) as error:
            name, reason = (error.law, error.reason) if isinstance(error, LawViolation) else (law, str(error))
            of.failed.setdefault(name, f"{where}: {reason}" if where else reason)
        else:
            if isinstance(of, LayerVerdict) and law != "build":
                of.passed.append(law)


def _promoted_trace(model: nn.Module, inputs: Any) -> Trace:
    """Trace a host promoted to float64, and build its operators there; one that cannot be built raises when used."""
    with promoted():
        found = trace(model, inputs)
        for layer in found.layers:
            with suppress(UnilinattnError):
                layer.operator  # noqa: B018  the property builds it
    return found


def _require_unpadded(layer: Layer, real: Bool[Tensor, "batch length"], singles: list[Trace], k: int) -> None:
    """Require the padded operator, at its real tokens, to be the operators of the single sequences."""
    limit = tolerance("padding", torch.float64)
    op = layer.operator
    ends = torch.stack([row.nonzero()[-1] for row in real])
    core, shares, bias = op.matrix("core", heads=None), op.contributions(ends).squeeze(1), op.bias
    for b, single in enumerate(singles):
        own, places = single.layers[k].operator, real[b].nonzero().squeeze(1)
        size = own.output.flatten(1).norm(dim=1)
        for name, got, expected, scale in (
            ("core", core[b : b + 1, :, places][..., places], own.matrix("core", heads=None), None),
            ("contributions", shares[b : b + 1, places], own.contributions(-1), None),
            ("bias", bias[b : b + 1, places], own.bias, size),
        ):
            what = f"{name} of sequence {b} in the batch against it alone"
            require_close("padding", got, expected, limit, what, scale=scale)


def _require_own_output(model: nn.Module, inputs: Any, found: Trace, limit: float) -> None:
    """Hold a traced run to what the model returns by itself.

    Bit for bit, with attention in the eager form in which it is traced; to a tolerance where the model's own choice is
    another function, which rounds in another order.
    """
    given = host_arguments(model, inputs)
    eager = copy.deepcopy(model)
    choose = getattr(eager, "set_attn_implementation", None)
    if choose is not None:
        choose("eager")
    with torch.no_grad():
        # A copy, because some hosts change their own weights when they run.
        own, plain = outputs(copy.deepcopy(model)(**given)), outputs(eager(**given))
    traced = outputs(found.output)
    for got, expected in zip(traced, own, strict=True):
        what = "what the traced model returned against what it returns by itself"
        require_close("output", got.reshape(1, -1), expected.reshape(1, -1), limit, what)
    same = all(torch.equal(got, expected) for got, expected in zip(traced, plain, strict=True))
    require("output", same, "the traced model does not return, bit for bit, what it returns by itself.")


def _require_bias_without_output(layer: Layer) -> None:
    """Build the operator again from a record whose output is another one by far less than adapters verify."""
    other = copy.copy(layer)
    vars(other).pop("operator", None)
    other.output = layer.output * (1 + 2.0**-45)
    with promoted():
        rebuilt = other.operator
    same = torch.equal(rebuilt.bias, layer.operator.bias)
    require("bias", same, "an operator built with another recorded output has another bias.")
