"""`integrated_gradients`: gradients along the path from a baseline to the tokens' vectors, by captum."""

from unilinattn.host.isolation import in_gradient_mode
from unilinattn.options import IntegratedGradients
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.captum_run import Scores, TokenFunction, captum, explained, relative_gap
from unilinattn.tracing.trace import Target, Trace


@register_method(IntegratedGradients)
def integrated_gradients(trace: Trace, options: IntegratedGradients, *, target: Target | None = None) -> Attribution:
    """Run `IntegratedGradients`."""
    algorithms = captum()

    def score(function: TokenFunction) -> Scores:
        start = function.baseline(options.baseline)
        products, delta = algorithms.IntegratedGradients(function).attribute(
            function.vectors,
            start,
            additional_forward_args=(function.sequences,),
            n_steps=options.n_steps,
            internal_batch_size=len(start) * function.runs(len(start)),
            return_convergence_delta=True,
        )
        lowest = in_gradient_mode(False, lambda: function(start, function.sequences))
        extras = {"logit": function.value, "baseline": lowest, "delta": delta}
        return Scores(products.sum(-1), extras, relative_gap(delta, function.value, lowest))

    return explained(trace, options, target, score)
