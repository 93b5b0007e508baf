"""`gradient`: the gradient of a logit with respect to each token's vector, by captum."""

from typing import Any, Literal

from pydantic import Field

from unilinattn.methods.captum_run import Scores, TokenFunction, captum, explained
from unilinattn.methods.options import ScalarOptions
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Target, Trace


class GradientOptions(ScalarOptions):
    """Options of `gradient`."""

    sign: Literal["abs", "keep"] = Field(
        "abs", description="sum over channels of the absolute values of the gradient, or of the signed gradient"
    )


@register_method("gradient", options=GradientOptions, needs=("logit", "embedding gradients"))
def gradient(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Saliency: the sum over channels of |d logit / d x_j|, x_j the embedding of token j (Simonyan et al., 2014).

    captum's `Saliency` on the model itself, without operators. The logit is the model's prediction at the target, or
    that of the option `logit`. Scores: (batch, query, key), without `query` for a target; without a target row i
    explains the logit at position i, a forward and a backward pass for each token.

    Options: `GradientOptions`. Raises `OptionError` for an unknown option or value, `InputError` for a model without
    logits, `MissingExtraError` without captum, and `UncoveredError` for a module that passes no gradient, such as a
    quantised one, and for models with two streams of tokens.
    """
    chosen, algorithms = GradientOptions.of("gradient", options), captum()

    def score(function: TokenFunction) -> Scores:
        slopes = algorithms.Saliency(function).attribute(
            function.vectors, abs=chosen.sign == "abs", additional_forward_args=(function.sequences,)
        )
        return Scores(slopes.sum(-1))

    return explained(trace, "gradient", target, chosen, score)
