"""`gradient`: the gradient of a logit with respect to each token's vector, by captum."""

from types import ModuleType

from unilinattn.options import Gradient
from unilinattn.scoring.numbers import Scores, TokenFunction, captum_method


@captum_method(Gradient)
def gradient(function: TokenFunction, options: Gradient, captum: ModuleType) -> Scores:
    """Run `Gradient`."""
    slopes = captum.Saliency(function).attribute(
        function.vectors, abs=options.sign == "abs", additional_forward_args=(function.rows,)
    )
    return Scores(slopes.sum(-1))
