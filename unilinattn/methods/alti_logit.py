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
from unilinattn.methods.logit import share_cancellation, write_rows
from unilinattn.options import Alti, AltiLogit
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.scoring.base import relative_gap
from unilinattn.scoring.composition import Composition, composition, product_cost
from unilinattn.scoring.maps import ONE_ROW, map_shape, sum_on_first
from unilinattn.scoring.selection import (
    StepRows,
    begins_stream,
    every_position,
    gather_rows,
    layers_from,
    only_port,
    only_target,
    query_rows,
    residual_of,
    stream_errors,
    streams_of,
)
from unilinattn.scoring.vectors import contribution_tiles, shares_cost
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

NAME = "alti_logit"
EXTRAS = ("bias", "remainder", "logit", "gap", "cancellation")
"""Extras of a result, one number for each row."""


def cost(trace: Trace, options: AltiLogit, *, target: Target | None = None) -> Estimate:
    """Return the cost of `alti_logit`: a run of the model, and the map of every step with its product."""
    layers = _layers(trace)
    scoring = composition(trace, options, only_target(trace, target, options.scalar), layers)
    batch, rows, keys = scoring.sizes.values()
    width = layers[0].output.element_size()
    before = LayerCost("frozen run", "forward pass", trace.frozen_cost(rows))
    return product_cost(
        scoring,
        lambda step: shares_cost(step, map_shape(step[0])[1], exact=True),
        # The unembedding of every row, and one row for each number of the extras in float64.
        resident=batch * rows * keys * width + layers[-1].output.numel() * width,
        extras=8 * batch * rows * len(EXTRAS),
        before=[before],
    )


@register_method(AltiLogit, cost=cost)
def alti_logit(trace: Trace, options: AltiLogit, *, target: Target | None = None) -> Attribution:
    """Run `AltiLogit`."""
    layers = _layers(trace)
    errors = stream_errors(trace, layers, NAME)
    scoring = composition(trace, options, only_target(trace, target, options.scalar), layers)
    stream, gradient, extras = _unembedded(scoring)
    scores, biases = _accumulated(scoring, gradient, stream)
    extras["bias"] += biases
    total = scores.double().sum(-1) + extras["bias"] + extras["remainder"]
    extras["gap"] = (total - extras["logit"]).abs()
    extras["cancellation"] = share_cancellation(scores, extras["bias"], extras["logit"])
    _require_complete(trace, layers, scores, extras)
    gap = relative_gap(extras["gap"], extras["logit"])
    return scoring.result(scores, scope="layer", extras=extras, completeness_gap=gap, stream_error=errors)


def _accumulated(
    scoring: Composition[AltiLogit], gradient: Float[Tensor, "batch query out"], above: Float[Tensor, "batch query out"]
) -> tuple[Float[Tensor, "batch row key"], Float[Tensor, "batch row"]]:
    """Return the scores and the part of the layers' biases, from the last step to the first.

    `gradient` is U of each row without a target, and of all positions for a target; `above` is the stream after the
    last sum. What an encoder adds to its stream reaches the logit through the layers that read it: only the steps of
    the last layer's stream add vectors of their own tokens.
    """
    trace, joint, target, scores = scoring.trace, scoring.joint, scoring.target, scoring.allocate()
    slot = joint.slot(trace.target_stream)
    biases = torch.zeros(scores.shape[:2], dtype=torch.float64, device=scores.device)

    def along(vectors: Float[Tensor, "batch query out"]) -> Float[Tensor, "batch query"]:
        return (vectors.to(gradient) * gradient).sum(-1, dtype=torch.float64).to(scores)

    def add(vectors: Float[Tensor, "batch query out"]) -> None:
        """Add vectors of the tokens themselves."""
        tokens = scores[:, :, slot]
        (tokens.diagonal(dim1=1, dim2=2) if target is None else tokens[:, 0]).add_(along(vectors))

    with reserved(scoring.map_bytes + scores.nbytes, f"{NAME}: the map of a step and its product", ONE_ROW):
        for step in progress(joint.steps[::-1], NAME):
            if joint.enter(step, trace.target_stream):
                # The tokens of the last stream go on as others from here.
                add(above)
                above = torch.zeros_like(above)
            written, read = streams_of(trace, step[0])
            stream = residual_of(trace, step[0], NAME)
            factors, added = [layer.multiplier for layer in step], [layer.added for layer in step]
            is_last, rows = written == trace.target_stream, query_rows(trace, step[0])
            if is_last:
                after = sum_on_first([stream, *(f * layer.output for f, layer in zip(factors, added, strict=True))])
                add(above.to(after) - after)
            share = step[0].output.new_zeros(map_shape(step[0]))
            _, residual = mixing(share, StepRows(trace, step, rows.to(share.device)), Alti())
            scores = scores @ joint.whole(step, share, residual).to(scores)
            if not is_last:
                continue
            columns = scores[:, :, joint.slot(read)]
            if target is None:
                for tile in contribution_tiles(added, factors, rows, "exact"):
                    reference = gather_rows(gradient, rows[:, tile.rows])
                    columns[:, tile.rows, tile.cols] += tile.norms("dot", reference=reference)
            for factor, layer in zip(factors, added, strict=True):
                op = only_port(layer)
                if target is not None:
                    pulled = op.inputs[op.ports[0]] * op.adjoint(gradient.to(op.output), port=op.ports[0])
                    columns[:, 0] += factor * pulled.sum(-1).to(scores)
                bias = factor * along(op.bias).double()
                biases += bias if target is None else bias.sum(1, keepdim=True)
            above = stream
        add(above)
    every = joint.rows(None)[:, slot] if target is None else joint.rows(target)
    joint.blank(scores, every)
    return scores, biases


def _unembedded(
    scoring: Composition[AltiLogit],
) -> tuple[Float[Tensor, "batch query out"], Float[Tensor, "batch query out"], dict[str, Float[Tensor, "batch row"]]]:
    """Return the stream after the last sum, U, and the extras without the layers' biases, of one frozen run.

    U is that of the target's logit at every position, or without a target that of each position's own logit there.
    """
    trace, target, scalar, layer = scoring.trace, scoring.target, scoring.options.scalar, scoring.layers[-1]
    targets = every_position(trace) if target is None else [target]
    run = frozen(trace, None if callable(scalar) else targets)
    gradient = torch.zeros_like(layer.output)
    count = layer.output.shape[1] if target is None else 1
    extras = {name: gradient.new_zeros(len(gradient), count, dtype=torch.float64) for name in EXTRAS}
    for position in progress(targets, NAME):
        unembedding = run.unembedding(position, scalar)
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
        residual_of(trace, layer, NAME)
        if layer.stream is None and not begins_stream(trace, layer):
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
    error = relative_gap(extras["gap"], size)
    accepted = max(layer_tolerance(layer.precision) for layer in layers)
    # Written so that a NaN is refused too.
    if trace.mask is None and not error <= accepted:
        raise ExactnessError(
            f"{NAME}: scores and biases miss the logit by {error:.1e} of their size, and {accepted:.0e} is accepted. "
            "The host may add to its stream in a way that its last sum does not show."
        )
