"""`transformer_attribution`: relevances of attention matrices, weighted by gradients, composed like a rollout."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from unilinattn.frozen.run import FrozenRun, frozen
from unilinattn.methods.gradient_maps import (
    AtCores,
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
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

MATRIX_SHARE = 0.5
"""Part of the relevance of a product alpha v that the rule of matrix products gives to alpha."""


class TransformerAttributionOptions(GradientMapOptions):
    """Options of `transformer_attribution`."""


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `transformer_attribution`: that of `attention_grad`, and a frozen run by the half rule."""
    chosen = TransformerAttributionOptions.of("transformer_attribution", options)
    relevance = trace.frozen_cost(1 if target is not None else trace.layers[-1].output.shape[1], rule="half")
    return gradient_rollout_cost(trace, "transformer_attribution", target, chosen, factors=2, relevance=relevance)


@register_method(
    "transformer_attribution",
    options=TransformerAttributionOptions,
    cost=cost,
    needs=("logit", "one stream", "matrices", "gradients", "half rule"),
)
def transformer_attribution(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Transformer attribution: rho = B_n ... B_1 with B = I + mean_h (grad alpha_h o R_h)^+ (HMA ACL Eq. 23).

    Chefer et al. (CVPR 2021). R is the relevance of alpha by the rules of `lrp`: R_hij = alpha_hij sum_p r_ihp v_jhp
    / 2, with the gradient r of `lrp`'s frozen model at the core's output o and the core's input v. The rule of matrix
    products gives half of the relevance of o = alpha v to alpha. The gradient is that of `attention_grad`.

    Scores: (batch, query, key), without `query` for a target. `completeness_gap` is that of `lrp`, of the worst target.

    Options: `TransformerAttributionOptions`. Raises the errors of `attention_grad` and of `lrp`.
    """
    chosen = TransformerAttributionOptions.of("transformer_attribution", options)
    layers = layers_from(trace, "transformer_attribution", chosen.start_layer)
    gaps = []

    def factors(targets: Sequence[Target]) -> Iterator[Factors]:
        run = frozen(trace, None if callable(chosen.logit) else targets, rule="half")
        for position, gradients in zip(targets, core_gradients(trace, layers, targets, chosen), strict=True):
            relevance = run.complete_shares(position, chosen.logit)
            gaps.append(_largest_ratio(relevance.gap, relevance.value))
            slopes = _relevance_slopes(trace, run, layers, position, chosen)
            yield {name: [gradient, slopes[name]] for name, gradient in gradients.items()}

    rho, scale = gradient_rollout(trace, "transformer_attribution", layers, target, chosen, factors)
    return make_result(
        trace,
        "transformer_attribution",
        layers,
        rho,
        options=chosen,
        target=target,
        scope="core",
        extras=scale,
        completeness_gap=max(gaps),
    )


def _relevance_slopes(
    trace: Trace, run: FrozenRun, layers: Sequence[Layer], target: Target, options: GradientMapOptions
) -> dict[str, AtCores]:
    """Return the parts of R that the gradient of the frozen model gives: r / 2, at the cores of each layer."""
    edges = {layer.name: mixed for layer, mixed in zip(trace.layers, run.mixed, strict=True)}
    gradients = iter(run.gradients([edge for layer in layers for edge in edges[layer.name]], target, options.logit))
    return {layer.name: [MATRIX_SHARE * next(gradients) for _ in edges[layer.name]] for layer in layers}


def _largest_ratio(gap: Float[Tensor, " batch"], value: Float[Tensor, " batch"]) -> float:
    return float((gap / value.abs().clamp_min(1e-300)).max())
