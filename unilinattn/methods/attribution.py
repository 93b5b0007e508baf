"""`attribution`: attention maps weighted by the gradient of a class or token logit, composed like a rollout."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from unilinattn.memory import reserved
from unilinattn.methods.costs import composed_cost, estimated, map_cost, vecmat_cost
from unilinattn.methods.maps import (
    ONE_ROW,
    attention_map,
    blank_padding,
    composed,
    map_bytes,
    sum_on_first,
    unit_rows,
    vecmat,
)
from unilinattn.methods.options import Composed, MapOptions, ScalarOptions
from unilinattn.methods.results import allocate_scores, make_result
from unilinattn.methods.selection import composable_steps, every_position, layers_from, query_rows
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.logits import Logit
from unilinattn.tracing.trace import Target, Trace

Weights = dict[str, Float[Tensor, "batch query"]]
Steps = Sequence[tuple[Layer, ...]]


class AttributionOptions(ScalarOptions, MapOptions, Composed):
    """Options of `attribution`."""

    sign: Literal["keep", "clamp", "abs"] = Field(
        "clamp", description="negative products of gradient and map kept, set to zero, or made positive"
    )


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `attribution`: gradients, and a rollout's maps, or all maps if each row has its own gradient.

    A gradient is a forward and a backward pass of the model, block by block (see `Trace.gradient`).
    """
    chosen = AttributionOptions.of("attribution", options)
    layers = layers_from(trace, "attribution", chosen.start_layer)
    composable_steps(trace, "attribution", layers)
    gradient = trace.gradient_cost(chosen.logit)
    maps, passes = 0, 1
    weights = sum(layer.output.shape[0] * layer.output.shape[1] * layer.output.element_size() for layer in layers)
    if target is not None:

        def of(layer: Layer) -> tuple[int, int]:
            return vecmat_cost(layer, chosen)
    elif has_one_gradient(trace, chosen.logit):
        maps = map_bytes(layers[0])

        def of(layer: Layer) -> tuple[int, int]:
            return composed_cost(layer, chosen)
    else:
        maps, passes = 0 if chosen.is_linear else sum(map(map_bytes, layers)), layers[0].output.shape[1]

        def of(layer: Layer) -> tuple[int, int]:
            size, operations = vecmat_cost(layer, chosen, known=not chosen.is_linear)
            filling, once = (0, 0) if chosen.is_linear else map_cost(layer, chosen)
            return max(size, filling), once + layer.output.shape[1] * operations

    passed = LayerCost("gradients", "forward and backward pass", gradient.bytes, passes * gradient.operations)
    return estimated("attribution", layers, target, chosen, of, held=maps + weights, before=[passed])


@register_method("attribution", options=AttributionOptions, cost=cost)
def attribution(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Mamba-Attribution: rho = B_n ... B_1 with B_ij = delta_ij + (g_i abar_ij)^+ (HMA ACL Eq. 24).

    abar is the mean map, and g_i the mean over channels of d logit / d y'_i, where y' is the input of the output
    projection: the gradient of the model itself, not of the frozen operators. The logit is the model's prediction at
    the target, or that of the option `logit`. Without a target row i takes the gradient of the logit at position i:
    a forward and a backward pass of the model for each token. A model with one vector of logits for each sequence, or
    a function as `logit`, has one gradient for all rows. Scores: (batch, query, key), without `query` for a target.

    Options: `AttributionOptions`. Raises `OptionError` for an unknown option or value, `InputError` for a model
    without logits, and `UncoveredError` if layers are on different streams.
    """
    chosen = AttributionOptions.of("attribution", options)
    layers = layers_from(trace, "attribution", chosen.start_layer)
    steps = composable_steps(trace, "attribution", layers)
    rows = query_rows(trace, layers[0], target)
    rho = allocate_scores("attribution", layers, target)
    if target is not None:
        rho = _row(trace, steps, chosen, rows, next(gradient_weights(trace, layers, [target], chosen.logit)), {})
    elif has_one_gradient(trace, chosen.logit):
        weights = next(gradient_weights(trace, layers, [-1], chosen.logit))
        rho.scatter_(2, rows.unsqueeze(-1), 1.0)
        for step in progress(steps, "attribution"):
            rho = composed(rho, trace, step, chosen, weights)
    else:
        _row_by_row(rho, trace, steps, chosen, layers)
    blank_padding(rho, trace, layers[0], rows)
    rho = rho if target is None else rho.squeeze(1)
    return make_result(trace, "attribution", layers, rho, options=chosen, target=target, scope=chosen.scope)


def gradient_weights(
    trace: Trace, layers: Sequence[Layer], targets: Sequence[Target], logit: Logit
) -> Iterator[Weights]:
    """Yield g_i of each layer for each target: the mean over channels of the gradient before the output projection."""
    place = {layer.name: at for at, layer in enumerate(trace.layers)}
    pulls: dict[str, Callable[[Tensor], Tensor]] = {}
    for gradients in trace.gradients(targets, logit):
        weights = {}
        for layer in layers:
            pull = pulls.get(layer.name) or layer.pullback()
            weights[layer.name] = pull(gradients[place[layer.name]]).mean(-1)
            if len(targets) > 1:
                pulls[layer.name] = pull
        yield weights


def has_one_gradient(trace: Trace, logit: Logit) -> bool:
    """Whether every query has the same logit: a function of the output, or a class logit of the whole sequence."""
    logits = getattr(trace.output, "logits", None)
    return callable(logit) or (logits is not None and logits.ndim == 2)


def _row(
    trace: Trace,
    steps: Steps,
    options: AttributionOptions,
    target: Int[Tensor, "batch 1"],
    weights: Weights,
    attention: dict[str, Float[Tensor, "batch query key"]],
) -> Float[Tensor, "batch 1 key"]:
    rho = unit_rows(target, steps[0][0])
    for step in progress(steps[::-1], "attribution"):
        below = sum_on_first(
            vecmat(
                rho,
                trace,
                layer,
                options,
                target=target,
                weight=weights[layer.name],
                attention=attention.get(layer.name),
            )
            for layer in step
        )
        rho = rho + below.to(rho)
    return rho


def _row_by_row(
    rho: Float[Tensor, "batch query key"],
    trace: Trace,
    steps: Steps,
    options: AttributionOptions,
    layers: Sequence[Layer],
) -> None:
    first = layers[0]
    length, targets = rho.shape[2], every_position(trace)
    # Each row weights the maps by another gradient, so all maps are kept.
    mapped = () if options.is_linear else layers
    what = f"attribution without a target keeps the maps of {len(mapped)} layers, which together"
    with reserved(sum(map(map_bytes, mapped)), what, ONE_ROW):
        attention = {layer.name: attention_map(layer, options) for layer in mapped}
        rows = zip(targets, gradient_weights(trace, layers, targets, options.logit), strict=True)
        for position, weights in progress(rows, "attribution", total=len(targets)):
            target = query_rows(trace, first, position)
            row = _row(trace, steps, options, target, weights, attention)
            rho.scatter_(1, target.unsqueeze(-1).expand(-1, -1, length), row)
