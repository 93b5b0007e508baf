"""`docs/evidence.md`: the default of each kind of model, one table of all tasks, and each study in short."""

from collections.abc import Mapping, Sequence

from evidence import real_page
from evidence.bootstrap import RESAMPLES
from evidence.claims import VERDICTS
from evidence.overview import overview
from evidence.record import Numbers
from evidence.study import Study
from evidence.study_page import by_source, size_text

INTRODUCTION = """# Evidence

Which method finds the truth, on which model? Code writes the numbers and verdicts of these pages, each verdict from its
numbers, and a claim that the data cannot test says so.
"""

MEASURED = """## How it is measured

`make evidence` repeats everything from the shipped weights in `evidence/weights`, `make evidence ARGS="--train"` from
random weights; `ARGS="--write"` records the numbers and writes these pages. A study is one file in `evidence/`.

- Every model is trained from {seeds} seeds. A number is the mean over seeds, with the standard deviation after ±. A
  heading has the number of samples of each seed.
- The language models of text are trained once: their n counts prompts, over which their intervals are.
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

DECIDED = ("holds", "contradicted")
"""Verdicts whose claims are listed for each study."""


def page(studies: Sequence[Study], records: Mapping[str, Numbers], absent: Sequence[str] = ()) -> str:
    """Return the page of the recorded studies; `absent` are the titles of the others."""
    shown = [study for study in studies if study.name in records]
    seeds = max(len(records[study.name]["seeds"]) for study in shown)
    return "\n".join(
        [
            INTRODUCTION,
            real_page.kinds("methods/", "howto/"),
            "",
            f"The numbers are those of [pretrained checkpoints](evidence/{real_page.NAME}.md), on inputs that chose "
            "nothing, with 95 % intervals:",
            "",
            f"![{real_page.CAPTION}](evidence/{real_page.NAME}.png)",
            "",
            overview(records),
            _verdicts(shown, records, absent),
            *(_in_short(study, records[study.name]) for study in shown),
            MEASURED.format(seeds=_word(seeds), resamples=RESAMPLES),
            _cost(shown, records),
        ]
    )


def _verdicts(studies: Sequence[Study], records: Mapping[str, Numbers], absent: Sequence[str]) -> str:
    lines = [
        "## Studies",
        "",
        f"| study | n | claims of | {' | '.join(VERDICTS)} |",
        f"|{' --- |' * (3 + len(VERDICTS))}",
    ]
    for study in studies:
        record = records[study.name]
        lines += counted(study.title, f"{study.name}.md", size_text(study, record), record)
    for name, record in real_page.sections().items():
        section = real_page.SECTIONS[name]
        lines += counted(section.title, f"{real_page.NAME}.md", section.size_text(record), record)
    if absent:
        lines += ["", f"Written and not recorded yet, because models are not trained: {', '.join(absent)}."]
    return "\n".join(lines) + "\n"


def counted(title: str, file: str, size: str, record: Numbers) -> list[str]:
    """Return the rows of a study, or of a section, with its numbers of claims by verdict."""
    lines = []
    for label, claims in by_source(record).items():
        counts = [sum(record["claims"][at]["verdict"] == verdict for at in claims) for verdict in VERDICTS]
        lines.append(f"| [{title}](evidence/{file}) | {size} | {label} | {' | '.join(map(str, counts))} |")
    return lines


def _in_short(study: Study, record: Numbers) -> str:
    """Return the question of a study, its picture, and its claims that are decided."""
    lines = [
        f"### {study.title}",
        "",
        f"{study.question} [Numbers and claims](evidence/{study.name}.md).",
        "",
        f"![{study.title}](evidence/{study.name}.png)",
        "",
    ]
    for verdict in DECIDED:
        for label, claims in by_source(record).items():
            texts = [record["claims"][at]["text"] for at in claims if record["claims"][at]["verdict"] == verdict]
            lines += [f"- Of {label}, {verdict}: {text}." for text in texts]
    if lines[-1]:
        lines.append("")
    return "\n".join(lines)


def _cost(studies: Sequence[Study], records: Mapping[str, Numbers]) -> str:
    machine = records[studies[0].name]["machine"]
    minutes = sum(records[study.name]["seconds"] for study in studies) / 60
    trained = [row["cpu_seconds"] for study in studies for row in records[study.name]["training"]]
    return (
        "## Cost\n\n"
        f"The evaluation took {minutes:.0f} minutes of one core in all ({machine['cpu']}; Python {machine['python']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}), the training of the {len(trained)} models "
        f"{sum(trained) / 60:.0f} minutes.\n"
    )


def _word(count: int) -> str:
    return {1: "one", 2: "two", 3: "three"}.get(count, str(count))
