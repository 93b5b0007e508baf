"""Checks of the methods that `benchmarks.whole_models` times."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import unilinattn as ula
from benchmarks import plain
from benchmarks.checks import LENGTH, TOLERANCE
from benchmarks.machine import as_for_large_inputs
from benchmarks.million_tokens import forward_map
from benchmarks.published import SHAPES, tokens
from unilinattn.operator.stages import Matrix, walk
from unilinattn.testing import relative_error
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace


def checked(model: str, method: str) -> dict[str, Any]:
    """Check a method for the last token of a narrow model: against `DEFINITIONS`, or by its completeness gap.

    Raises `ArithmeticError` for an error above `TOLERANCE`.
    """
    host = SHAPES[model].build(narrow=True)
    trace = ula.trace(host, tokens(host, LENGTH), progress=False)
    with as_for_large_inputs("cpu"):
        result = ula.explain(trace, method=method, target=-1, progress=False)
    gap = result.completeness_gap
    error = _error(method, result.scores, DEFINITIONS[method](trace)) if method in DEFINITIONS else gap
    if error is None:
        raise NotImplementedError(f"{method} has neither a definition in DEFINITIONS nor a completeness gap")
    _require(error, f"{method} of {model}")
    return {"model": model, "method": method, "error": float(f"{error:.1e}")}


def row_sum_error(trace: Trace, row: Tensor) -> float:
    """Return the error of the sum of a rollout's last row against the product of maps applied to a vector of ones.

    Raises `ArithmeticError` above `TOLERANCE`.
    """
    vector = torch.ones(1, row.shape[-1])
    for step in trace.steps:
        vector = vector + sum(forward_map(layer, vector) for layer in step.layers)
    error = abs(float(row.double().sum() / vector[0, -1].double()) - 1)
    _require(error, f"the row sum of a rollout of {trace.model}")
    return error


def _raw(trace: Trace) -> Tensor:
    return torch.stack([plain.mean_map(layer.operator)[:, -1] for layer in trace.layers])


def _rollout(trace: Trace) -> Tensor:
    return _composed(trace, lambda layer: plain.mean_map(layer.operator)[0])


def _attribution(trace: Trace) -> Tensor:
    """Weight every map by the host's gradient, pulled back to the input of the output projection."""
    gradients = _gradients(trace)

    def weighted(layer: Layer) -> Tensor:
        matrices = [stage for stage in walk(layer.operator.chains["x"]) if isinstance(stage, Matrix)]
        inner = gradients[layer.name] @ matrices[-1].weight.double()
        return (inner.mean(-1, keepdim=True) * plain.mean_map(layer.operator)[0]).clamp_min(0)

    return _composed(trace, weighted)


def _contribution(trace: Trace) -> Tensor:
    gradients = _gradients(trace)

    def weighted(layer: Layer) -> Tensor:
        return torch.einsum("ijo,io->ij", plain.vectors(layer.operator), gradients[layer.name]).clamp_min(0)

    return _composed(trace, weighted)


def _gradients(trace: Trace) -> dict[str, Tensor]:
    """Return the host's gradient of the last token's largest logit at every layer's output."""
    modules = [layer.module for layer in trace.layers]
    gradients = plain.host_gradients(trace.host, modules, trace.arguments["input_ids"])
    return {layer.name: grad[0].double() for layer, grad in zip(trace.layers, gradients, strict=True)}


def _composed(trace: Trace, mixing: Callable[[Layer], Tensor]) -> Tensor:
    """Multiply the last token's row by I + A of every layer, from the last layer to the first."""
    row = torch.zeros(trace.layers[0].input.shape[1], dtype=torch.float64)
    row[-1] = 1
    for layer in reversed(trace.layers):
        row = row + row @ mixing(layer)
    return row[None]


def _latim(trace: Trace) -> Tensor:
    return torch.stack([plain.vectors(layer.operator)[-1].norm(dim=-1)[None] for layer in trace.layers])


def _alti(trace: Trace) -> Tensor:
    rows = []
    for layer in trace.layers:
        assert layer.residual is not None
        stream = layer.residual[0, -1].double()
        output = stream + layer.multiplier * layer.output[0, -1].double()
        shares = layer.multiplier * plain.vectors(layer.operator)[-1]
        shares[-1] += stream
        gain = (output.abs().sum() - (output - shares).abs().sum(-1)).clamp_min(0)
        rows.append((gain / gain.sum())[None])
    return torch.stack(rows)


DEFINITIONS: Mapping[str, Callable[[Trace], Tensor]] = {
    "raw": _raw,
    "rollout": _rollout,
    "latim": _latim,
    "alti": _alti,
    "attribution": _attribution,
    "contribution": _contribution,
}
"""Plain definitions in float64, for models whose layers follow one another."""


def _error(method: str, got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape, (method, got.shape, expected.shape)
    if method in ("rollout", "attribution", "contribution"):
        # The identity of the residual stream, in the last entry, is larger than the others by orders of magnitude.
        got, expected = got[..., :-1], expected[..., :-1]
    if not expected.any():
        raise ArithmeticError(f"{method}: all scores but the target's own are zero, so that nothing is compared")
    return float(relative_error(got.double()[None], expected[None]))


def _require(error: float, what: str) -> None:
    if not error <= TOLERANCE:
        raise ArithmeticError(f"{what} is off its definition by {error:.1e} (relative)")
