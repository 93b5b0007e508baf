"""`attribution`: attention maps weighted by the gradient of a class or token logit, composed like a rollout."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
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
from unilinattn.methods.options import Composed, MapOptions, ScalarOptions
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
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

Weights = dict[str, Weight]
Steps = Sequence[tuple[Layer, ...]]


class AttributionOptions(ScalarOptions, MapOptions, Composed):
    """Options of `attribution`."""

    sign: Literal["keep", "clamp", "abs"] = Field(
        "clamp", description="negative products of gradient and map kept, set to zero, or made positive"
    )
    gradient: Literal["mean", "per-head"] = Field(
        "mean",
        description="'mean' multiplies the mean of g over all channels by the mean map; 'per-head' multiplies the mean "
        "of g over a head's channels by the head's map, applies `sign`, and then takes the mean over heads, instead of "
        "`heads`",
    )
    gradient_axis: Literal["row", "key"] = Field(
        "row", description="g of the query or of the key: g_i abar_ij (Eq. 24) or abar_ij g_j"
    )
    variant: Literal["formula", "published-code"] = Field(
        "formula",
        description="'published-code' takes g from the residual stream after the layer as the code of the paper does: "
        "set to zero where negative, the maximum over channels, rescaled to 0..1 over the sequence, by key",
    )

    @model_validator(mode="before")
    @classmethod
    def _published(cls, given: Any) -> Any:
        return {"gradient_axis": "key", **given} if given.get("variant") == "published-code" else given

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        if self.variant == "published-code" and (self.gradient, self.gradient_axis) != ("mean", "key"):
            raise ValueError("variant='published-code' has its own gradient, by key; leave gradient, gradient_axis out")
        if self.gradient == "per-head" and self.heads != "mean":
            raise ValueError("gradient='per-head' takes the mean over heads after the product; leave heads out")
        return self

    @property
    def by_head(self) -> bool:
        """Whether each head has its gradient, so that the maps of all heads are needed."""
        return self.gradient == "per-head"


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `attribution`: gradients, and a rollout's maps, or all maps if each row has its own gradient.

    A gradient is a forward and a backward pass of the model, block by block (see `Trace.gradient`).
    """
    chosen = AttributionOptions.of("attribution", options)
    layers = layers_from(trace, "attribution", chosen.start_layer)
    composable_steps(trace, "attribution", layers)
    weights = sum(layer.output.shape[0] * layer.output.shape[1] * layer.output.element_size() for layer in layers)
    one_map, maps = target is None and one_scalar(trace, chosen.logit), 0
    if one_map:
        maps = map_bytes(layers[0])
    elif target is None and not (chosen.is_linear or chosen.by_head):
        maps = sum(map(map_bytes, layers))

    def of(layer: Layer) -> int:
        if chosen.by_head:
            return head_cost(layer, chosen)
        if one_map:
            return postprocess_cost(layer, chosen)
        if target is not None or chosen.is_linear:
            return vecmat_cost(layer, chosen)
        return max(vecmat_cost(layer, chosen, computed=True), map_cost(layer, chosen))

    passed = LayerCost("gradients", "forward and backward pass", trace.gradient_cost(chosen.logit))
    return estimated("attribution", layers, target, chosen, of, held=maps + weights, before=[passed])


@register_method("attribution", options=AttributionOptions, cost=cost, needs=("logit", "one stream", "gradients"))
def attribution(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Mamba-Attribution: rho = B_n ... B_1 with B_ij = delta_ij + (g_i abar_ij)^+ (HMA ACL Eq. 24).

    abar is the mean map, and g_i the mean over channels of d logit / d y'_i, where y' is the input of the output
    projection: the gradient of the model itself, not of the frozen operators. The logit is the model's prediction at
    the target, or that of the option `logit`. Without a target row i takes the gradient of the logit at position i:
    a forward and a backward pass of the model for each token. A model with one vector of logits for each sequence, or
    a function as `logit`, has one gradient for all rows. Scores: (batch, query, key), without `query` for a target.
    The options `gradient`, `gradient_axis` and `variant` change g as their descriptions say; `contribution` replaces
    the product g_i abar_ij by exact vectors.

    Options: `AttributionOptions`. Raises `OptionError` for an unknown option or value, `InputError` for a model
    without logits, and `UncoveredError` if layers are on different streams.
    """
    chosen = AttributionOptions.of("attribution", options)
    layers = layers_from(trace, "attribution", chosen.start_layer)
    steps = composable_steps(trace, "attribution", layers)
    rows = query_rows(trace, layers[0], target)
    product = ScaledProduct(allocate_scores("attribution", layers, target))
    if target is not None:
        product = _row(trace, steps, chosen, rows, next(gradient_weights(trace, layers, [target], chosen)), {})
    elif one_scalar(trace, chosen.logit):
        weights = next(gradient_weights(trace, layers, [-1], chosen))
        product.values.scatter_(2, rows.unsqueeze(-1), 1.0)
        for step in progress(steps, "attribution"):
            product.add_maps(partial(step_blocks, trace, step, chosen, weights))
    else:
        _row_by_row(product, trace, steps, chosen, layers)
    rho, scale = finished(product, trace, layers[0], target)
    rho = rho if target is None else rho.squeeze(1)
    return make_result(
        trace, "attribution", layers, rho, options=chosen, target=target, scope=chosen.scope, extras=scale
    )


def gradient_weights(
    trace: Trace, layers: Sequence[Layer], targets: Sequence[Target], options: AttributionOptions
) -> Iterator[Weights]:
    """Yield the factors of each layer's map for each target, from the model's gradient at the layer's output."""
    place = {layer.name: at for at, layer in enumerate(trace.layers)}
    pulls: dict[str, Callable[[Tensor], Tensor]] = {}
    for gradients in trace.gradients(targets, options.logit):
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
    options: AttributionOptions,
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
    options: AttributionOptions,
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
