"""`kernel_shap`: Shapley values of the tokens, estimated from sampled coalitions by captum."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from unilinattn.errors import OptionError
from unilinattn.methods.captum_run import Baseline, Scores, Seed, TokenFunction, captum, explained, relative_gap
from unilinattn.methods.options import ScalarOptions
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.isolation import in_gradient_mode
from unilinattn.tracing.trace import Target, Trace


class KernelShapOptions(ScalarOptions):
    """Options of `kernel_shap`."""

    baseline: Baseline = "zero"
    n_samples: int = Field(
        500, ge=4, description="coalitions for each sequence, more than its tokens; two of them are all tokens and none"
    )
    seed: Seed = 0


@register_method("kernel_shap", options=KernelShapOptions, needs=("logit", "one target", "embeddings"))
def kernel_shap(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Kernel SHAP: Shapley values of the tokens for the logit, by weighted least squares (Lundberg and Lee, 2017).

    captum's `KernelShap` over the presence of the real tokens, one sequence after the other: an absent token takes the
    embedding of the baseline. The regression is solved in float64, so scikit-learn is not needed. The logit is the
    model's prediction at the target with all tokens, or that of the option `logit`. Scores: (batch, key); a model with
    logits at every position needs a target. The scores add up to the difference between the logit and that without
    tokens, up to the error of the regression, which weights these two samples heavily. Extras: `logit` and, without
    tokens, `baseline`. `completeness_gap` is the largest of these errors relative to the difference.

    Options: `KernelShapOptions`. Raises the errors of `occlusion`, and `OptionError` for fewer samples than unknowns.
    """
    chosen, algorithms = KernelShapOptions.of("kernel_shap", options), captum()

    def score(function: TokenFunction) -> Scores:
        lowest = in_gradient_mode(False, lambda: function(function.baseline(chosen.baseline), function.sequences))
        scores = torch.zeros_like(function.real, dtype=function.value.dtype)
        for b, real in enumerate(function.real):
            # captum's distribution of the coalitions' sizes needs two tokens; one token has the whole difference.
            alone = int(real.sum()) == 1
            values = None if alone else function.seeded(chosen.seed, partial(shapley, function, b))
            scores[b, real] = function.value[b] - lowest[b] if values is None else values.to(scores)
        missed = scores.sum(1) - (function.value - lowest)
        extras = {"logit": function.value, "baseline": lowest}
        return Scores(scores, extras, relative_gap(missed, function.value, lowest))

    def shapley(function: TokenFunction, b: int) -> Tensor:
        real, present = function.real[b], function.of_presence(chosen.baseline)
        count = int(real.sum())
        if chosen.n_samples < count + 2:
            raise OptionError(
                f"kernel_shap: n_samples={chosen.n_samples} is too few for {count} tokens; their scores need at least "
                f"{count + 2} coalitions, and several times as many for an accurate estimate."
            )

        def of_coalition(coalition: Tensor, sequence: Tensor) -> Tensor:
            presence = coalition.new_ones(len(coalition), len(real))
            presence[:, real] = coalition
            return present(presence, sequence)

        algorithm = algorithms.KernelShap(of_coalition)
        # captum's own regression is scikit-learn's, in float32.
        algorithm.interpretable_model = _LeastSquares()
        values: Tensor = algorithm.attribute(
            function.vectors.new_ones(1, count),
            additional_forward_args=(function.sequences[b : b + 1],),
            n_samples=chosen.n_samples,
            perturbations_per_eval=function.runs(),
        )
        return values.squeeze(0)

    return explained(trace, "kernel_shap", target, chosen, score, every_query=False)


class _LeastSquares:
    """A linear model with a constant in the form that captum expects: weighted `fit`, and `representation`."""

    def fit(self, samples: Any) -> None:
        """Fit to the only batch of a loader: samples (sample, feature), values and weights (sample,)."""
        ((features, values, weights),) = samples
        design = torch.cat([features, features.new_ones(len(features), 1)], dim=1).double().cpu()
        root = weights.double().cpu().sqrt()
        self._solution = torch.linalg.lstsq(root[:, None] * design, root * values.double().cpu()).solution

    def representation(self) -> Float[Tensor, " feature"]:
        """Return the coefficients without the constant."""
        return self._solution[:-1]
