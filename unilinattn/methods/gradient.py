"""`gradient`: the gradient of a logit with respect to each token's vector, by captum."""

from unilinattn.options import Gradient
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.captum_run import Scores, TokenFunction, captum, explained
from unilinattn.tracing.trace import Target, Trace


@register_method(Gradient)
def gradient(trace: Trace, options: Gradient, *, target: Target | None = None) -> Attribution:
    """Run `Gradient`."""
    algorithms = captum()

    def score(function: TokenFunction) -> Scores:
        slopes = algorithms.Saliency(function).attribute(
            function.vectors, abs=options.sign == "abs", additional_forward_args=(function.sequences,)
        )
        return Scores(slopes.sum(-1))

    return explained(trace, options, target, score)
