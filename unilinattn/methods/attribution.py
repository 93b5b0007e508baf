"""`attribution`: attention maps weighted by the gradient of a class or token logit, composed like a rollout."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.memory import reserved
from unilinattn.options import weighted
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.scoring.composition import composition_from, weighted_cost, weighted_rollout
from unilinattn.scoring.maps import (
    ONE_ROW,
    Weight,
    attention_map,
    head_cost,
    map_blocks,
    map_bytes,
    map_cost,
    postprocess_cost,
    vecmat,
    vecmat_cost,
)
from unilinattn.scoring.published import CodeRun, code_cost, token_weights
from unilinattn.scoring.scaled import Blocks
from unilinattn.scoring.selection import mixing_operator, one_scalar
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

Weights = dict[str, Weight]


def cost(trace: Trace, options: weighted.Attribution, *, target: Target | None = None) -> Estimate:
    """Return the cost of `attribution`: gradients, and a rollout's maps, or all maps if each row has its own gradient.

    A gradient is a forward and a backward pass of the model, block by block (see `Trace.gradient`).
    """
    if options.is_published:
        return code_cost(trace, options, target, options.scalar)
    scoring = composition_from(trace, options, target)
    resident = sum(prod(layer.output.shape[:2]) * layer.output.element_size() for layer in scoring.layers)
    one_map = target is None and one_scalar(trace, options.scalar)
    if one_map:
        resident += scoring.map_bytes
    elif target is None and not (options.is_linear or options.by_head):
        resident += sum(map(map_bytes, scoring.layers))

    def of(layer: Layer) -> int:
        if options.by_head:
            return head_cost(layer, options)
        if one_map:
            return postprocess_cost(layer, options)
        if target is not None or options.is_linear:
            return vecmat_cost(layer, options)
        return max(vecmat_cost(layer, options, computed=True), map_cost(layer, options))

    return weighted_cost(scoring, of, resident=resident)


@register_method(weighted.Attribution, cost=cost)
def attribution(trace: Trace, options: weighted.Attribution, *, target: Target | None = None) -> Attribution:
    """Run `Attribution`."""
    if options.is_published:
        return _by_code(trace, options, target)
    scoring = composition_from(trace, options, target)
    # Each row weights the maps by another gradient, so all maps are kept; those of all heads are computed again.
    each_row = target is None and not one_scalar(trace, options.scalar)
    mapped = scoring.layers if each_row and not (options.is_linear or options.by_head) else ()
    what = f"attribution without a target keeps the maps of {len(mapped)} layers, which together"
    with reserved(sum(map(map_bytes, mapped)), what, ONE_ROW):
        attention = {layer.name: attention_map(layer, options) for layer in mapped}

        def multiply(weights: Weights, positions: Tensor, row: Tensor, layer: Layer) -> Tensor:
            weight, map_ = weights[layer.name], attention.get(layer.name)
            target = positions.expand(len(row), -1)
            return vecmat(row, trace, layer, options, target=target, weight=weight, attention=map_)

        def blocks(weights: Weights, layer: Layer) -> Blocks:
            return map_blocks(trace, layer, options, weight=weights[layer.name])

        weigh = partial(gradient_weights, trace, scoring.layers, options=options)
        return weighted_rollout(scoring, options.scope, weigh, multiply, blocks)


def gradient_weights(
    trace: Trace, layers: Sequence[Layer], targets: Sequence[Target], options: weighted.Attribution
) -> Iterator[Weights]:
    """Yield the factors of each layer's map for each target, from the model's gradient at the layer's output."""
    indices = {layer.name: index for index, layer in enumerate(trace.layers)}
    pulls: dict[str, Callable[[Tensor], Tensor]] = {}
    for gradients in trace.gradients(targets, options.scalar):
        weights = {}
        for layer in layers:
            gradient = gradients[indices[layer.name]]
            pull = pulls.get(layer.name) or layer.pullback()
            inner = pull(gradient)
            values = _by_head(inner, layer, options.scope) if options.by_head else inner.mean(-1)
            weights[layer.name] = Weight(values, options.gradient_axis)
            if len(targets) > 1:
                pulls[layer.name] = pull
        yield weights


def _by_head(inner: Float[Tensor, "batch query inner"], layer: Layer, scope: str) -> Float[Tensor, "batch head query"]:
    """Return the mean over the channels of each head; a head's channels are consecutive."""
    heads, width = mixing_operator(layer).num_heads(scope), inner.shape[-1]
    if width % heads:
        raise UncoveredError(
            f"attribution: the output projection of {layer.name} reads {width} channels, which are no whole number for "
            f"each of {heads} heads; use gradient='mean'."
        )
    return inner.unflatten(-1, (heads, -1)).mean(-1).transpose(1, 2)


def _by_code(trace: Trace, options: weighted.Attribution, target: Target | None) -> Attribution:
    """Return the scores of the released code: its rollout of rows that are weighted by key."""
    code = CodeRun.of(trace, options, target, options.scalar)
    gradients = trace.gradient(-1 if target is None else target, options.scalar)
    code.require_cls(gradients[-1])
    by_name = {layer.name: gradient for layer, gradient in zip(trace.layers, gradients, strict=True)}
    return code.result(
        code.composed(lambda layer: code.row(layer, rescaled=True) * token_weights(by_name[layer.name], layer))
    )
