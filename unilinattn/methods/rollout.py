"""`rollout`: the product of the layers' attention maps, each plus the identity for the residual stream."""

from unilinattn.methods.composition import rollout_cost, rollout_of_maps
from unilinattn.methods.results import make_result
from unilinattn.methods.selection import layers_from
from unilinattn.options import Rollout
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.trace import Target, Trace


def cost(trace: Trace, options: Rollout, *, target: Target | None = None) -> Estimate:
    """Return the cost of `rollout`: a second product and blocks of a map, or a row's pass through each layer."""
    return rollout_cost(trace, options, layers_from(trace, "rollout", options.start_layer), target)


@register_method(Rollout, cost=cost)
def rollout(trace: Trace, options: Rollout, *, target: Target | None = None) -> Attribution:
    """Run `Rollout`."""
    layers = layers_from(trace, "rollout", options.start_layer)
    joint, rho, scale = rollout_of_maps(trace, options, layers, target)
    axes = joint.axes(whole=target is None)
    return make_result(trace, options, layers, rho, target=target, scope=options.scope, axes=axes, extras=scale)
