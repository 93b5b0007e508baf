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

    captum's `NoiseTunnel` around its `Saliency`, one sequence after the other, each with the noise of `seed`; with
    sign="abs" the absolute values are taken before the mean. The logit is the model's prediction at the target, or
    that of the option `logit`. Scores: (batch, query, key), without `query` for a target.

    Options: `SmoothgradOptions`. Raises the errors of `gradient`.
    """
    chosen, algorithms = SmoothgradOptions.of("smoothgrad", options), captum()

    def score(function: TokenFunction) -> Scores:
        tunnel = algorithms.NoiseTunnel(algorithms.Saliency(function))

        def one(at: slice) -> Tensor:
            real = function.vectors.detach()[at][function.real[at]]
            return tunnel.attribute(
                function.vectors.detach()[at].requires_grad_(),
                nt_samples=chosen.n_samples,
                nt_samples_batch_size=function.runs(),
                stdevs=chosen.noise * float(real.max() - real.min()),
                abs=chosen.sign == "abs",
                additional_forward_args=(function.sequences[at],),
            )

        sequences = (slice(b, b + 1) for b in range(len(function.sequences)))
        slopes = [function.seeded(chosen.seed, partial(one, at)) for at in sequences]
        return Scores(torch.cat(slopes).sum(-1))

    return explained(trace, "smoothgrad", target, chosen, score)
