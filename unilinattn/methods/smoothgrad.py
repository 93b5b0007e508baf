"""`smoothgrad`: the mean gradient over noisy copies of the tokens' vectors, by captum."""

from types import ModuleType

import torch
from torch import Tensor

from unilinattn.options import Smoothgrad
from unilinattn.scoring.numbers import Scores, TokenFunction, captum_method


@captum_method(Smoothgrad)
def smoothgrad(function: TokenFunction, options: Smoothgrad, captum: ModuleType) -> Scores:
    """Run `Smoothgrad`."""

    def slopes(row: int) -> Tensor:
        saliency = captum.Saliency(function.of_real(row))
        vectors = function.vectors.detach()[row, function.real[row]]
        deviation = options.noise * (vectors.max() - vectors.min())

        def total() -> Tensor:
            scores, runs = vectors.new_zeros(len(vectors)), function.runs(gradients=True)
            for start in range(0, options.n_samples, runs):
                count = min(runs, options.n_samples - start)
                # Drawn copy by copy, the numbers do not depend on the copies in a run, which padding makes fewer.
                noise = torch.stack([torch.randn_like(vectors) for _ in range(count)])
                scores += saliency.attribute(
                    (vectors + deviation * noise).requires_grad_(),
                    abs=options.sign == "abs",
                    additional_forward_args=(function.rows[row].expand(count),),
                ).sum((0, -1))
            return scores

        return function.seeded(options.seed, total) / options.n_samples

    return Scores(function.each_row(slopes))
