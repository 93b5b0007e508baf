"""`integrated_gradients`: gradients along the path from a baseline to the tokens' vectors, by captum."""

from typing import Any

from pydantic import Field

from unilinattn.host.isolation import in_gradient_mode
from unilinattn.methods.captum_run import Baseline, Scores, TokenFunction, captum, explained, relative_gap
from unilinattn.methods.options import ScalarOptions
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Target, Trace


class IntegratedGradientsOptions(ScalarOptions):
    """Options of `integrated_gradients`."""

    baseline: Baseline = "zero"
    n_steps: int = Field(50, ge=1, description="points of the Gauss-Legendre quadrature along the path")


@register_method("integrated_gradients", options=IntegratedGradientsOptions, needs=("logit", "embedding gradients"))
def integrated_gradients(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Integrated gradients: x_j - x'_j times the mean gradient d logit / d x_j on the path from a baseline x' to x.

    Sundararajan et al. (2017), by captum's `IntegratedGradients` on the model itself, over the embeddings of all
    tokens at once. The scores add up to the difference between the logit and that of the baseline x', up to the error
    of the quadrature. The logit is the model's prediction at the target, or that of the option `logit`.
    Scores: (batch, query, key), without `query` for a target. Extras, with the same axes but `key`: `logit`, its value
    at the `baseline`, and `delta`, captum's convergence delta: the sum of scores less the difference.
    `completeness_gap` is the largest |delta| relative to the difference.

    Options: `IntegratedGradientsOptions`. Raises the errors of `gradient`, `InputError` for a baseline id that the
    model does not know, and `OptionError` for a baseline from the embedding table on inputs without ids.
    """
    chosen, algorithms = IntegratedGradientsOptions.of("integrated_gradients", options), captum()

    def score(function: TokenFunction) -> Scores:
        start = function.baseline(chosen.baseline)
        parts, delta = algorithms.IntegratedGradients(function).attribute(
            function.vectors,
            start,
            additional_forward_args=(function.sequences,),
            n_steps=chosen.n_steps,
            internal_batch_size=len(start) * function.runs(len(start)),
            return_convergence_delta=True,
        )
        lowest = in_gradient_mode(False, lambda: function(start, function.sequences))
        extras = {"logit": function.value, "baseline": lowest, "delta": delta}
        return Scores(parts.sum(-1), extras, relative_gap(delta, function.value, lowest))

    return explained(trace, "integrated_gradients", target, chosen, score)
