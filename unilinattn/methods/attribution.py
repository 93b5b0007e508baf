"""`attribution`: attention maps weighted by the gradient of a class or token logit, composed like a rollout."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.memory import reserved
from unilinattn.methods.costs import estimated, head_cost, map_cost, postprocess_cost, vecmat_cost
from unilinattn.methods.maps import (
    ONE_ROW,
    Weight,
    attention_map,
    map_bytes,
    step_blocks,
    sum_on_first,
    unit_rows,
    vecmat,
)
from unilinattn.methods.results import allocate_scores, make_result
from unilinattn.methods.scaled import ScaledProduct, finished
from unilinattn.methods.selection import (
    composable_steps,
    every_position,
    layers_from,
    one_scalar,
    only_port,
    query_rows,
)
from unilinattn.options import weighted
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

Weights = dict[str, Weight]
Steps = Sequence[tuple[Layer, ...]]


def cost(trace: Trace, options: weighted.Attribution, *, target: Target | None = None) -> Estimate:
    """Return the cost of `attribution`: gradients, and a rollout's maps, or all maps if each row has its own gradient.

    A gradient is a forward and a backward pass of the model, block by block (see `Trace.gradient`).
    """
    layers = layers_from(trace, "attribution", options.start_layer)
    composable_steps(trace, "attribution", layers)
    weights = sum(layer.output.shape[0] * layer.output.shape[1] * layer.output.element_size() for layer in layers)
    one_map, maps = target is None and one_scalar(trace, options.scalar), 0
    if one_map:
        maps = map_bytes(layers[0])
    elif target is None and not (options.is_linear or options.by_head):
        maps = sum(map(map_bytes, layers))

    def of(layer: Layer) -> int:
        if options.by_head:
            return head_cost(layer, options)
        if one_map:
            return postprocess_cost(layer, options)
        if target is not None or options.is_linear:
            return vecmat_cost(layer, options)
        return max(vecmat_cost(layer, options, computed=True), map_cost(layer, options))

    passed = LayerCost("gradients", "forward and backward pass", trace.gradient_cost(options.scalar))
    return estimated("attribution", layers, target, options, of, held=maps + weights, before=[passed])


@register_method(weighted.Attribution, cost=cost)
def attribution(trace: Trace, options: weighted.Attribution, *, target: Target | None = None) -> Attribution:
    """Run `Attribution`."""
    layers = layers_from(trace, "attribution", options.start_layer)
    steps = composable_steps(trace, "attribution", layers)
    rows = query_rows(trace, layers[0], target)
    product = ScaledProduct(allocate_scores("attribution", layers, target))
    if target is not None:
        product = _row(trace, steps, options, rows, next(gradient_weights(trace, layers, [target], options)), {})
    elif one_scalar(trace, options.scalar):
        weights = next(gradient_weights(trace, layers, [-1], options))
        product.values.scatter_(2, rows.unsqueeze(-1), 1.0)
        for step in progress(steps, "attribution"):
            product.add_maps(partial(step_blocks, trace, step, options, weights))
    else:
        _row_by_row(product, trace, steps, options, layers)
    rho, scale = finished(product, trace, layers[0], target)
    rho = rho if target is None else rho.squeeze(1)
    return make_result(
        trace, "attribution", layers, rho, options=options, target=target, scope=options.scope, extras=scale
    )


def gradient_weights(
    trace: Trace, layers: Sequence[Layer], targets: Sequence[Target], options: weighted.Attribution
) -> Iterator[Weights]:
    """Yield the factors of each layer's map for each target, from the model's gradient at the layer's output."""
    place = {layer.name: at for at, layer in enumerate(trace.layers)}
    pulls: dict[str, Callable[[Tensor], Tensor]] = {}
    for gradients in trace.gradients(targets, options.scalar):
        weights = {}
        for layer in layers:
            gradient = gradients[place[layer.name]]
            if options.variant == "published-code":
                weights[layer.name] = Weight(_published(gradient, layer), "key")
                continue
            pull = pulls.get(layer.name) or layer.pullback()
            inner = pull(gradient)
            values = _by_head(inner, layer, options.scope) if options.by_head else inner.mean(-1)
            weights[layer.name] = Weight(values, options.gradient_axis)
            if len(targets) > 1:
                pulls[layer.name] = pull
        yield weights


def _by_head(inner: Float[Tensor, "batch query inner"], layer: Layer, scope: str) -> Float[Tensor, "batch head query"]:
    """Return the mean over the channels of each head; a head's channels are consecutive."""
    heads, width = only_port(layer).num_heads(scope), inner.shape[-1]
    if width % heads:
        raise UncoveredError(
            f"attribution: the output projection of {layer.name} reads {width} channels, which are no whole number for "
            f"each of {heads} heads; use gradient='mean'."
        )
    return inner.unflatten(-1, (heads, -1)).mean(-1).transpose(1, 2)


def _published(gradient: Float[Tensor, "batch query out"], layer: Layer) -> Float[Tensor, "batch query"]:
    """Return the maximum over channels of the positive gradient, rescaled to 0..1 over the real tokens."""
    largest = gradient.clamp_min(0).amax(-1)
    real = torch.ones_like(largest, dtype=torch.bool) if layer.mask is None else layer.mask
    low = largest.masked_fill(~real, torch.inf).amin(1, keepdim=True)
    spread = largest.masked_fill(~real, 0).amax(1, keepdim=True) - low
    return (largest - low).masked_fill(~real, 0) / spread.masked_fill(spread == 0, 1)


def _row(
    trace: Trace,
    steps: Steps,
    options: weighted.Attribution,
    target: Int[Tensor, "batch 1"],
    weights: Weights,
    attention: dict[str, Float[Tensor, "batch query key"]],
) -> ScaledProduct:
    def through(step: Sequence[Layer], row: Float[Tensor, "batch 1 query"]) -> Float[Tensor, "batch 1 key"]:
        below = sum_on_first(
            vecmat(
                row,
                trace,
                layer,
                options,
                target=target,
                weight=weights[layer.name],
                attention=attention.get(layer.name),
            )
            for layer in step
        )
        return row + below.to(row)

    product = ScaledProduct(unit_rows(target, steps[0][0]))
    for step in progress(steps[::-1], "attribution"):
        product.left_multiply(partial(through, step))
    return product


def _row_by_row(
    product: ScaledProduct,
    trace: Trace,
    steps: Steps,
    options: weighted.Attribution,
    layers: Sequence[Layer],
) -> None:
    first, targets = layers[0], every_position(trace)
    # Each row weights the maps by another gradient, so all maps are kept; those of all heads are computed again.
    mapped = () if options.is_linear or options.by_head else layers
    what = f"attribution without a target keeps the maps of {len(mapped)} layers, which together"
    with reserved(sum(map(map_bytes, mapped)), what, ONE_ROW):
        attention = {layer.name: attention_map(layer, options) for layer in mapped}
        rows = zip(targets, gradient_weights(trace, layers, targets, options), strict=True)
        for position, weights in progress(rows, "attribution", total=len(targets)):
            target = query_rows(trace, first, position)
            product.write(target, _row(trace, steps, options, target, weights, attention))
