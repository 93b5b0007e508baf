"""`docs/evidence.md`, written from the recorded numbers."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from evidence.overview import overview
from evidence.record import Numbers
from evidence.study import Study, View

INTRODUCTION = """# Evidence

Which method finds the truth, on which architecture? Each study below trains small models on data with a known answer,
scores the methods against it, and checks the claims of the papers and of this library by code. No conclusion on this
page is written by hand: a verdict follows from the numbers, and a claim that the data cannot test says so.

`make evidence` repeats everything from the shipped weights in `evidence/weights`, `make evidence ARGS="--train"` from
random weights; `ARGS="--write"` records the numbers and writes this page. A study is one file in `evidence/`.

- Every model is trained from {seeds} seeds. A number is the mean over seeds, with the standard deviation after ±.
- The scored samples are drawn from a seed of their own, and the layer of a method that keeps its layers is chosen on
  others.
- One method is better than another if the 95 % interval of the difference, by a bootstrap over paired samples, excludes
  zero. A claim holds if that is so for every seed of every model that it names; the reason has the counts.
- Baselines that ignore the model stand beside the methods: a method that does not beat them explains nothing.
"""


def page(studies: Sequence[Study], records: Mapping[str, Numbers], absent: Sequence[str] = ()) -> str:
    """Return the page of the recorded studies; `absent` are the titles of the others."""
    shown = [study for study in studies if study.name in records]
    seeds = max(len(records[study.name]["seeds"]) for study in shown)
    parts = [INTRODUCTION.format(seeds=_word(seeds)), overview(records), _verdicts(shown, records, absent)]
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
        "| study | claims | hold | do not hold | not tested |",
        "| --- | --- | --- | --- | --- |",
    ]
    for study in studies:
        claims = records[study.name]["claims"]
        counts = [sum(claim["verdict"] == verdict for claim in claims) for verdict in VERDICTS]
        lines.append(f"| [{study.title}](#{_anchor(study.title)}) | {len(claims)} | {' | '.join(map(str, counts))} |")
    if absent:
        lines += ["", f"Written and not recorded yet, because models are not trained: {', '.join(absent)}."]
    return "\n".join(lines) + "\n"


VERDICTS = ("holds", "does not hold", "not tested")


def _section(study: Study, record: Numbers) -> str:
    parts = [f"## {study.title}", f"Source: {study.source}.", study.text.strip(), _training(record)]
    parts.append(f"![{study.caption}](evidence/{study.name}.png)\n\n{study.caption}")
    parts += [_table(view, record) for view in study.views]
    parts.append(_claims(record))
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
    return "\n".join([f"**{view.title}**", "", *lines, *(["", view.note] if view.note else [])])


def _number(values: Sequence[float] | None) -> str:
    if values is None:
        return ""
    mean = fmean(values)
    digits = 3 if abs(mean) < 10 else 1
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    spread = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def _claims(record: Numbers) -> str:
    lines = ["| claim | source | verdict | numbers |", "| --- | --- | --- | --- |"]
    for claim in record["claims"]:
        verdict = f"**{claim['verdict']}**" if claim["verdict"] != "not tested" else claim["verdict"]
        lines.append(f"| {claim['text']} | {claim['source']} | {verdict} | {claim['reason']} |")
    return "\n".join(lines)


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def _word(count: int) -> str:
    return {1: "one", 2: "two", 3: "three"}.get(count, str(count))
