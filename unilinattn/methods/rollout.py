"""`rollout`: the product of the layers' attention maps, each plus the identity for the residual stream."""

from typing import Any

from unilinattn.methods.composition import rollout_cost, rollout_of_maps
from unilinattn.methods.options import Composed, MapOptions
from unilinattn.methods.results import make_result
from unilinattn.methods.selection import layers_from
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.trace import Target, Trace


class RolloutOptions(MapOptions, Composed):
    """Options of `rollout`."""


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `rollout`: a second product and blocks of a map, or a row's pass through each layer."""
    chosen = RolloutOptions.of("rollout", options)
    return rollout_cost(trace, "rollout", layers_from(trace, "rollout", chosen.start_layer), target, chosen)


@register_method("rollout", options=RolloutOptions, cost=cost, needs=("one stream",))
def rollout(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Attention rollout: rho = A_n ... A_1 with A_l = I + mean_h alpha_l (HMA ACL Eq. 21-22).

    A step of parallel layers sums their maps: I + sum_l mean_h alpha_l. Scores: (batch, query, key), without `query`
    for a target. For a target only its row is multiplied by the layers' maps: in linear time and without any map, if
    the options keep the plain mean over heads.

    Extras: "log2_scale" (batch, query), only if a row is beyond the range of the scores' dtype. Row i of rho is then
    scores_i 2**log2_scale_i.

    Options: `RolloutOptions`. Raises `OptionError` for an unknown option or value, and `UncoveredError` if layers are
    on different streams.

    Also Abnar and Zuidema (2020), who average with the identity and renormalise rows: see `normalize`.
    """
    chosen = RolloutOptions.of("rollout", options)
    layers = layers_from(trace, "rollout", chosen.start_layer)
    rho, scale = rollout_of_maps(trace, "rollout", layers, target, chosen)
    rho = rho if target is None else rho.squeeze(1)
    return make_result(trace, "rollout", layers, rho, options=chosen, target=target, scope=chosen.scope, extras=scale)
