"""Claims and their verdicts, which are derived from the numbers of several seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

import numpy as np

from unilinattn.errors import InputError
from unilinattn.evaluation import Table
from unilinattn.evaluation.table import PARTS, pool
from unilinattn.optional import import_extra

Verdict = Literal["holds", "does not hold", "not tested"]

RESAMPLES = 2000
"""Resamples of a bootstrap."""

LISTED = 4
"""Most parts of a claim that its reason lists."""

CONFIDENCE = 0.95
"""Confidence level of the intervals."""


@dataclass(frozen=True)
class Claim:
    """A statement and its verdict.

    Attributes:
        text: the statement.
        source: the paper and its table or section; "here" for a statement of this library.
        verdict: "holds", "does not hold" or "not tested".
        reason: the numbers behind the verdict, or why the claim is not tested.
    """

    text: str
    source: str
    verdict: Verdict
    reason: str

    @classmethod
    def untested(cls, text: str, source: str, reason: str) -> "Claim":
        """Return a claim of a paper that nothing here tests."""
        return cls(text, source, "not tested", reason)

    @classmethod
    def of(cls, text: str, source: str, *outcomes: "Outcome") -> "Claim":
        """Return a claim that holds if each outcome does."""
        failing = [outcome for outcome in outcomes if not outcome.holds]
        verdict: Verdict = "does not hold" if failing else "holds"
        if len(outcomes) <= LISTED:
            return cls(text, source, verdict, "; ".join(map(str, outcomes)))
        listed = "; ".join(map(str, failing[:LISTED]))
        more = f"; and {len(failing) - LISTED} more" if len(failing) > LISTED else ""
        count = f"{len(outcomes) - len(failing)} of {len(outcomes)} comparisons hold"
        return cls(text, source, verdict, f"{count}{f', but not: {listed}{more}' if failing else ''}")


@dataclass(frozen=True)
class Outcome:
    """A part of a claim: whether it holds, and the numbers in words."""

    holds: bool
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Results:
    """The numbers of a study: tables by name and seed.

    Raises `InputError` from each method if there is no such number.
    """

    tables: Mapping[str, Mapping[int, Table]]

    @property
    def seeds(self) -> list[int]:
        """The seeds."""
        return sorted({seed for tables in self.tables.values() for seed in tables})

    @cached_property
    def _rows(self) -> Mapping[tuple[Any, ...], list[Mapping[str, Any]]]:
        rows: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for name, tables in self.tables.items():
            for seed, table in tables.items():
                for row in table:
                    rows.setdefault((name, seed, row["model"], row["method"], row["metric"]), []).append(row)
        return rows

    def rows(self, table: str, seed: int, model: str, method: str, metric: str) -> list[Mapping[str, Any]]:
        """Return the rows of all samples."""
        key = (table, seed, model, method, metric)
        if key not in self._rows:
            raise InputError(f"no numbers of {metric} for {method} on {model}, seed {seed}, in table {table!r}.")
        return self._rows[key]

    def values(self, table: str, model: str, method: str, metric: str) -> list[float]:
        """Return a metric over all samples, for each seed."""
        return [
            pool([row[PARTS] for row in self.rows(table, seed, model, method, metric)]) for seed in self.tables[table]
        ]

    def better(
        self,
        table: str,
        metric: str,
        method: str,
        than: str,
        models: Sequence[str],
        *,
        larger: bool = True,
    ) -> Outcome:
        """Return whether a method is better than another for every model and seed.

        It is better if the confidence interval of the difference, by a bootstrap over paired samples, excludes zero.
        `larger`: whether larger values of the metric are better.
        """
        sign = 1 if larger else -1
        intervals, differences = [], []
        for model in models:
            for seed in self.tables[table]:
                pair = [self.rows(table, seed, model, name, metric) for name in (method, than)]
                if [row["sample"] for row in pair[0]] != [row["sample"] for row in pair[1]]:
                    raise InputError(f"{method} and {than} on {model} were measured on different samples.")
                first, second = ([row[PARTS] for row in rows] for rows in pair)
                differences.append(pool(first) - pool(second))
                intervals.append(paired_interval(first, second))
        wins = sum(min(sign * low, sign * high) > 0 for low, high in intervals)
        losses = sum(max(sign * low, sign * high) < 0 for low, high in intervals)
        count = len(intervals)
        text = (
            f"`{method}` against `{than}` by {metric}: better in {wins} of {count}, worse in {losses}, "
            f"mean difference {fmean(differences):+.3f}"
        )
        return Outcome(wins == count, text)

    def within(
        self, table: str, metric: str, method: str, other: str, models: Sequence[str], *, most: float
    ) -> Outcome:
        """Return whether a metric of a method exceeds that of another by less than `most`, for every model and seed."""
        gaps = [
            a - b
            for model in models
            for a, b in zip(
                self.values(table, model, method, metric), self.values(table, model, other, metric), strict=True
            )
        ]
        passed = sum(gap < most for gap in gaps)
        text = f"`{method}` less `{other}` by {metric} below {most}: {passed} of {len(gaps)} (mean {fmean(gaps):+.3f})"
        return Outcome(passed == len(gaps), text)

    def every(
        self, table: str, metric: str, method: str, models: Sequence[str], test: Callable[[float], bool], text: str
    ) -> Outcome:
        """Return whether a metric passes a test for every model and seed; `text` names the test."""
        values = {model: self.values(table, model, method, metric) for model in models}
        passed = sum(test(value) for of_model in values.values() for value in of_model)
        count = sum(map(len, values.values()))
        means = ", ".join(f"{model} {fmean(of_model):.3g}".strip() for model, of_model in values.items())
        return Outcome(passed == count, f"{text}: {passed} of {count} ({means})")


def paired_interval(
    first: Sequence[Sequence[Sequence[float]]], second: Sequence[Sequence[Sequence[float]]]
) -> tuple[float, float]:
    """Return the confidence interval of the difference of a metric between two methods on the same samples.

    Samples are drawn with replacement, both methods' together, and the metric of each draw is that of the pooled parts
    (`evaluation.table.pool`): the percentile bootstrap of Efron and Tibshirani, "An Introduction to the Bootstrap"
    (1993), 13.
    """
    bootstrap = import_extra("scipy.stats", "evidence").bootstrap
    parts = np.array([first, second], dtype=np.float64)
    samples = np.arange(parts.shape[1])

    def difference(drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        # (method, part, numerator or denominator, draw, sample)
        sums = np.moveaxis(parts, 1, -1)[..., drawn].sum(-1)
        ratios = (sums[:, :, 0] / sums[:, :, 1]).mean(1)
        return ratios[0] - ratios[1]

    found = bootstrap(
        (samples,),
        difference,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        batch=256,
        rng=np.random.default_rng(0),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
