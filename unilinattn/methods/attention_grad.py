"""`attention_grad`: attention matrices weighted head by head by their gradients, composed like a rollout."""

from collections.abc import Iterator, Sequence
from typing import Any

from unilinattn.methods.gradient_maps import (
    Factors,
    GradientMapOptions,
    core_gradients,
    gradient_rollout,
    gradient_rollout_cost,
)
from unilinattn.methods.results import make_result
from unilinattn.methods.selection import layers_from
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.trace import Target, Trace


class AttentionGradOptions(GradientMapOptions):
    """Options of `attention_grad`."""


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `attention_grad`: a gradient and every layer's matrices of all heads, for each target."""
    chosen = AttentionGradOptions.of("attention_grad", options)
    return gradient_rollout_cost(trace, "attention_grad", target, chosen, factors=1)


@register_method(
    "attention_grad", options=AttentionGradOptions, cost=cost, needs=("logit", "one stream", "matrices", "gradients")
)
def attention_grad(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Gradient-weighted attention: rho = B_n ... B_1 with B = I + mean_h (grad alpha_h o alpha_h)^+.

    Chefer et al. (2021), generic attention explainability. grad alpha_hij = sum_p (d logit / d o)_ihp v_jhp, where o is
    the output of the layer's core and v its input, so it is defined for every structure with heads; the gradient is
    that of the model itself. A head of several parallel cores, such as two directions, sums their products before the
    clamp. The logit, and the gradients without a target, are those of `attribution`.

    Scores: (batch, query, key), without `query` for a target.

    Options: `AttentionGradOptions`. Raises the errors of `attribution`, and `UncoveredError` for layers with cores in
    series or complex cores.
    """
    chosen = AttentionGradOptions.of("attention_grad", options)
    layers = layers_from(trace, "attention_grad", chosen.start_layer)

    def factors(targets: Sequence[Target]) -> Iterator[Factors]:
        for gradients in core_gradients(trace, layers, targets, chosen):
            yield {name: [gradient] for name, gradient in gradients.items()}

    rho, scale = gradient_rollout(trace, "attention_grad", layers, target, chosen, factors)
    return make_result(trace, "attention_grad", layers, rho, options=chosen, target=target, scope="core", extras=scale)
