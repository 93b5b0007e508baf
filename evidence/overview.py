"""The table of all tasks at the head of the page: which method finds the known answer, by kind of architecture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from evidence.record import Numbers
from unilinattn.methods.default import CAUSAL


@dataclass(frozen=True)
class Column:
    """The average precision on one task, over the models of one kind.

    Attributes:
        heading: text above the column.
        study: the study's name.
        models: the models, over which numbers are averaged.
        tables: the tables with the numbers; the first that has a method counts.
        metric: the metric's name in the tables.
    """

    heading: str
    study: str
    models: Sequence[str]
    tables: Sequence[str]
    metric: str = "ap"


COLUMNS = (
    Column("photographs, ViM", "vision", ["vim"], ["methods"], "foreground_ap"),
    Column("photographs, ViT", "vision", ["vit"], ["methods"], "foreground_ap"),
    Column("alignment, linear RNNs", "alignment", ["mamba", "mamba2", "gated_deltanet"], ["sentences", "words"]),
    Column("alignment, Transformer", "alignment", ["transformer"], ["sentences", "words"]),
    Column("passkeys, Mamba", "retrieval", ["mamba", "mamba2"], ["passkeys"]),
    Column("passkeys, Transformer", "retrieval", ["transformer"], ["passkeys"]),
    Column("copying, Mamba-2", "copying", ["mamba2"], ["answer"]),
    Column("copying, Transformer", "copying", ["transformer"], ["answer"]),
    Column("induction, Mamba-1", "induction", ["mamba_x1", "mamba_x2"], ["methods"]),
)

METHODS: Mapping[str, Sequence[str]] = {
    "random": ["random"],
    "raw": ["raw, best layer", "raw"],
    "latim": ["latim, best layer", "latim l2"],
    "alti": ["alti, best layer", "alti"],
    "rollout": ["rollout"],
    "attribution": ["attribution"],
    "alti, rolled out": ["alti rollout"],
    "alti_logit": ["alti_logit", "alti logit"],
    "input x gradient": ["input_x_gradient", "input x gradient"],
    "lrp": ["lrp"],
    "attn_lrp": ["attn_lrp"],
    CAUSAL.label: [CAUSAL.label],
    "logit": ["logit"],
}
"""Names of the rows, each with the names that the studies give the method; the first that a table has counts."""


def overview(records: Mapping[str, Numbers]) -> str:
    """Return the section with the table of the recorded studies, whose columns have their best number in bold."""
    columns = [column for column in COLUMNS if column.study in records]
    cells = {
        name: [_mean(records[column.study], column, labels) for column in columns] for name, labels in METHODS.items()
    }
    best = [max(row[at] or 0.0 for row in cells.values()) for at in range(len(columns))]
    lines = [
        "## At a glance",
        "",
        "Average precision of each method for the known answer, 1 if every relevant token is ranked before all others: "
        "means over seeds and models. The best of a column is bold. `raw`, `latim` and `alti` are scored at the layer "
        "that is best on other samples, the other methods over all layers. The pages of the studies have the spread, "
        "further methods and metrics.",
        "",
        f"| method | {' | '.join(column.heading for column in columns)} |",
        f"|{' --- |' * (1 + len(columns))}",
    ]
    for name, row in cells.items():
        texts = [_text(value, value == top) for value, top in zip(row, best, strict=True)]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _mean(record: Numbers, column: Column, labels: Sequence[str]) -> float | None:
    """Return the mean over the models and seeds of a column, to two digits; None if no table has the method."""
    for table in column.tables:
        for label in labels:
            values = [
                value
                for row in record["numbers"]
                if (row["table"], row["method"], row["metric"]) == (table, label, column.metric)
                and row["model"] in column.models
                for value in row["values"]
            ]
            if values:
                return round(fmean(values), 2)
    return None


def _text(value: float | None, best: bool) -> str:
    if value is None:
        return ""
    return f"**{value:.2f}**" if best else f"{value:.2f}"
