"""Evaluate the studies from the shipped weights, and say which claims hold.

python -m evidence                      every recorded study, from the shipped weights, compared with the record
python -m evidence copying --train      train the models of one study first
python -m evidence real                 methods on pretrained checkpoints that pip fetches, or on those named after it
python -m evidence --quick              one seed and few samples, compared with the recorded numbers
python -m evidence --write              record the numbers, and write docs/evidence.md and its pages with pictures
python -m evidence --page               write these pages from the recorded numbers

`torchrun --nproc-per-node 2 -m evidence` spreads the work over two processes. An interrupted run continues.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.machine import machine
from evidence import NAMES, real, real_page, record, study
from evidence.claims import Results, outcomes, verdict
from evidence.page import page
from evidence.study import FOLDER, SEEDS, Study
from evidence.study_page import reason, study_page
from evidence.training import fingerprint
from evidence.training import record as training_record
from tools.markers import replace_section
from unilinattn.errors import UnilinattnError
from unilinattn.evaluation import Table
from unilinattn.evaluation.processes import Processes, apart
from unilinattn.kernels.backend import using

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS = FOLDER / "weights"
DOCS = FOLDER.parent / "docs"

Job = tuple[str, str, int]
"""A study, a model and a seed."""


def train(studies: Sequence[Study], weights: Path, processes: Processes) -> None:
    """Train every model of the studies that `weights` lacks or has of another recipe, spread over the processes."""
    jobs = {(one.name, model, seed): one for one in studies for model in one.models for seed in SEEDS}

    def path(key: Job) -> Path:
        return jobs[key].path(weights, *key[1:])

    def run(keys: Sequence[Job]) -> dict[Job, bool]:
        for key in keys:
            jobs[key].train(*key[1:], path(key))
        return dict.fromkeys(keys, True)

    # Long trainings first, so that the processes end at about the same time.
    longest = sorted(jobs, key=lambda key: -jobs[key].models[key[1]].recipe.samples)
    processes.spread(longest, lambda key: jobs[key].is_trained(key[1], path(key)) or None, run)


def measured(one: Study, weights: Path, out: Path, *, quick: bool) -> dict[str, dict[int, Table]]:
    """Return the tables of a study by name and seed; numbers that an interrupted run has stored are not measured again.

    They are stored by the weights of the models, so those of other weights are measured anew.
    """
    tables: dict[str, dict[int, Table]] = {}
    for seed in SEEDS[:1] if quick else SEEDS:
        hosts = one.hosts(weights, seed)
        folder = out / ("quick" if quick else "full") / one.name / f"{seed}-{fingerprint(hosts)}"
        with using(one.kernels):
            measured = one.measure(hosts, seed, one.quick if quick else one.size, folder)
        for name, table in measured.items():
            tables.setdefault(name, {})[seed] = table
    return tables


def repeat_quickly(studies: Sequence[Study], weights: Path, out: Path, processes: Processes) -> bool:
    """Compare the numbers of a quick run with the recorded ones; return whether they agree.

    A process takes whole studies, whose parts are too few to fill several processes alike.
    """
    by_name = {one.name: one for one in studies}

    def compare(names: Sequence[str]) -> dict[str, bool]:
        with apart():
            return {name: _repeats(by_name[name], weights, out) for name in names}

    return all(processes.spread(list(by_name), lambda name: None, compare).values())


def _repeats(one: Study, weights: Path, out: Path) -> bool:
    start = time.perf_counter()
    numbers = record.summaries(measured(one, weights, out, quick=True))
    count, different = record.differences(numbers, record.read(one.name)["quick"])
    summary = (
        f"{one.name}: {count - len(different)} of {count} numbers as recorded, {time.perf_counter() - start:.0f} s"
    )
    print("\n  ".join([summary, *different]), flush=True)
    return len(different) <= record.DIFFERENT_SHARE * count


def evaluate(one: Study, weights: Path, out: Path, processes: Processes, say: Any) -> tuple[Results, float]:
    """Measure a study, print its tables and verdicts, and return its numbers and the CPU seconds of all processes."""
    start = time.process_time()
    results = Results(measured(one, weights, out, quick=False))
    seconds = sum(processes.gather(time.process_time() - start))
    say(f"\n{one.title}")
    for name, tables in results.tables.items():
        say(f"\n{name}, seed {min(tables)}\n{tables[min(tables)]}")
    say("")
    claims = one.claims(results)
    rows = outcomes(claims, results)
    for at, claim in enumerate(claims):
        of_claim = [row for row in rows if row["claim"] == at]
        say(f"{verdict(claim, of_claim)}: {claim.text} ({claim.source})\n  {reason(of_claim) or claim.untested}")
    return results, seconds


def compared(one: Study, results: Results) -> str:
    """Return how many numbers of a study are as recorded, and those that differ, in words."""
    count, different = record.differences(record.summaries(results.tables), record.read(one.name)["numbers"])
    summary = f"{one.name}: {count - len(different)} of {count} numbers as recorded"
    return "\n  ".join([summary, *different])


def described(one: Study, results: Results, weights: Path, quick: Any, seconds: float) -> record.Numbers:
    """Return the record of a study: its numbers, those of a quick run, its claims and its training."""
    training = [
        {"model": model, **training_record(one.path(weights, model, seed))} for model in one.models for seed in SEEDS
    ]
    rest = {"machine": machine("cpu"), "seconds": round(seconds)}
    return record.described(one, results, one.claims(results), training, quick, **rest)


def write(one: Study, figure: "Figure", numbers: record.Numbers, weights: Path) -> None:
    """Store a study's record, its picture, and its weights if they are new."""
    if weights != WEIGHTS:
        WEIGHTS.mkdir(exist_ok=True)
        for model in one.models:
            for seed in SEEDS:
                shutil.copyfile(one.path(weights, model, seed), one.path(WEIGHTS, model, seed))
    draw(figure, one.name)
    record.RESULTS.mkdir(exist_ok=True)
    (record.RESULTS / f"{one.name}.json").write_text(record.stored(numbers))


