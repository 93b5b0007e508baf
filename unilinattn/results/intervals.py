"""Means over samples with bootstrap intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unilinattn.errors import InputError


@dataclass(frozen=True)
class MeanInterval:
    """A mean over samples, the ends of its bootstrap interval, and the number of samples."""

    mean: float
    low: float
    high: float
    count: int


def mean_interval(
    values: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> MeanInterval:
    """Return the mean of one value per sample with its percentile bootstrap interval.

    For two methods on the same samples, `values` are the differences: the interval is that of paired samples.

    Raises `InputError` for no values or values that are not finite.
    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), 13.
    """
    sample = torch.tensor(values, dtype=torch.float64, device="cpu")
    if sample.numel() == 0 or not bool(sample.isfinite().all()):
        raise InputError(f"{sample.numel()} values; an interval needs at least one, and finite ones.")
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(sample), (resamples, len(sample)), generator=generator, device="cpu")
    tail = (1 - confidence) / 2
    quantiles = sample.new_tensor([tail, 1 - tail])
    low, high = torch.quantile(sample[draws].mean(1), quantiles).tolist()
    return MeanInterval(float(sample.mean()), low, high, len(sample))
