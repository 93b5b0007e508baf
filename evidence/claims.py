"""Claims and their verdicts, which are derived from the numbers of several seeds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from evidence import bootstrap
from evidence.bootstrap import Numbers, intervals, pooled
from evidence.comparisons import Comparison, Term
from unilinattn.errors import InputError
from unilinattn.evaluation import Table
from unilinattn.evaluation.table import PARTS, pool

VERDICTS = ("holds", "contradicted", "inconclusive", "not tested")

LEVEL = 0.95
"""Level of the intervals of all comparisons of a study together."""

DECIMALS = 4
"""Decimals of a sample's number, in the verdicts and in the record."""


@dataclass(frozen=True)
class Claim:
    """A statement that holds if all its comparisons do.

    Attributes:
        text: the statement.
        source: the paper and its table or section; `HERE` for a statement of this library.
        comparisons: the comparisons that test it, none for a claim that is not tested.
        untested: the reason for which nothing here tests it.
    """

    text: str
    source: str
    comparisons: tuple[Comparison, ...] = ()
    untested: str = ""

    @classmethod
    def of(cls, text: str, source: str, *comparisons: Comparison | Iterable[Comparison]) -> "Claim":
        """Return a claim with its comparisons, single ones or lists of them."""
        every: list[Comparison] = []
        for entry in comparisons:
            every += [entry] if isinstance(entry, Comparison) else entry
        return cls(text, source, tuple(every))


HERE = "here"
"""The source of a claim of this library."""


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

    def rows(self, term: Term, seed: int) -> list[Mapping[str, Any]]:
        """Return the rows of all samples of a seed."""
        key = (term.table, seed, *term[1:])
        if key not in self._rows:
            raise InputError(
                f"no numbers of {term.metric} for {term.method} on {term.model}, seed {seed}, in table {term.table!r}."
            )
        return self._rows[key]

    def values(self, table: str, model: str, method: str, metric: str) -> list[float]:
        """Return a metric over all samples, for each seed."""
        term = Term(table, model, method, metric)
        return [pool([row[PARTS] for row in self.rows(term, seed)]) for seed in self.tables[table]]

    def names(self, term: Term) -> list[list[str]]:
        """Return the names of the samples of each seed."""
        return [[row["sample"] for row in self.rows(term, seed)] for seed in self.tables[term.table]]

    def numbers(self, term: Term) -> Numbers:
        """Return a metric of each sample, its ratios and their denominators rounded to `DECIMALS`."""
        every = []
        for seed in self.tables[term.table]:
            parts = np.array([row[PARTS] for row in self.rows(term, seed)], dtype=np.float64)
            ratios, weights = (parts[..., 0] / parts[..., 1]).round(DECIMALS), parts[..., 1].round(DECIMALS)
            every.append(np.stack([ratios * weights, weights], -1))
        return every


def outcomes(claims: Sequence[Claim], results: Results) -> list[dict[str, Any]]:
    """Return a row for each comparison of each claim: n, effect, interval, corrected level and verdict.

    The level of an interval is Bonferroni's, 1 - 0.05 / m for the m different comparisons of all claims, so that all
    intervals hold together with 95 %.
    """
    numbers = {term: results.numbers(term) for claim in claims for term in _terms(claim.comparisons)}
    distinct = list(dict.fromkeys(one for claim in claims for one in claim.comparisons))
    level = 1 - (1 - LEVEL) / max(1, len(distinct))
    groups: dict[Any, list[Comparison]] = {}
    for comparison in distinct:
        groups.setdefault(_layout(comparison, numbers, results), []).append(comparison)
    ends: dict[Comparison, tuple[float, float]] = {}
    for group in groups.values():
        sums = [{term: weight for weight, term in one.terms} for one in group]
        measured = {term: numbers[term] for term in _terms(group)}
        ends.update(zip(group, intervals(measured, sums, level, bootstrap.RESAMPLES), strict=True))
    return [
        {
            "claim": at,
            "quantity": one.quantity,
            "terms": [[weight, *term] for weight, term in one.terms],
            "relation": one.relation,
            "bound": one.bound,
            "samples": [len(of_seed) for of_seed in numbers[one.terms[0][1]]],
            "effect": _rounded(sum(weight * pooled(numbers[term]) for weight, term in one.terms)),
            "low": _rounded(ends[one][0]),
            "high": _rounded(ends[one][1]),
            "level": float(f"{level:.6f}"),
            "verdict": one.verdict(*ends[one]) if suffices(numbers[one.terms[0][1]], level) else "inconclusive",
        }
        for at, claim in enumerate(claims)
        for one in claim.comparisons
    ]


def suffices(numbers: Numbers, level: float) -> bool:
    """Return whether the samples of a seed are enough for a verdict at a level.

    A sign test of n samples has no smaller two-sided p-value than 2^(1 - n), and the resamples of fewer samples than it
    needs have no tails. A single number of each seed is exact, and no sample.
    """
    fewest = min(len(of_seed) for of_seed in numbers)
    return fewest == 1 or 2.0 ** (1 - fewest) <= 1 - level


def verdict(claim: Claim, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdict of a claim from the rows of its comparisons.

    It is contradicted by one significant effect the other way, and holds if all its comparisons do.
    """
    if not claim.comparisons:
        return "not tested"
    verdicts = {row["verdict"] for row in rows}
    return "contradicted" if "contradicted" in verdicts else "holds" if verdicts == {"holds"} else "inconclusive"


def _terms(comparisons: Iterable[Comparison]) -> dict[Term, None]:
    return dict.fromkeys(term for one in comparisons for _, term in one.terms)


def _layout(comparison: Comparison, numbers: Mapping[Term, Numbers], results: Results) -> Any:
    """Return the shapes of the numbers of a comparison, by seed.

    Raises `InputError` if its numbers were measured on different samples.
    """
    (_, first), *others = comparison.terms
    for _, other in others:
        if results.names(first) != results.names(other):
            pair = " and ".join(f"{term.method} on {term.model}" for term in (first, other))
            raise InputError(f"{pair} were measured on different samples.")
    return tuple(of_seed.shape for of_seed in numbers[first])


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
