"""Decomposition errors: errors of the layers' outputs if LaTIM's f replaces the activation (LaTIM Table 4, Fig. 4)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from unilinattn.aligned import aligned
from unilinattn.errors import InputError, OptionError, ResultFileError, UncoveredError, nearest
from unilinattn.options.bases import Activation
from unilinattn.results import plots
from unilinattn.scoring.selection import only_port, stackable_layers
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
PICTURE, NUMBERS = "decomposition.png", "decomposition.json"
"""The files that `write` writes."""

FORMAT, FORMAT_VERSION = "unilinattn.decomposition", "1"
DEFINITION = "mean over real tokens i and channels of |y_i - sum_j T_i(x_j) - b_i|"
RELATIVE = "||y - sum_j T(x_j) - b|| / ||y|| over real tokens, the worst sequence"


@dataclass(frozen=True)
class DecompositionErrors:
    """The decomposition errors of a model by layer and activation.

    Attributes:
        model: class name of the model.
        layers, kinds: names and kinds of its layers.
        activations: the activations.
        difference: the mean over real tokens and channels of |y_i - sum_j T_i(x_j) - b_i|, by layer and activation: the
            average difference of the layer's output and its decomposition (LaTIM Fig. 4). None for a layer without an
            activation to split.
        relative: ||y - sum_j T(x_j) - b|| / ||y|| over real tokens, the worst sequence, as in the extras of `latim`.
    """

    model: str
    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    activations: tuple[str, ...]
    difference: tuple[tuple[float | None, ...], ...]
    relative: tuple[tuple[float | None, ...], ...]

    def __repr__(self) -> str:
        """Show the table."""
        return text_table({self.model: self})

    def plot(self) -> "Figure":
        """Draw the errors over the layers, a line for each activation.

        Raises `MissingExtraError` if matplotlib is missing.
        """
        return plot({self.model: self})

    def to_dict(self) -> dict[str, Any]:
        """Return the errors as plain values: for each layer, two numbers for each activation."""
        rows = zip(self.layers, self.kinds, self.difference, self.relative, strict=True)
        return {
            "model": self.model,
            "layers": [
                {
                    "name": name,
                    "kind": kind,
                    "difference": dict(zip(self.activations, difference, strict=True)),
                    "relative": dict(zip(self.activations, relative, strict=True)),
                }
                for name, kind, difference, relative in rows
            ],
        }


def decomposition_errors(trace: Trace, activations: Sequence[str] = ACTIVATIONS) -> DecompositionErrors:
    """Measure how far each layer's output is from sum_j T_i(x_j) + b_i with LaTIM's f in place of the activation.

    The activation phi(sum_k t_k + b) of the convolution's taps t_k becomes sum_k f(t_k) + f(b) (LaTIM Eq. 19); f is
    SiLU, ReLU, the identity, or SiLU's Taylor polynomial of order 1 or 2 about zero (LaTIM section 3.3, Appendix C).
    "exact" freezes the slope of phi. Every other factor of the layer is frozen, as in the method `latim`. One pass of
    each layer for each activation, linear in length.

    Args:
        trace: a trace of the model.
        activations: names among 'exact', 'silu', 'relu', 'identity', 'taylor1' and 'taylor2'.

    Raises `OptionError` for an unknown activation, and `ExactnessError` for a layer that misses the host's output.
    """
    if isinstance(activations, str) or not activations:
        raise OptionError(f"activations={activations!r}; give a list of names" + nearest(activations, ACTIVATIONS))
    for name in activations:
        if name not in ACTIVATIONS:
            raise OptionError(f"unknown activation {name!r}" + nearest(name, ACTIVATIONS))
    layers = stackable_layers(trace, "decomposition_errors", "all")
    errors = [[_errors(layer, name) for name in activations] for layer in layers]
    return DecompositionErrors(
        trace.model,
        tuple(layer.name for layer in layers),
        tuple(layer.kind for layer in layers),
        tuple(activations),
        tuple(tuple(difference for difference, _ in row) for row in errors),
        tuple(tuple(relative for _, relative in row) for row in errors),
    )


def text_table(errors: Mapping[str, DecompositionErrors]) -> str:
    """Return an aligned table of the differences of several models: a line for each layer, a column for each f."""
    activations = _shared_activations(errors)
    lines = [("model", "layer", "mixer", *activations)]
    for model, measured in errors.items():
        for layer, kind, row in zip(measured.layers, measured.kinds, measured.difference, strict=True):
            lines.append((model, layer, kind, *("-" if error is None else f"{error:.2g}" for error in row)))
    table = aligned(lines, right=range(3, len(lines[0])))
    return f"{table}\n\n{DEFINITION} (LaTIM Fig. 4); -: no activation to split"


def plot(errors: Mapping[str, DecompositionErrors]) -> "Figure":
    """Draw the differences of several models over their layers, a panel for each model and a line for each f.

    Models without an activation to split are left out, unless all are.

    Raises `MissingExtraError` if matplotlib is missing.
    """
    activations = _shared_activations(errors)
    split = {
        model: measured for model, measured in errors.items() if any(None not in row for row in measured.difference)
    }
    series = {
        model: {name: [row[index] for row in measured.difference] for index, name in enumerate(activations)}
        for model, measured in (split or errors).items()
    }
    return plots.by_layer(series, title="decomposition error", label="mean |y - decomposition|")


def write(errors: Mapping[str, DecompositionErrors], out: Path) -> None:
    """Write the picture and the numbers of several models into a folder, which is created if it does not exist.

    Raises `ResultFileError` if they cannot be written, and `MissingExtraError` if matplotlib is missing.
    """
    numbers = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "difference": DEFINITION,
        "relative": RELATIVE,
        "models": {name: measured.to_dict() for name, measured in errors.items()},
    }
    figure = plot(errors)
    try:
        out.mkdir(parents=True, exist_ok=True)
        figure.savefig(out / PICTURE)
        (out / NUMBERS).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResultFileError(f"Cannot write to {out}: {error.strerror or error}. Name another folder.") from error


def _errors(layer: Layer, activation: str) -> tuple[float, float] | tuple[None, None]:
    """Return the mean absolute and the relative error of a layer, None for one without an activation to split."""
    op = only_port(layer)
    try:
        missed = op.decomposed_output(activation) - layer.output
    except UncoveredError:
        return None, None
    output = layer.output if layer.mask is None else layer.output * layer.mask.unsqueeze(-1)
    missed = missed if layer.mask is None else missed * layer.mask.unsqueeze(-1)
    count = layer.output.shape[:2].numel() if layer.mask is None else int(layer.mask.sum())
    mean = missed.abs().sum(dtype=torch.float64) / (count * layer.output.shape[2])
    size = _norms(output).clamp_min(torch.finfo(output.dtype).tiny)
    return float(mean), float((_norms(missed) / size).max())


def _norms(vectors: Tensor) -> Tensor:
    return vectors.flatten(1).norm(dim=1)


def _shared_activations(errors: Mapping[str, DecompositionErrors]) -> tuple[str, ...]:
    kinds = {measured.activations for measured in errors.values()}
    if len(kinds) != 1:
        raise InputError("Give the decomposition errors of at least one model, all with the same activations.")
    return next(iter(kinds))
