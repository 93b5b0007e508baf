"""`rollout`: the product of the layers' attention maps, each plus the identity for the residual stream."""

from typing import Any

from unilinattn.methods.costs import composed_cost, estimated, vecmat_cost
from unilinattn.methods.maps import blank_padding, composed, map_bytes, sum_on_first, vecmat
from unilinattn.methods.options import Composed, MapOptions
from unilinattn.methods.results import allocate_scores, make_result
from unilinattn.methods.selection import composable_steps, layers_from, query_rows
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


class RolloutOptions(MapOptions, Composed):
    """Options of `rollout`."""


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `rollout`: a second product and blocks of a map, or a row's pass through each layer."""
    chosen = RolloutOptions.of("rollout", options)
    layers = layers_from(trace, "rollout", chosen.start_layer)
    composable_steps(trace, "rollout", layers)

    def of(layer: Layer) -> tuple[int, int]:
        return composed_cost(layer, chosen) if target is None else vecmat_cost(layer, chosen)

    held = map_bytes(layers[0]) if target is None else 0
    return estimated("rollout", layers, target, chosen, of, held=held)


@register_method("rollout", options=RolloutOptions, cost=cost)
def rollout(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Attention rollout: rho = A_n ... A_1 with A_l = I + mean_h alpha_l (HMA ACL Eq. 21-22).

    A step of parallel layers sums their maps: I + sum_l mean_h alpha_l. Scores: (batch, query, key), without `query`
    for a target. For a target only its row is multiplied by the layers' maps: in linear time and without any map, if
    the options keep the plain mean over heads.

    Options: `RolloutOptions`. Raises `OptionError` for an unknown option or value, and `UncoveredError` if layers are
    on different streams.

    Also Abnar and Zuidema (2020), who average with the identity and renormalise rows: see `normalize`.
    """
    chosen = RolloutOptions.of("rollout", options)
    layers = layers_from(trace, "rollout", chosen.start_layer)
    steps = composable_steps(trace, "rollout", layers)
    rows = query_rows(trace, layers[0], target)
    rho = allocate_scores("rollout", layers, target).scatter_(2, rows.unsqueeze(-1), 1.0)
    if target is None:
        for step in progress(steps, "rollout"):
            rho = composed(rho, trace, step, chosen)
    else:
        for step in progress(steps[::-1], "rollout"):
            below = sum_on_first(vecmat(rho, trace, layer, chosen, target=rows) for layer in step)
            rho = rho + below.to(rho)
    blank_padding(rho, trace, layers[0], rows)
    rho = rho if target is None else rho.squeeze(1)
    return make_result(trace, "rollout", layers, rho, options=chosen, target=target, scope=chosen.scope)
