"""`smoothgrad`: the mean gradient over noisy copies of the tokens' vectors, by captum."""

from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from unilinattn.methods.captum_run import Scores, Seed, TokenFunction, captum, explained
from unilinattn.methods.gradient import GradientOptions
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Target, Trace


class SmoothgradOptions(GradientOptions):
    """Options of `smoothgrad`."""

    n_samples: int = Field(25, ge=1, description="number of noisy copies")
    noise: float = Field(
        0.15,
        gt=0,
        description="standard deviation of the noise as a fraction of the range, the largest number less the smallest, "
        "of the sequence's vectors",
    )
    seed: Seed = 0


@register_method("smoothgrad", options=SmoothgradOptions, needs=("logit", "embedding gradients"))
def smoothgrad(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """SmoothGrad: the mean of `gradient` over copies of the embeddings with Gaussian noise (Smilkov et al., 2017).

    captum's `Saliency` on copies with noise, one sequence after the other, each with the noise of `seed` on its real
    tokens; with sign="abs" the absolute values are taken before the mean, as by captum's `NoiseTunnel`. The logit is
    the model's prediction at the target, or that of the option `logit`. Scores: (batch, query, key), without `query`
    for a target.

    Options: `SmoothgradOptions`. Raises the errors of `gradient`.
    """
    chosen, algorithms = SmoothgradOptions.of("smoothgrad", options), captum()

    def score(function: TokenFunction) -> Scores:
        return Scores(function.each_sequence(partial(slopes, function)))

    def slopes(function: TokenFunction, sequence: int) -> Tensor:
        saliency = algorithms.Saliency(function.of_real(sequence))
        vectors = function.vectors.detach()[sequence, function.real[sequence]]
        deviation = chosen.noise * (vectors.max() - vectors.min())

        def total() -> Tensor:
            scores = vectors.new_zeros(len(vectors))
            for start in range(0, chosen.n_samples, function.runs()):
                count = min(function.runs(), chosen.n_samples - start)
                # Drawn copy by copy, the numbers do not depend on the copies in a run, which padding makes fewer.
                noise = torch.stack([torch.randn_like(vectors) for _ in range(count)])
                scores += saliency.attribute(
                    (vectors + deviation * noise).requires_grad_(),
                    abs=chosen.sign == "abs",
                    additional_forward_args=(function.sequences[sequence].expand(count),),
                ).sum((0, -1))
            return scores

        return function.seeded(chosen.seed, total) / chosen.n_samples

    return explained(trace, "smoothgrad", target, chosen, score)
