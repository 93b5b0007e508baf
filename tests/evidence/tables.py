"""Tables of made numbers, for the verdicts of claims."""

from collections.abc import Callable, Iterable, Sequence

from evidence.claims import Claim, Results, outcomes, verdict
from unilinattn.evaluation import Table
from unilinattn.evaluation.table import PARTS

Value = Callable[[str, str], float]
"""A number for a method and a metric."""


def made(tables: dict[str, tuple[Iterable[str], Iterable[str], Iterable[str]]], value: Value) -> Results:
    """Return results of two seeds and twenty samples: for each table its models, methods and metrics."""

    def rows(models: Iterable[str], methods: Iterable[str], metrics: Iterable[str]) -> Table:
        found = []
        for model in models:
            for method in methods:
                for metric in metrics:
                    for sample in range(20):
                        number = value(method, metric) + 0.001 * sample
                        row = {"model": model, "method": method, "layer": "", "sample": str(sample), "metric": metric}
                        found.append({**row, "value": number, PARTS: [[number, 1.0]]})
        return Table(found)

    return Results({name: {seed: rows(*parts) for seed in (0, 1)} for name, parts in tables.items()})


def verdicts(claims: Sequence[Claim], results: Results) -> dict[str, str]:
    """Return the verdict of each claim, by its text and source."""
    rows = outcomes(claims, results)
    return {
        f"{claim.text} {claim.source}": verdict(claim, [row for row in rows if row["claim"] == at])
        for at, claim in enumerate(claims)
    }


def without(claims: Sequence[Claim], table: str) -> list[Claim]:
    """Return the claims without a number of a table."""
    return [claim for claim in claims if all(term.table != table for one in claim.comparisons for _, term in one.terms)]
