"""`transformer_attribution`: relevances of attention matrices, weighted by gradients, composed like a rollout."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from unilinattn.frozen.passes import HALF_WITH_EDGES
from unilinattn.frozen.run import FrozenRun, frozen
from unilinattn.options import TransformerAttribution
from unilinattn.options.bases import GradientMapOptions
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.scoring.base import relative_gap
from unilinattn.scoring.composition import Composition, composition, composition_from
from unilinattn.scoring.gradient_maps import AtCores, Factors, core_gradients, gradient_rollout, gradient_rollout_cost
from unilinattn.scoring.selection import streams_of
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

MATRIX_SHARE = 0.5
"""Part of the relevance of a product alpha v that the rule of matrix products gives to alpha."""


def cost(trace: Trace, options: TransformerAttribution, *, target: Target | None = None) -> Estimate:
    """Return the cost of `transformer_attribution`: that of `attention_grad`, and a frozen run by the half rule."""
    relevance = trace.frozen_cost(1 if target is not None else trace.layers[-1].output.shape[1], rule="half")
    return gradient_rollout_cost(composition_from(trace, options, target), factors=2, relevance=relevance)


@register_method(TransformerAttribution, cost=cost)
def transformer_attribution(
    trace: Trace, options: TransformerAttribution, *, target: Target | None = None
) -> Attribution:
    """Run `TransformerAttribution`."""
    scoring, gaps = _composition(trace, options, target), []

    def factors(targets: Sequence[Target]) -> Iterator[Factors]:
        run = frozen(trace, None if callable(options.scalar) else targets, rule=HALF_WITH_EDGES)
        for position, gradients in zip(targets, core_gradients(scoring, targets), strict=True):
            relevance = run.complete_shares(position, options.scalar)
            gaps.append(relative_gap(relevance.gap, relevance.value))
            slopes = _relevance_slopes(trace, run, scoring.layers, position, options)
            yield {name: [gradient, slopes[name]] for name, gradient in gradients.items()}

    return replace(gradient_rollout(scoring, factors), completeness_gap=max(gaps))


def _composition(
    trace: Trace, options: TransformerAttribution, target: Target | None
) -> Composition[TransformerAttribution]:
    """Return the composition of the layers but those before the tokens that have relevance, as an image's."""
    scoring = composition_from(trace, options, target)
    if not scoring.joint.entries:
        return scoring
    run = frozen(trace, None if callable(options.scalar) else [-1 if target is None else target], rule=HALF_WITH_EDGES)
    constant = {layer.name for layer, mixed in zip(trace.layers, run.mixed, strict=True) if not mixed}
    layers = [
        layer
        for layer in scoring.layers
        if layer.name not in constant or streams_of(trace, layer)[0] == trace.target_stream
    ]
    return composition(trace, options, target, layers)


def _relevance_slopes(
    trace: Trace, run: FrozenRun, layers: Sequence[Layer], target: Target, options: GradientMapOptions
) -> dict[str, AtCores]:
    """Return the parts of R that the gradient of the frozen model gives: r / 2, at the cores of each layer."""
    edges = {layer.name: mixed for layer, mixed in zip(trace.layers, run.mixed, strict=True)}
    gradients = iter(run.gradients([edge for layer in layers for edge in edges[layer.name]], target, options.scalar))
    return {layer.name: [MATRIX_SHARE * next(gradients) for _ in edges[layer.name]] for layer in layers}
