"""`occlusion`: the drop of a logit when tokens' vectors are replaced, by captum."""

from typing import Any

from pydantic import Field
from torch import Tensor

from unilinattn.errors import OptionError
from unilinattn.methods.captum_run import Baseline, Scores, TokenFunction, captum, explained
from unilinattn.methods.options import ScalarOptions
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Target, Trace


class OcclusionOptions(ScalarOptions):
    """Options of `occlusion`."""

    baseline: Baseline = "zero"
    window: int = Field(
        1, ge=1, description="tokens replaced together; a token's score is the mean over the windows that hold it"
    )


@register_method("occlusion", options=OcclusionOptions, needs=("logit", "one target", "embeddings"))
def occlusion(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Occlusion: the drop of the logit when a token's embedding is replaced by a baseline (Zeiler and Fergus, 2014).

    captum's `Occlusion` over the presence of the real tokens, one sequence after the other: token j keeps its embedding
    or takes that of the baseline, in windows that move by one token. The logit is the model's prediction at the target
    with all tokens, or that of the option `logit`. Scores: (batch, key); a model with logits at every position needs a
    target.

    Options: `OcclusionOptions`. Raises `OptionError` for an unknown option or value, without a target, and for a window
    longer than a sequence, `InputError` for a model without logits and for a baseline id that the model does not
    know, `MissingExtraError` without captum, and `UncoveredError` for models with two streams of tokens.
    """
    chosen, algorithms = OcclusionOptions.of("occlusion", options), captum()

    def score(function: TokenFunction) -> Scores:
        def drops(sequence: int) -> Tensor:
            count = int(function.real[sequence].sum())
            if chosen.window > count:
                raise OptionError(f"occlusion: window={chosen.window} is longer than the {count} tokens.")
            algorithm = algorithms.Occlusion(function.of_presence(chosen.baseline, sequence))
            values: Tensor = algorithm.attribute(
                function.vectors.new_ones(1, count),
                (chosen.window,),
                additional_forward_args=(function.sequences[sequence : sequence + 1],),
                perturbations_per_eval=function.runs(),
            )
            return values.squeeze(0)

        return Scores(function.each_sequence(drops))

    return explained(trace, "occlusion", target, chosen, score, every_query=False)
