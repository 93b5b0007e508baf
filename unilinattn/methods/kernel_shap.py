"""`kernel_shap`: Shapley values of the tokens, from every coalition or estimated from samples by captum."""

from math import comb
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import OptionError
from unilinattn.host.isolation import in_gradient_mode
from unilinattn.options import KernelShap
from unilinattn.scoring.base import relative_gap
from unilinattn.scoring.numbers import Scores, TokenFunction, captum_method


@captum_method(KernelShap, every_query=False)
def kernel_shap(function: TokenFunction, options: KernelShap, captum: ModuleType) -> Scores:
    """Run `KernelShap`."""
    lowest = in_gradient_mode(False, lambda: function(function.baseline(options.baseline), function.rows))
    runs = function.runs(gradients=False)

    def shapley(row: int) -> Tensor:
        value, only = function.of_presence(options.baseline, row), function.rows[row : row + 1]
        count = int(function.real[row].sum())
        if 2**count - 2 <= options.n_samples:
            presence = _coalitions(count).to(function.vectors)
            # One token has no coalition between none and all.
            batches = presence[1:-1].split(runs) if count > 1 else ()
            numbers = in_gradient_mode(False, lambda: [value(batch, only.expand(len(batch))) for batch in batches])
            return _shapley_values(
                presence, torch.cat([lowest[row : row + 1], *numbers, function.value[row : row + 1]])
            )
        if options.n_samples < count + 2:
            raise OptionError(
                f"kernel_shap: n_samples={options.n_samples} is too few for {count} tokens; their scores need at least "
                f"{count + 2} coalitions, and several times as many for an accurate estimate."
            )
        algorithm = captum.KernelShap(value)
        # captum's own regression is scikit-learn's, in float32.
        algorithm.interpretable_model = _LeastSquares()

        def estimate() -> Tensor:
            values: Tensor = algorithm.attribute(
                function.vectors.new_ones(1, count),
                additional_forward_args=(only,),
                n_samples=options.n_samples,
                perturbations_per_eval=runs,
            )
            return values.squeeze(0)

        return function.seeded(options.seed, estimate)

    scores = function.each_row(shapley)
    difference = function.value - lowest
    extras = {"logit": function.value, "baseline": lowest}
    return Scores(scores, extras, relative_gap(scores.sum(1) - difference, difference))


def _coalitions(count: int) -> Int[Tensor, "coalition token"]:
    """Return every coalition of `count` tokens, from none to all: 1 for a present token, else 0."""
    return torch.arange(2**count, device="cpu").unsqueeze(1) >> torch.arange(count, device="cpu") & 1


def _shapley_values(
    presence: Float[Tensor, "coalition token"], value: Float[Tensor, " coalition"]
) -> Float[Tensor, " token"]:
    """Return the mean change of the value when a token joins, over all orders of arrival, from every coalition."""
    count, size = presence.shape[1], presence.sum(1).long()
    # A coalition with the token comes after one that is smaller by one.
    before = size[:, None] - presence.long()
    orders = torch.tensor([count * comb(count - 1, k) for k in range(count)], device=value.device).double()
    signed = (2 * presence.double() - 1) / orders[before]
    return (signed * value.double()[:, None]).sum(0)


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
