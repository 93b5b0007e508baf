"""`rollout`: the product of the layers' attention maps, each plus the identity for the residual stream."""

from unilinattn.options import Rollout
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.scoring.composition import composition_from, rollout_cost, rollout_of_maps
from unilinattn.scoring.published import CodeRun, code_cost
from unilinattn.tracing.trace import Target, Trace


def cost(trace: Trace, options: Rollout, *, target: Target | None = None) -> Estimate:
    """Return the cost of `rollout`: a second product and blocks of a map, or a row's pass through each layer."""
    if options.is_published:
        return code_cost(trace, options, target)
    return rollout_cost(composition_from(trace, options, target, whole=True))


@register_method(Rollout, cost=cost)
def rollout(trace: Trace, options: Rollout, *, target: Target | None = None) -> Attribution:
    """Run `Rollout`."""
    if options.is_published:
        code = CodeRun.of(trace, options, target)
        code.require_cls(trace.gradient()[-1])
        return code.result(code.composed(lambda layer: code.row(layer, rescaled=False)))
    return rollout_of_maps(composition_from(trace, options, target, whole=True))
