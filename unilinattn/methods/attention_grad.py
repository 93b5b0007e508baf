"""`attention_grad`: attention matrices weighted head by head by their gradients, composed like a rollout."""

from collections.abc import Iterator, Sequence

from unilinattn.options import AttentionGrad
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.scoring.composition import composition_from
from unilinattn.scoring.gradient_maps import Factors, core_gradients, gradient_rollout, gradient_rollout_cost
from unilinattn.tracing.trace import Target, Trace


def cost(trace: Trace, options: AttentionGrad, *, target: Target | None = None) -> Estimate:
    """Return the cost of `attention_grad`: a gradient and every layer's matrices of all heads, for each target."""
    return gradient_rollout_cost(composition_from(trace, options, target), factors=1)


@register_method(AttentionGrad, cost=cost)
def attention_grad(trace: Trace, options: AttentionGrad, *, target: Target | None = None) -> Attribution:
    """Run `AttentionGrad`."""
    scoring = composition_from(trace, options, target)

    def factors(targets: Sequence[Target]) -> Iterator[Factors]:
        for gradients in core_gradients(scoring, targets):
            yield {name: [gradient] for name, gradient in gradients.items()}

    return gradient_rollout(scoring, factors)
