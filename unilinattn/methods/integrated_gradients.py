"""`integrated_gradients`: gradients along the path from a baseline to the tokens' vectors, by captum."""

from types import ModuleType

from unilinattn.host.isolation import in_gradient_mode
from unilinattn.options import IntegratedGradients
from unilinattn.scoring.base import relative_gap
from unilinattn.scoring.numbers import Scores, TokenFunction, captum_method


@captum_method(IntegratedGradients)
def integrated_gradients(function: TokenFunction, options: IntegratedGradients, captum: ModuleType) -> Scores:
    """Run `IntegratedGradients`."""
    start = function.baseline(options.baseline)
    products, delta = captum.IntegratedGradients(function).attribute(
        function.vectors,
        start,
        additional_forward_args=(function.rows,),
        n_steps=options.n_steps,
        internal_batch_size=len(start) * function.runs(len(start), gradients=True),
        return_convergence_delta=True,
    )
    lowest = in_gradient_mode(False, lambda: function(start, function.rows))
    extras = {"logit": function.value, "baseline": lowest, "delta": delta}
    return Scores(products.sum(-1), extras, relative_gap(delta, function.value - lowest))
