"""`docs/evidence.md`, written from the recorded numbers."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from evidence.bootstrap import RESAMPLES
from evidence.claims import HERE, VERDICTS
from evidence.overview import overview
from evidence.record import Numbers
from evidence.study import Study, View

INTRODUCTION = """# Evidence

Which method finds the truth, on which architecture? Each study below trains small models on data with a known answer,
scores the methods against it, and checks the claims of the papers and of this library by code. No conclusion on this
page is written by hand: a verdict follows from the numbers, and a claim that the data cannot test says so.

`make evidence` repeats everything from the shipped weights in `evidence/weights`, `make evidence ARGS="--train"` from
random weights; `ARGS="--write"` records the numbers and writes this page. A study is one file in `evidence/`.

- Every model is trained from {seeds} seeds. A number is the mean over seeds, with the standard deviation after ±. A
  heading has the number of samples of each seed.
- The models of each seed are scored on samples that no model is trained on, and the layer of a method that keeps its
  layers is chosen on others.
- A claim is one comparison or several. A comparison *holds* if the interval of its number lies on the side of the bound
  that it names, is *contradicted* if the interval lies on the other side, and *inconclusive* if the bound is within. A
  claim holds if all its comparisons do, is contradicted if one is, and inconclusive otherwise.
- Intervals are those of one hierarchical bootstrap of {resamples:,} resamples: {seeds} seeds are drawn with
  replacement, and the samples of each, the same ones for the two sides of a difference and for every seed, since seeds
  may share their samples. Their level is Bonferroni's: 1 - 0.05 / m for the m comparisons of a study, so that all its
  intervals hold together with 95 %. A comparison of n samples a seed is inconclusive if 0.05 / m is below 2^(1 - n),
  the smallest p-value of their signs. Numbers that are equal in all samples have an interval without width.
- Three seeds are few. One resample in 27 has a certain seed only, so at these levels an interval covers the samples of
  the weakest seed: no claim holds against one of its seeds. The between-seed spread is that of the trained models; a
  verdict is about them and new samples, and no test of three trainings could reject at less than 1/4 for a fourth.
- Baselines that ignore the model stand beside the methods: a method that does not beat them explains nothing.
- `evidence/results` has every comparison as a row (`outcomes`), and the numbers of the samples that it follows from.
"""


GROUPS = {"papers": False, "this library": True}
"""The two tables of claims of a study, by whether their source is this library."""

LISTED = 4
"""Most comparisons that the reason of a verdict lists."""


def page(studies: Sequence[Study], records: Mapping[str, Numbers], absent: Sequence[str] = ()) -> str:
    """Return the page of the recorded studies; `absent` are the titles of the others."""
    shown = [study for study in studies if study.name in records]
    seeds = max(len(records[study.name]["seeds"]) for study in shown)
    parts = [
        INTRODUCTION.format(seeds=_word(seeds), resamples=RESAMPLES),
        overview(records),
        _verdicts(shown, records, absent),
    ]
    parts += [_section(study, records[study.name]) for study in shown]
    machine = records[shown[0].name]["machine"]
    minutes = sum(records[study.name]["seconds"] for study in shown) / 60
    trained = [row["cpu_seconds"] for study in shown for row in records[study.name]["training"]]
    parts.append(
        "## Cost\n\n"
        f"The evaluation took {minutes:.0f} minutes of one core in all ({machine['cpu']}; Python {machine['python']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}), the training of the {len(trained)} models "
        f"{sum(trained) / 60:.0f} minutes."
    )
    return "\n".join(parts).rstrip() + "\n"


def _verdicts(studies: Sequence[Study], records: Mapping[str, Numbers], absent: Sequence[str]) -> str:
    lines = [
        "## Verdicts",
        "",
        f"| study | n | claims of | {' | '.join(VERDICTS)} |",
        f"|{' --- |' * (3 + len(VERDICTS))}",
    ]
    for study in studies:
        record = records[study.name]
        for label, claims in _by_source(record).items():
            counts = [sum(record["claims"][at]["verdict"] == verdict for at in claims) for verdict in VERDICTS]
            link = f"[{study.title}](#{_anchor(study.title)})"
            lines.append(f"| {link} | {_size(study, record)} | {label} | {' | '.join(map(str, counts))} |")
    if absent:
        lines += ["", f"Written and not recorded yet, because models are not trained: {', '.join(absent)}."]
    return "\n".join(lines) + "\n"


def _by_source(record: Numbers) -> dict[str, list[int]]:
    """Return the claims of papers and those of this library, by their positions in the record."""
    ours = [claim["source"] == HERE for claim in record["claims"]]
    groups = {label: [at for at, here in enumerate(ours) if here is want] for label, want in GROUPS.items()}
    return {label: claims for label, claims in groups.items() if claims}


def _section(study: Study, record: Numbers) -> str:
    parts = [f"## {study.title}", f"Source: {study.source}.", study.text.strip(), _training(record)]
    parts.append(f"![{study.caption}](evidence/{study.name}.png)\n\n{study.caption}")
    parts += [*(_table(view, record) for view in study.views), study.remark(record)]
    parts += [_claims(label, claims, study, record) for label, claims in _by_source(record).items()]
    return "\n\n".join(part for part in parts if part) + "\n"


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
    """Return a table with a row for each method; the best number of a column is bold."""
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
    title = f"**{view.title}, n = {_count(counts)} x {len(record['seeds'])} seeds**"
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


def _claims(label: str, claims: Sequence[int], study: Study, record: Numbers) -> str:
    rows = [row for row in record["outcomes"] if row["claim"] in claims]
    level = f"; intervals of {100 * rows[0]['level']:.4g} %" if rows else ""
    lines = [
        f"**Claims of {label}, n = {_size(study, record)}{level}**",
        "",
        "| claim | source | verdict | numbers |",
        "| --- | --- | --- | --- |",
    ]
    for at in claims:
        claim = record["claims"][at]
        verdict = f"**{claim['verdict']}**" if claim["verdict"] != "not tested" else claim["verdict"]
        numbers = reason([row for row in rows if row["claim"] == at]) or claim["untested"]
        lines.append(f"| {claim['text']} | {claim['source']} | {verdict} | {numbers} |")
    return "\n".join(lines)


def reason(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the comparisons of a claim in words: all of a few, or their counts and those that decide."""
    order = {verdict: at for at, verdict in enumerate(("contradicted", "inconclusive", "holds"))}
    shown = "; ".join(map(_outcome, sorted(rows, key=lambda row: order[row["verdict"]])[:LISTED]))
    if len(rows) <= LISTED:
        return shown
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"{len(rows)} comparisons: {listed}; of these: {shown}"


def _outcome(row: Mapping[str, Any]) -> str:
    numbers = f"{row['effect']:+.3g} [{row['low']:+.3g}, {row['high']:+.3g}]"
    return f"{row['quantity']} {row['relation']} {row['bound']:g}: {row['verdict']}, {numbers}, n = {_samples(row)}"


def _samples(row: Mapping[str, Any]) -> str:
    samples = row["samples"]
    return f"{samples[0]} x {len(samples)}" if len(set(samples)) == 1 else " + ".join(map(str, samples))


def _size(study: Study, record: Numbers) -> str:
    scored, seeds = record["size"]["scored"], f"{len(record['seeds'])} seeds"
    return seeds if scored == 1 else f"{scored} {study.unit} x {seeds}"


def _count(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def _word(count: int) -> str:
    return {1: "one", 2: "two", 3: "three"}.get(count, str(count))
