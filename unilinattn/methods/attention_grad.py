"""`attention_grad`: attention matrices weighted head by head by their gradients, composed like a rollout."""

from collections.abc import Iterator, Sequence

from unilinattn.methods.gradient_maps import (
    Factors,
    core_gradients,
    gradient_rollout,
    gradient_rollout_cost,
)
from unilinattn.methods.results import make_result
from unilinattn.methods.selection import layers_from
from unilinattn.options import AttentionGrad
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.trace import Target, Trace


def cost(trace: Trace, options: AttentionGrad, *, target: Target | None = None) -> Estimate:
    """Return the cost of `attention_grad`: a gradient and every layer's matrices of all heads, for each target."""
    return gradient_rollout_cost(trace, options, target, factors=1)


@register_method(AttentionGrad, cost=cost)
def attention_grad(trace: Trace, options: AttentionGrad, *, target: Target | None = None) -> Attribution:
    """Run `AttentionGrad`."""
    layers = layers_from(trace, "attention_grad", options.start_layer)

    def factors(targets: Sequence[Target]) -> Iterator[Factors]:
        for gradients in core_gradients(trace, layers, targets, options):
            yield {name: [gradient] for name, gradient in gradients.items()}

    joint, rho, scale = gradient_rollout(trace, options, layers, target, factors)
    axes = joint.axes(whole=False)
    return make_result(trace, options, layers, rho, target=target, scope="core", axes=axes, extras=scale)
