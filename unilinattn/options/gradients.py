"""Gradients of a logit at the embeddings, by captum."""

from typing import Literal

from pydantic import Field

from unilinattn.options.bases import Baseline, ScalarOptions, Seed

QUESTION = "Gradients of the logit at the embeddings, by captum"


class Gradient(ScalarOptions):
    """Saliency: the sum over channels of |d logit / d x_j|, x_j the embedding of token j (Simonyan et al., 2014).

    captum's `Saliency` on the model itself, without operators. The logit is the model's prediction at the target, or
    that of the option `logit`. Scores: (batch, query, key), without `query` for a target; without a target row i
    explains the logit at position i, a forward and a backward pass for each token.

    Raises `OptionError` for an unknown option or value, `InputError` for a model without logits,
    `MissingExtraError` without captum, and `UncoveredError` for a module that passes no gradient, such as a
    quantised one.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Gradient(sign="keep"), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("logit", "embedding gradients")

    sign: Literal["abs", "keep"] = Field(
        default="abs", description="sum over channels of the absolute values of the gradient, or of the signed gradient"
    )


class InputXGradient(ScalarOptions):
    """Input times gradient: x_j . d logit / d x_j, x_j the embedding of token j (Shrikumar et al., 2016).

    captum's `InputXGradient` on the model itself: the true gradient, where `logit` takes that of the frozen model, so
    the scores do not add up to the logit. The logit is the model's prediction at the target, or that of the option
    `logit`. Scores: (batch, query, key), without `query` for a target; without a target row i explains the logit at
    position i, a forward and a backward pass for each token.

    Raises the errors of `gradient`.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.InputXGradient(), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("logit", "embedding gradients")


class IntegratedGradients(ScalarOptions):
    """Integrated gradients: x_j - x'_j times the mean gradient d logit / d x_j on the path from a baseline x' to x.

    Sundararajan et al. (2017), by captum's `IntegratedGradients` on the model itself, over the embeddings of all
    tokens at once. The scores add up to the difference between the logit and that of the baseline x', up to the error
    of the quadrature. The logit is the model's prediction at the target, or that of the option `logit`.
    Scores: (batch, query, key), without `query` for a target. Extras, with the same axes but `key`: `logit`, its value
    at the `baseline`, and `delta`, captum's convergence delta: the sum of scores less the difference.
    `completeness_gap` is the largest |delta| relative to the difference.

    Raises the errors of `gradient`, `InputError` for a baseline id that the model does not know, and `OptionError`
    for a baseline from the embedding table on inputs without ids.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.IntegratedGradients(n_steps=20), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("logit", "embedding gradients")

    baseline: Baseline = "zero"
    n_steps: int = Field(default=50, ge=1, description="points of the Gauss-Legendre quadrature along the path")


class Smoothgrad(Gradient):
    """SmoothGrad: the mean of `gradient` over copies of the embeddings with Gaussian noise (Smilkov et al., 2017).

    captum's `Saliency` on copies with noise, one sequence after the other, each with the noise of `seed` on its real
    tokens; with sign="abs" the absolute values are taken before the mean, as by captum's `NoiseTunnel`. The logit is
    the model's prediction at the target, or that of the option `logit`. Scores: (batch, query, key), without `query`
    for a target.

    Raises the errors of `gradient`.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Smoothgrad(n_samples=5), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("logit", "embedding gradients")

    n_samples: int = Field(default=25, ge=1, description="number of noisy copies")
    noise: float = Field(
        default=0.15,
        gt=0,
        description="standard deviation of the noise as a fraction of the range, the largest number less the smallest, "
        "of the sequence's vectors",
    )
    seed: Seed = 0
