"""`rollout`: the product of the layers' attention maps, each with the residual stream beside it."""

from typing import Any

from unilinattn.attribution import Attribution
from unilinattn.methods.costs import Estimate, carried_cost, composed_cost, estimated
from unilinattn.methods.maps import added, blank_padding, carried, composed, map_bytes
from unilinattn.methods.options import RolloutOptions
from unilinattn.methods.results import labelled, room
from unilinattn.methods.selection import composable_steps, layers_from, query_rows
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.trace import Layer, Target, Trace


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return what `rollout` takes: a second product and blocks of a map, or a row's pass through each layer."""
    chosen = RolloutOptions.of("rollout", options)
    layers = layers_from(trace, "rollout", chosen.start_layer)
    composable_steps(trace, "rollout", layers)

    def of(layer: Layer) -> tuple[int, int]:
        return composed_cost(layer, chosen) if target is None else carried_cost(layer, chosen)

    held = map_bytes(layers[0]) if target is None else 0
    return estimated("rollout", layers, target, chosen, of, held=held)


@register_method("rollout", cost=cost)
def rollout(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Attention rollout: rho = A_n ... A_1 with A_l = I + mean_h alpha_l (HMA ACL Eq. 21-22).

    A step of parallel layers adds up their maps: I + sum_l mean_h alpha_l. Scores: (batch, query, key), without
    `query` for a target; then the row alone goes through the layers, in linear time and without any map while the
    options leave the mean over heads as it is. Options: `RolloutOptions`. Raises `OptionError` for options that do
    not exist, `UncoveredError` where layers are on different streams.

    Also Abnar and Zuidema (2020), who average with the identity and renormalise rows: see `normalize`.
    """
    chosen = RolloutOptions.of("rollout", options)
    layers = layers_from(trace, "rollout", chosen.start_layer)
    steps = composable_steps(trace, "rollout", layers)
    rows = query_rows(trace, layers[0], target)
    rho = room("rollout", layers, target).scatter_(2, rows.unsqueeze(-1), 1.0)
    if target is None:
        for together in progress(steps, "rollout"):
            rho = composed(rho, trace, together, chosen)
    else:
        for together in progress(steps[::-1], "rollout"):
            below = added(carried(rho, trace, layer, chosen, target=rows) for layer in together)
            rho = rho + below.to(rho)
    blank_padding(rho, trace, layers[0], rows)
    rho = rho if target is None else rho.squeeze(1)
    return labelled(trace, "rollout", layers, rho, options=chosen, target=target, scope=chosen.scope)