def draw(figure: "Figure", name: str) -> None:
    """Store a picture of the pages."""
    (DOCS / "evidence").mkdir(exist_ok=True)
    figure.savefig(DOCS / "evidence" / f"{name}.png", dpi=110, metadata={"Software": None})


def recorded() -> list[str]:
    """Return the names of the studies whose numbers are recorded."""
    return [name for name in NAMES if (record.RESULTS / f"{name}.json").is_file()]


def absent() -> list[str]:
    """Return the titles of the studies without recorded numbers."""
    return [study(name).title for name in NAMES if name not in recorded()]


def write_pages() -> None:
    """Write the page of the evidence, one of each recorded study, and that of pretrained checkpoints."""
    studies = [study(name) for name in recorded()]
    for path, text in pages(studies).items():
        path.write_text(text)
    index = DOCS / "methods" / "index.md"
    index.write_text(replace_section(index.read_text(), "kinds", real_page.kinds()))


def pages(studies: Sequence[Study]) -> dict[Path, str]:
    """Return the text of each page by its file."""
    records = {one.name: record.read(one.name) for one in studies}
    folder = DOCS / "evidence"
    return {
        DOCS / "evidence.md": page(studies, records, absent()),
        **{folder / f"{one.name}.md": study_page(one, records[one.name]) for one in studies},
        folder / f"{real_page.NAME}.md": real_page.page(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a quick run differs from the recorded numbers, and 2 after an error."""
    parser = argparse.ArgumentParser(
        prog="python -m evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "studies",
        nargs="*",
        metavar="STUDY",
        help=f"by default those that are recorded, with --train all: {', '.join(NAMES)}; or {real.NAME}: "
        "pretrained checkpoints, of which names that follow select some, or one of the sections "
        f"{', '.join(real_page.SECTIONS)}",
    )
    parser.add_argument(
        "--train", action="store_true", help="train the models that OUT/weights lacks, and use these weights"
    )
    parser.add_argument("--quick", action="store_true", help="compare one seed and few samples with the record")
    parser.add_argument("--write", action="store_true", help="record numbers, weights and pictures, and write the page")
    parser.add_argument("--page", action="store_true", help="write the page from the record")
    parser.add_argument("--truths", action="store_true", help="of `real`: measure the effects of tokens again")
    parser.add_argument(
        "--method",
        action="append",
        default=[],
        help="of `real`: a method to score, such as \"lrp (measure='log-odds')\"; repeat it for several",
    )
    parser.add_argument("--out", type=Path, default=Path("evidence-report"), help="folder of intermediate results")
    options = parser.parse_args(arguments)
    # The sums of small products depend on the number of threads.
    torch.set_num_threads(1)
    processes = Processes()
    first = processes.rank == 0

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    try:
        if options.studies[:1] == [real.NAME]:
            names, labels = options.studies[1:], options.method
            real.run(names=names, labels=labels, measure_truths=options.truths, write=options.write)
            if options.write:
                draw(real_page.picture(), real_page.NAME)
                write_pages()
            return 0
        studies = [study(name) for name in options.studies or (NAMES if options.train else recorded())]
        if options.page:
            write_pages()
            return 0
        weights = WEIGHTS
        if options.train:
            weights = options.out / "weights"
            train(studies, weights, processes)
        if options.quick:
            return 0 if repeat_quickly(studies, weights, options.out, processes) else 1
        for one in studies:
            results, seconds = evaluate(one, weights, options.out, processes, say)
            if not options.write and one.name in recorded():
                say(f"\n{compared(one, results)}")
            if options.write:
                quick = record.summaries(measured(one, weights, options.out, quick=True))
                # Pictures explain models, which all processes do together.
                figure = one.picture(one.hosts(weights, SEEDS[0]), results)
                if first:
                    write(one, figure, described(one, results, weights, quick, seconds), weights)
        if options.write and first:
            write_pages()
    except UnilinattnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
