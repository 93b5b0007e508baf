"""`lrp`: layer-wise relevance of the tokens for a logit, through the whole model, by the half rule."""

from typing import Any

from unilinattn.methods.logit import shares_estimate, shares_result
from unilinattn.methods.options import ScalarOptions
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.trace import Target, Trace


class LrpOptions(ScalarOptions):
    """Options of `lrp`."""


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `lrp`: that of `logit`, with the layers' flows in the graph of the run."""
    return shares_estimate(trace, "lrp", target, LrpOptions.of("lrp", options), rule="half")


@register_method("lrp", options=LrpOptions, cost=cost, needs=("logit", "half rule"))
def lrp(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Layer-wise relevance propagation: gradient x embedding, where a value and its gate share relevance equally.

    The method is `logit` with one other rule. Where `logit` freezes the activated factor of a product, each factor gets
    half of the product's relevance, in the layers' output gates and in the code between the layers: the rules of
    MambaLRP (Jafari et al., 2024), for every architecture. A factor with an activation of f(0) != 0, such as a sigmoid
    gate, stays frozen, because half of its relevance would be that of the constant f(0). So does a gate inside of a
    core (H3 and Hyena with several channels per head), and one that an adapter reads from a capture of the host's run.

    Scores, extras and `completeness_gap` are those of `logit`; relevances, bias and remainder add up to the logit.

    Options: `LrpOptions`. Raises the errors of `logit`.
    """
    return shares_result(trace, "lrp", target, LrpOptions.of("lrp", options), rule="half")
