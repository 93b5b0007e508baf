"""Comparisons of measured numbers, the parts of claims."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Relation = Literal[">", "<", "≥", "≤"]


class Term(NamedTuple):
    """A number of a table: a metric of a method on a model, over all samples of a seed and all seeds."""

    table: str
    model: str
    method: str
    metric: str


@dataclass(frozen=True)
class Comparison:
    """A weighted sum of numbers that stands in a relation to a bound.

    Attributes:
        quantity: the sum in words.
        terms: pairs of a weight and a number.
        relation: the relation of the sum to the bound.
        bound: the bound.
    """

    quantity: str
    terms: tuple[tuple[float, Term], ...]
    relation: Relation
    bound: float = 0.0

    def verdict(self, low: float, high: float) -> str:
        """Return whether an interval of the sum lies on the side of the bound that the relation names."""
        if self.relation in "<≤":
            low, high = -high, -low
        bound = -self.bound if self.relation in "<≤" else self.bound
        if low > bound or (self.relation in "≥≤" and low == bound):
            return "holds"
        return "contradicted" if high < bound else "inconclusive"


def better(
    table: str, metric: str, method: str, than: str, models: Sequence[str], *, larger: bool = True
) -> list[Comparison]:
    """Return for each model that a method is better than another; `larger`: whether larger numbers are."""
    return [between(table, metric, method, model, model, than, larger=larger) for model in models]


def between(
    table: str,
    metric: str,
    method: str,
    model: str,
    than: str,
    other: str | None = None,
    *,
    larger: bool = True,
) -> Comparison:
    """Return that a method has a better number on one model than it, or `other`, on the model `than`."""
    other = method if other is None else other
    where = f" on {model}" if model else ""
    quantity = (
        f"{metric}, `{method}` less `{other}`{where}"
        if model == than
        else f"{metric}, `{method}`{where} less `{other}` on {than}"
    )
    terms = (1.0, Term(table, model, method, metric)), (-1.0, Term(table, than, other, metric))
    return Comparison(quantity, terms, ">" if larger else "<")


def within(table: str, metric: str, method: str, other: str, models: Sequence[str], *, most: float) -> list[Comparison]:
    """Return for each model that a metric of a method exceeds that of another by no more than `most`."""
    return [Comparison(pair.quantity, pair.terms, "≤", most) for pair in better(table, metric, method, other, models)]


def bounded(
    table: str, metric: str, method: str, models: Sequence[str], relation: Relation, bound: float
) -> list[Comparison]:
    """Return for each model that a number of a method stands in a relation to a bound."""
    return [
        Comparison(
            f"{metric}, `{method}`{f' on {model}' if model else ''}",
            ((1.0, Term(table, model, method, metric)),),
            relation,
            bound,
        )
        for model in models
    ]
