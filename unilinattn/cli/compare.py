"""The command `unilinattn compare`: models side by side."""

import argparse
import textwrap
import time

from tqdm import tqdm

from unilinattn.cli.arguments import METHODS
from unilinattn.evaluation import command, report
from unilinattn.evaluation.side_by_side import Counts, measure, one_thread, select
from unilinattn.optional import import_extra
from unilinattn.registry import method as registered


def run(options: argparse.Namespace) -> None:
    """Measure the trained models side by side, print the table and write the report."""
    for module, extra in (("transformers", "hf"), ("matplotlib.figure", "plot")):
        import_extra(module, extra)
    wanted = [registered(name) for name in command.names(options.methods) or METHODS]
    pairs = select(options.task, command.names(options.models))
    counts = Counts()
    start = time.perf_counter()
    with report.staged(options.out) as folder, one_thread():
        measured = []
        with tqdm(pairs, disable=None, leave=False, unit="model") as progress:
            for task, model in progress:
                progress.set_description(f"{task}/{model}")
                measured.append(measure(task, model, wanted, counts))
        report.write(folder, measured, report.numbers(measured, counts, [method.name for method in wanted]))
    print(report.text_table(measured))
    print(f"\n{_caption(counts)}")
    print(f"\nReport: {options.out / report.PAGE}, {report.PICTURE}, {report.NUMBERS}", end=" ")
    print(f"({time.perf_counter() - start:.0f} s)")


def _caption(counts: Counts) -> str:
    text = (
        f"Over {counts.scored} held-out sequences of each task; the candidates of a query are the keys before it, its "
        f"own left out. {'; '.join(f'{name}: {meaning}' for name, meaning in report.MEANING.items())}. "
        f"{report.ABOUT_REFERENCES} accuracy: over {counts.accuracy} sequences. worst error: ||op(x) - y|| / ||y|| of "
        f"the worst layer, in float32. layer: the one with the best AP on {counts.selection} other sequences, counted "
        "from 0; all: the method composes them; -: none is read."
    )
    return textwrap.fill(text, 118)
