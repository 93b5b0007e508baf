"""`docs/evidence/<study>.md`: the models, tables and claims of one study, written from its record."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from evidence.claims import HERE, VERDICTS
from evidence.record import Numbers
from evidence.study import Study, View

GROUPS = {"papers": False, "this library": True}
"""The two tables of claims of a study, by whether their source is this library."""

LISTED = 4
"""Most comparisons that the reason of a verdict lists."""


def study_page(study: Study, record: Numbers) -> str:
    """Return the page of a recorded study."""
    paragraphs = [f"# {study.title}", study.question, f"Source: {study.source}.", study.text.strip(), _training(record)]
    paragraphs.append(f"![{study.caption}]({study.name}.png)\n\n{study.caption}")
    paragraphs += [*(_table(view, record) for view in study.views), study.remark(record)]
    size = f", n = {size_text(study, record)}"
    paragraphs += [claims_table(label, claims, record, size) for label, claims in by_source(record).items()]
    paragraphs.append("[How verdicts are made](../evidence.md#how-it-is-measured)")
    return "\n\n".join(text for text in paragraphs if text) + "\n"


def by_source(record: Numbers) -> dict[str, list[int]]:
    """Return the claims of papers and those of this library, by their positions in the record."""
    ours = [claim["source"] == HERE for claim in record["claims"]]
    groups = {label: [at for at, here in enumerate(ours) if here is want] for label, want in GROUPS.items()}
    return {label: claims for label, claims in groups.items() if claims}


def _training(record: Numbers) -> str:
    models: dict[str, list[Mapping[str, Any]]] = {}
    for row in record["training"]:
        models.setdefault(row["model"], []).append(row)
    if not models:
        return ""
    lines = ["| model | class | parameters | steps | accuracy |", "| --- | --- | --- | --- | --- |"]
    for name, rows in models.items():
        accuracies = ", ".join(f"{100 * row['accuracy']:.1f}" for row in rows)
        one = rows[0]
        lines.append(
            f"| {name} | {one['class']} | {one['parameters']:,} | {one['recipe']['steps']:,} of "
            f"{one['recipe']['batch']} | {accuracies} % |"
        )
    return "\n".join(lines)


def _table(view: View, record: Numbers) -> str:
    """Return a table with a row for each method, and the numbers of papers beside ours."""
    cells: dict[str, dict[str, list[float]]] = {}
    for row in record["numbers"]:
        for model, metric, heading in view.columns:
            if (row["table"], row["model"], row["metric"]) == (view.table, model, metric):
                cells.setdefault(row["method"], {})[heading] = row["values"]
    headings = [heading for _, _, heading in view.columns]
    lines = [
        f"| {' | '.join(['method', *headings, *view.paper])} |",
        f"|{' --- |' * (1 + len(headings) + len(view.paper))}",
    ]
    methods = [*cells, *dict.fromkeys(name for column in view.paper.values() for name in column if name not in cells)]
    for method in methods:
        ours = [_number(cells.get(method, {}).get(heading)) for heading in headings]
        papers = [column.get(method, "") for column in view.paper.values()]
        lines.append(f"| {' | '.join([method, *ours, *papers])} |")
    counts = [row["samples"] for row in record["numbers"] if row["table"] == view.table]
    title = f"**{view.title}, n = {_count(counts)}{_times(record)}**"
    return "\n".join([title, "", *lines, *(["", view.note] if view.note else [])])


def _number(values: Sequence[float] | None) -> str:
    if values is None:
        return ""
    mean = fmean(values)
    digits = 3 if abs(mean) < 10 else 1
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    spread = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def claims_table(label: str, claims: Sequence[int], record: Numbers, size: str = "") -> str:
    """Return the table of some claims of a record, by their positions; `size` follows its title."""
    rows = [row for row in record["outcomes"] if row["claim"] in claims]
    level = f"; intervals of {100 * rows[0]['level']:.4g} %" if rows else ""
    lines = [
        f"**Claims of {label}{size}{level}**",
        "",
        "| claim | source | verdict | numbers |",
        "| --- | --- | --- | --- |",
    ]
    for at in claims:
        claim = record["claims"][at]
        verdict = f"**{claim['verdict']}**" if claim["verdict"] != "not tested" else claim["verdict"]
        numbers = reason([row for row in rows if row["claim"] == at], "<br>") or claim["untested"]
        lines.append(f"| {claim['text']} | {claim['source']} | {verdict} | {numbers} |")
    return "\n".join(lines)


def reason(rows: Sequence[Mapping[str, Any]], separator: str = "; ") -> str:
    """Return the comparisons of a claim in words: all of a few, or their counts and those that decide."""
    order = {verdict: at for at, verdict in enumerate(("contradicted", "inconclusive", "holds"))}
    shown = separator.join(map(_outcome, sorted(rows, key=lambda row: order[row["verdict"]])[:LISTED]))
    if len(rows) <= LISTED:
        return shown
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"{len(rows)} comparisons: {listed}; of these:{separator.lstrip(';')}{shown}"


def _outcome(row: Mapping[str, Any]) -> str:
    numbers = f"{row['effect']:+.3g} [{row['low']:+.3g}, {row['high']:+.3g}]"
    return f"{row['quantity']} {row['relation']} {row['bound']:g}: {row['verdict']}, {numbers}, n = {_samples(row)}"


def _samples(row: Mapping[str, Any]) -> str:
    samples = row["samples"]
    if len(samples) == 1:
        return str(samples[0])
    return f"{samples[0]} x {len(samples)}" if len(set(samples)) == 1 else " + ".join(map(str, samples))


def size_text(study: Study, record: Numbers) -> str:
    """Return the number of samples of each seed in words."""
    scored = record["size"]["scored"]
    return f"{len(record['seeds'])} seeds" if scored == 1 else f"{scored} {study.unit}{_times(record)}"


def _times(record: Numbers) -> str:
    """Return the number of seeds as a factor; nothing for models that are trained once."""
    seeds = len(record["seeds"])
    return f" x {seeds} seeds" if seeds > 1 else ""


def _count(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
