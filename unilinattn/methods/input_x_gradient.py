"""`input_x_gradient`: each token's vector times the gradient of a logit, by captum."""

from typing import Any

from unilinattn.methods.captum_run import Scores, TokenFunction, captum, explained
from unilinattn.methods.options import ScalarOptions
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Target, Trace


class InputXGradientOptions(ScalarOptions):
    """Options of `input_x_gradient`."""


@register_method("input_x_gradient", options=InputXGradientOptions, needs=("logit", "embedding gradients"))
def input_x_gradient(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Input times gradient: x_j . d logit / d x_j, x_j the embedding of token j (Shrikumar et al., 2016).

    captum's `InputXGradient` on the model itself: the true gradient, where `logit` takes that of the frozen model, so
    the scores do not add up to the logit. The logit is the model's prediction at the target, or that of the option
    `logit`. Scores: (batch, query, key), without `query` for a target; without a target row i explains the logit at
    position i, a forward and a backward pass for each token.

    Options: `InputXGradientOptions`. Raises the errors of `gradient`.
    """
    chosen, algorithms = InputXGradientOptions.of("input_x_gradient", options), captum()

    def score(function: TokenFunction) -> Scores:
        products = algorithms.InputXGradient(function).attribute(
            function.vectors, additional_forward_args=(function.sequences,)
        )
        return Scores(products.sum(-1))

    return explained(trace, "input_x_gradient", target, chosen, score)
