"""`occlusion`: the drop of a logit when tokens' vectors are replaced, by captum."""

from torch import Tensor

from unilinattn.errors import OptionError
from unilinattn.options import Occlusion
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.captum_run import Scores, TokenFunction, captum, explained
from unilinattn.tracing.trace import Target, Trace


@register_method(Occlusion)
def occlusion(trace: Trace, options: Occlusion, *, target: Target | None = None) -> Attribution:
    """Run `Occlusion`."""
    algorithms = captum()

    def score(function: TokenFunction) -> Scores:
        def drops(sequence: int) -> Tensor:
            count = int(function.real[sequence].sum())
            if options.window > count:
                raise OptionError(f"occlusion: window={options.window} is longer than the {count} tokens.")
            algorithm = algorithms.Occlusion(function.of_presence(options.baseline, sequence))
            values: Tensor = algorithm.attribute(
                function.vectors.new_ones(1, count),
                (options.window,),
                additional_forward_args=(function.sequences[sequence : sequence + 1],),
                perturbations_per_eval=function.runs(),
            )
            return values.squeeze(0)

        return Scores(function.each_sequence(drops))

    return explained(trace, options, target, score, every_query=False)
