"""`attribution`: attention maps weighed by the gradient of a class or token, composed like a rollout."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.attribution import Attribution
from unilinattn.memory import reserved
from unilinattn.methods.costs import Estimate, carried_cost, composed_cost, estimated, map_cost
from unilinattn.methods.maps import (
    ONE_ROW,
    added,
    attention_map,
    blank_padding,
    carried,
    composed,
    map_bytes,
    unit_rows,
)
from unilinattn.methods.options import AttributionOptions
from unilinattn.methods.results import labelled, room
from unilinattn.methods.selection import composable_steps, layers_from, query_rows
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.trace import Layer, Logit, Target, Trace

Weights = dict[str, Float[Tensor, "batch query"]]
Steps = Sequence[tuple[Layer, ...]]


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return what `attribution` takes beside its gradients: a rollout's share, or all maps where each row has its own.

    The gradients run the model forward and backward; what that takes is the model's own.
    """
    chosen = AttributionOptions.of("attribution", options)
    layers = layers_from(trace, "attribution", chosen.start_layer)
    composable_steps(trace, "attribution", layers)
    if target is not None:
        return estimated("attribution", layers, target, chosen, lambda layer: carried_cost(layer, chosen))
    if _one_gradient(trace, chosen.logit):
        held = map_bytes(layers[0])
        return estimated("attribution", layers, None, chosen, lambda layer: composed_cost(layer, chosen), held=held)

    def of(layer: Layer) -> tuple[int, int]:
        size, operations = carried_cost(layer, chosen, known=not chosen.is_linear)
        filling, once = (0, 0) if chosen.is_linear else map_cost(layer, chosen)
        return max(size, filling), once + layer.output.shape[1] * operations

    held = 0 if chosen.is_linear else sum(map(map_bytes, layers))
    return estimated("attribution", layers, None, chosen, of, held=held)


@register_method("attribution", cost=cost)
def attribution(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Mamba-Attribution: rho = B_n ... B_1 with B_ij = delta_ij + (g_i abar_ij)^+ (HMA ACL Eq. 24).

    abar is the mean map; g_i the mean over channels of d logit / d y'_i, y' the input of the output projection: the
    model's own gradient, not the frozen one. The logit is the model's prediction at the target, or what the option
    `logit` says. Without a target each row i takes the gradient of the logit at position i, which runs the model
    forward and backward once a token; a model with one vector of logits a sequence, or a function as `logit`, has
    one gradient for all rows. Scores: (batch, query, key), without `query` for a target.

    Options: `AttributionOptions`. Raises `OptionError` for options that do not exist, `InputError` for a model
    without logits, `UncoveredError` where layers are on different streams.
    """
    chosen = AttributionOptions.of("attribution", options)
    layers = layers_from(trace, "attribution", chosen.start_layer)
    steps = composable_steps(trace, "attribution", layers)
    rows = query_rows(trace, layers[0], target)
    rho = room("attribution", layers, target)
    if target is not None:
        rho = _row(trace, steps, chosen, rows, next(gradient_weights(trace, layers, [target], chosen.logit)), {})
    elif _one_gradient(trace, chosen.logit):
        weights = next(gradient_weights(trace, layers, [-1], chosen.logit))
        rho.scatter_(2, rows.unsqueeze(-1), 1.0)
        for together in progress(steps, "attribution"):
            rho = composed(rho, trace, together, chosen, weights)
    else:
        _row_by_row(rho, trace, steps, chosen, layers)
    blank_padding(rho, trace, layers[0], rows)
    rho = rho if target is None else rho.squeeze(1)
    return labelled(trace, "attribution", layers, rho, options=chosen, target=target, scope=chosen.scope)


def gradient_weights(
    trace: Trace, layers: Sequence[Layer], targets: Sequence[Target], logit: Logit
) -> Iterator[Weights]:
    """Yield g_i of each layer for each target: the mean over channels of the gradient before the output projection."""
    place = {layer.name: at for at, layer in enumerate(trace.layers)}
    pulls = {layer.name: layer.pullback() for layer in layers}
    for found in trace.gradients(targets, logit):
        yield {name: pull(found[place[name]]).mean(-1) for name, pull in pulls.items()}


def _one_gradient(trace: Trace, logit: Logit) -> bool:
    """Whether the logit is the same for every query: a function of the whole output, or of one vector a sequence."""
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
    for together in progress(steps[::-1], "attribution"):
        below = added(
            carried(
                rho,
                trace,
                layer,
                options,
                target=target,
                weight=weights[layer.name],
                attention=attention.get(layer.name),
            )
            for layer in together
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
    batch, length = rho.shape[:2]
    counts = torch.full((batch,), length) if first.mask is None else first.mask.sum(1).cpu()
    # A shorter sequence repeats its last row while the longer ones go on.
    targets = [torch.clamp(counts - 1, max=nth) for nth in range(int(counts.max()))]
    # Each row weighs the maps anew, so all of them are kept.
    known = () if options.is_linear else layers
    what = f"attribution without a target keeps the maps of {len(known)} layers, which together"
    with reserved(sum(map(map_bytes, known)), what, ONE_ROW):
        attention = {layer.name: attention_map(layer, options) for layer in known}
        found = zip(targets, gradient_weights(trace, layers, targets, options.logit), strict=True)
        for own, weights in progress(found, "attribution", total=len(targets)):
            target = query_rows(trace, first, own)
            row = _row(trace, steps, options, target, weights, attention)
            rho.scatter_(1, target.unsqueeze(-1).expand(-1, -1, length), row)
