"""`input_x_gradient`: each token's vector times the gradient of a logit, by captum."""

from unilinattn.options import InputXGradient
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.captum_run import Scores, TokenFunction, captum, explained
from unilinattn.tracing.trace import Target, Trace


@register_method(InputXGradient)
def input_x_gradient(trace: Trace, options: InputXGradient, *, target: Target | None = None) -> Attribution:
    """Run `InputXGradient`."""
    algorithms = captum()

    def score(function: TokenFunction) -> Scores:
        products = algorithms.InputXGradient(function).attribute(
            function.vectors, additional_forward_args=(function.sequences,)
        )
        return Scores(products.sum(-1))

    return explained(trace, options, target, score)
