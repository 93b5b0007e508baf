"""`smoothgrad`: the mean gradient over noisy copies of the tokens' vectors, by captum."""

from functools import partial

import torch
from torch import Tensor

from unilinattn.options import Smoothgrad
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.captum_run import Scores, TokenFunction, captum, explained
from unilinattn.tracing.trace import Target, Trace


@register_method(Smoothgrad)
def smoothgrad(trace: Trace, options: Smoothgrad, *, target: Target | None = None) -> Attribution:
    """Run `Smoothgrad`."""
    algorithms = captum()

    def score(function: TokenFunction) -> Scores:
        return Scores(function.each_sequence(partial(slopes, function)))

    def slopes(function: TokenFunction, sequence: int) -> Tensor:
        saliency = algorithms.Saliency(function.of_real(sequence))
        vectors = function.vectors.detach()[sequence, function.real[sequence]]
        deviation = options.noise * (vectors.max() - vectors.min())

        def total() -> Tensor:
            scores = vectors.new_zeros(len(vectors))
            for start in range(0, options.n_samples, function.runs()):
                count = min(function.runs(), options.n_samples - start)
                # Drawn copy by copy, the numbers do not depend on the copies in a run, which padding makes fewer.
                noise = torch.stack([torch.randn_like(vectors) for _ in range(count)])
                scores += saliency.attribute(
                    (vectors + deviation * noise).requires_grad_(),
                    abs=options.sign == "abs",
                    additional_forward_args=(function.sequences[sequence].expand(count),),
                ).sum((0, -1))
            return scores

        return function.seeded(options.seed, total) / options.n_samples

    return explained(trace, options, target, score)
