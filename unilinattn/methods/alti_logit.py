"""`alti_logit`: the part of a logit that each token adds through each layer, with earlier mixing traced by ALTI."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.call.exactness import layer_tolerance
from unilinattn.errors import ExactnessError, UncoveredError
from unilinattn.frozen.run import frozen
from unilinattn.memory import reserved
from unilinattn.methods.alti import mixing
from unilinattn.methods.composition import product_cost
from unilinattn.methods.costs import estimated
from unilinattn.methods.latim import residual_of, stream_errors
from unilinattn.methods.logit import write_rows
from unilinattn.methods.maps import ONE_ROW, blank_padding, gather_rows, map_bytes, map_shape, sum_on_first
from unilinattn.methods.results import allocate_scores, make_result
from unilinattn.methods.selection import (
    composable_steps,
    every_position,
    layers_from,
    only_port,
    only_target,
    query_rows,
)
from unilinattn.methods.vectors import contribution_tiles, shares_cost
from unilinattn.options import Alti, AltiLogit
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

NAME = "alti_logit"
EXTRAS = ("bias", "remainder", "logit", "gap")
"""Extras of a result, one number for each row."""


def cost(trace: Trace, options: AltiLogit, *, target: Target | None = None) -> Estimate:
    """Return the cost of `alti_logit`: a run of the model, and the map of every step with its product."""
    layers = _layers(trace)
    target = only_target(trace, target, options.scalar)
    batch, queries, keys = map_shape(layers[0])
    rows, width = queries if target is None else 1, layers[0].output.element_size()

    of, resident = product_cost(trace, NAME, layers, target, lambda step: shares_cost(step, queries, exact=True))
    before = LayerCost("frozen run", "forward pass", trace.frozen_cost(rows))
    # The unembedding of every row, and one row for each number of the extras in float64.
    resident += batch * rows * keys * width + layers[0].output.numel() * width
    return estimated(
        options, layers, target, of, resident=resident, extras=8 * batch * rows * len(EXTRAS), before=[before]
    )


@register_method(AltiLogit, cost=cost)
def alti_logit(trace: Trace, options: AltiLogit, *, target: Target | None = None) -> Attribution:
    """Run `AltiLogit`."""
    layers = _layers(trace)
    errors = stream_errors(trace, layers, NAME)
    target = only_target(trace, target, options.scalar)
    stream, gradient, extras = _unembedded(trace, layers[0], target, options)
    scores, biases = _accumulated(trace, options, layers, target, gradient, stream)
    extras["bias"] += biases
    total = scores.double().sum(-1) + extras["bias"] + extras["remainder"]
    extras["gap"] = (total - extras["logit"]).abs()
    _require_complete(trace, layers, scores, extras)
    value = extras["logit"].abs().clamp_min(torch.finfo(torch.float64).tiny)
    return make_result(
        trace,
        options,
        layers,
        scores,
        target=target,
        scope="layer",
        extras=extras,
        completeness_gap=float((extras["gap"] / value).max()),
        stream_error=errors,
    )


def _accumulated(
    trace: Trace,
    options: AltiLogit,
    layers: Sequence[Layer],
    target: Target | None,
    gradient: Float[Tensor, "batch query out"],
    above: Float[Tensor, "batch query out"],
) -> tuple[Float[Tensor, "batch row key"], Float[Tensor, "batch row"]]:
    """Return the scores and the part of the layers' biases, from the last step to the first.

    `gradient` is U of each row without a target, and of all positions for a target; `above` is the stream after the
    last sum.
    """
    rows = query_rows(trace, layers[0])
    scores = allocate_scores(options, layers, target)
    biases = torch.zeros(scores.shape[:2], dtype=torch.float64, device=scores.device)

    def along(vectors: Float[Tensor, "batch query out"]) -> Float[Tensor, "batch query"]:
        return (vectors.to(gradient) * gradient).sum(-1, dtype=torch.float64).to(scores)

    def add(vectors: Float[Tensor, "batch query out"]) -> None:
        """Add vectors of the tokens themselves."""
        (scores.diagonal(dim1=1, dim2=2) if target is None else scores[:, 0]).add_(along(vectors))

    size = map_bytes(layers[0])
    with reserved(size + scores.numel() * scores.element_size(), f"{NAME}: the map of a step and its product", ONE_ROW):
        for step in progress(composable_steps(trace, NAME, layers)[::-1], NAME):
            stream = residual_of(step[0], NAME)
            factors = [layer.multiplier for layer in step]
            after = sum_on_first([stream, *(f * layer.output for f, layer in zip(factors, step, strict=True))])
            add(above.to(after) - after)
            share = step[0].output.new_zeros(map_shape(step[0]))
            mixing(share, trace, step, rows.to(share.device), Alti())
            scores = scores @ share.to(scores)
            if target is None:
                for tile in contribution_tiles(step, factors, rows, "exact"):
                    reference = gather_rows(gradient, rows[:, tile.rows])
                    scores[:, tile.rows, tile.cols] += tile.norms("dot", reference=reference)
            for factor, layer in zip(factors, step, strict=True):
                op = only_port(layer)
                if target is not None:
                    pulled = op.inputs["x"] * op.adjoint(gradient.to(op.output))
                    scores[:, 0] += factor * pulled.sum(-1).to(scores)
                bias = factor * along(op.bias).double()
                biases += bias if target is None else bias.sum(1, keepdim=True)
            above = stream
        add(above)
    blank_padding(scores, trace, layers[0], query_rows(trace, layers[0], target))
    return scores, biases


def _unembedded(
    trace: Trace, layer: Layer, target: Target | None, options: AltiLogit
) -> tuple[Float[Tensor, "batch query out"], Float[Tensor, "batch query out"], dict[str, Float[Tensor, "batch row"]]]:
    """Return the stream after the last sum, U, and the extras without the layers' biases, of one frozen run.

    U is that of the target's logit at every position, or without a target that of each position's own logit there.
    """
    targets = every_position(trace) if target is None else [target]
    run = frozen(trace, None if callable(options.scalar) else targets)
    gradient = torch.zeros_like(layer.output)
    count = layer.output.shape[1] if target is None else 1
    extras = {name: gradient.new_zeros(len(gradient), count, dtype=torch.float64) for name in EXTRAS}
    for position in progress(targets, NAME):
        unembedding = run.unembedding(position, options.scalar)
        if target is None:
            rows = query_rows(trace, layer, position)
            write_rows(gradient, rows.squeeze(1), gather_rows(unembedding.gradient.to(gradient), rows).squeeze(1))
        else:
            rows, gradient = torch.zeros_like(extras["bias"], dtype=torch.long), unembedding.gradient.to(gradient)
        numbers = {"bias": unembedding.bias, "remainder": unembedding.remainder, "logit": unembedding.value}
        for name, values in numbers.items():
            write_rows(extras[name], rows.squeeze(1), values)
    return unembedding.stream, gradient, extras


def _layers(trace: Trace) -> tuple[Layer, ...]:
    """Return all layers; raise `UncoveredError` for one whose residual stream is unknown or inside its module."""
    layers = layers_from(trace, NAME, 0)
    for layer in layers:
        residual_of(layer, NAME)
        if layer.stream is None:
            raise UncoveredError(
                f"{NAME}: the module of {layer.name} contains its residual, so the streams before and after it are "
                "related by more than a sum (a norm after it), and the contributions of the layers to a logit cannot "
                "be told apart at the last of them."
            )
    return layers


def _require_complete(
    trace: Trace, layers: Sequence[Layer], scores: Float[Tensor, "batch row key"], extras: dict[str, Tensor]
) -> None:
    """Raise `ExactnessError` if the scores of an unpadded input miss the logit."""
    size = scores.double().abs().sum(-1) + extras["bias"].abs() + extras["remainder"].abs()
    error = float((extras["gap"] / size.clamp_min(torch.finfo(torch.float64).tiny)).max())
    accepted = max(layer_tolerance(layer.precision) for layer in layers)
    # Written so that a NaN is refused too.
    if trace.mask is None and not error <= accepted:
        raise ExactnessError(
            f"{NAME}: scores and biases miss the logit by {error:.1e} of their size, and {accepted:.0e} is accepted. "
            "The host may add to its stream in a way that its last sum does not show."
        )
