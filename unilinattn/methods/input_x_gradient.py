"""`input_x_gradient`: each token's vector times the gradient of a logit, by captum."""

from types import ModuleType

from unilinattn.options import InputXGradient
from unilinattn.scoring.numbers import Scores, TokenFunction, captum_method


@captum_method(InputXGradient)
def input_x_gradient(function: TokenFunction, _: InputXGradient, captum: ModuleType) -> Scores:
    """Run `InputXGradient`."""
    products = captum.InputXGradient(function).attribute(function.vectors, additional_forward_args=(function.rows,))
    return Scores(products.sum(-1))
