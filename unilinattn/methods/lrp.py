"""`lrp`: layer-wise relevance of the tokens for a logit, through the whole model, by the half rule."""

from unilinattn.frozen.passes import Rule
from unilinattn.methods.logit import shares_estimate, shares_result
from unilinattn.options import Lrp
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.trace import Target, Trace


def cost(trace: Trace, options: Lrp, *, target: Target | None = None) -> Estimate:
    """Return the cost of `lrp`: that of `logit`, with the layers' flows in the graph of the run."""
    return shares_estimate(trace, options, target, rule="gamma" if options.gamma else "half")


@register_method(Lrp, cost=cost)
def lrp(trace: Trace, options: Lrp, *, target: Target | None = None) -> Attribution:
    """Run `Lrp`."""
    return shares_result(trace, options, target, rule=Rule(half=True, gamma=options.gamma))
