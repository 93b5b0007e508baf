"""Intervals of numbers over seeds and samples, by a hierarchical bootstrap."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from evidence.comparisons import Term

RESAMPLES = 100_000
"""Resamples, so that a few lie beyond the ends of an interval that is corrected for 500 comparisons."""

CHUNK = 1000
"""Resamples that are drawn together."""

Numbers = Sequence[Float[np.ndarray, "sample part 2"]]
"""Numerators and denominators of the parts of a metric for each sample, one array a seed."""


def pooled(numbers: Numbers) -> float:
    """Return the mean over seeds of a metric over all samples of a seed (`evaluation.table.pool`)."""
    sums = np.stack([of_seed.sum(0) for of_seed in numbers])
    return float((sums[..., 0] / sums[..., 1]).mean())


def intervals(
    numbers: Mapping[Term, Numbers], sums: Sequence[Mapping[Term, float]], level: float, resamples: int
) -> list[tuple[float, float]]:
    """Return percentile intervals of weighted sums of numbers that were measured on the same samples.

    A resample draws as many seeds as there are, with replacement, and as many samples as a seed has, with replacement.
    They are the same for every number, so that a difference is that of paired samples, and for every seed with as many,
    since seeds may share their samples. A seed that is drawn twice counts twice, with the same samples. The number of a
    resample is the mean over the drawn seeds of the metric over the drawn samples (Davison and Hinkley, "Bootstrap
    Methods and their Application" (1997), 3.8, for samples within seeds).
    """
    order = {term: column for column, term in enumerate(numbers)}
    weights = np.zeros((len(order), len(sums)))
    for column, weighted in enumerate(sums):
        for term, weight in weighted.items():
            weights[order[term], column] += weight
    of_seeds = [np.stack(seed, 1) for seed in zip(*numbers.values(), strict=True)]
    drawn = np.empty((resamples, len(sums)), dtype=np.float32)
    random = np.random.default_rng(0)
    for first, last in pairwise([*range(0, resamples, CHUNK), resamples]):
        drawn[first:last] = _means(of_seeds, last - first, random) @ weights
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail), axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _means(
    of_seeds: Sequence[Float[np.ndarray, "sample term part 2"]], count: int, random: np.random.Generator
) -> Float[np.ndarray, "resample term"]:
    """Return the number of each term in `count` resamples."""
    seeds = len(of_seeds)
    shares = _counts(seeds, count, random) / seeds
    drawn = {samples: _counts(samples, count, random) for samples in {len(numbers) for numbers in of_seeds}}
    means = np.zeros((count, of_seeds[0].shape[1]))
    for share, numbers in zip(shares.T, of_seeds, strict=True):
        sums = (drawn[len(numbers)] @ numbers.reshape(len(numbers), -1)).reshape(count, *numbers.shape[1:])
        means += share[:, None] * (sums[..., 0] / sums[..., 1]).mean(-1)
    return means


def _counts(size: int, count: int, random: np.random.Generator) -> Float[np.ndarray, "resample size"]:
    """Return how often each of `size` things is drawn in each of `count` resamples of `size`."""
    things = random.integers(size, size=(count, size)) + size * np.arange(count)[:, None]
    return np.bincount(things.ravel(), minlength=count * size).reshape(count, size).astype(np.float64)
