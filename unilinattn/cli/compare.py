"""The command `unilinattn compare`: models side by side."""

import argparse
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from unilinattn.analysis import own_models, own_report
from unilinattn.cli.arguments import METHODS
from unilinattn.errors import OptionError
from unilinattn.evaluation import command, report
from unilinattn.evaluation.checkpoints import load_checkpoint, load_image_checkpoint
from unilinattn.evaluation.readers import image_files
from unilinattn.evaluation.side_by_side import Counts, measure, one_thread, quiet_hosts, select
from unilinattn.evaluation.texts import read_texts
from unilinattn.optional import import_extra
from unilinattn.registry import method as registered


def run(options: argparse.Namespace) -> None:
    """Measure models side by side, print the tables and write the report.

    Raises `OptionError` for arguments of the trained models beside those of local checkpoints.
    """
    if options.paths:
        _refuse(options, "with PATH, which measures local checkpoints", "task", "models")
        _checkpoints(options)
    else:
        given = ("text", "texts", "images", "dtype")
        _refuse(options, "without PATH, because the trained models have their own sequences", *given)
        _trained(options)


def _refuse(options: argparse.Namespace, reason: str, *names: str) -> None:
    if given := [f"--{name}" for name in names if getattr(options, name) is not None]:
        raise OptionError(f"{' and '.join(given)} cannot be given {reason}.")


def _checkpoints(options: argparse.Namespace) -> None:
    """Measure local checkpoints on texts or images, print the tables and write the report."""
    methods = command.names(options.methods) or list(METHODS)
    for name in methods:
        registered(name)
    inputs: dict[str, Any]
    if options.images is not None:
        _refuse(options, "with --images, which measures image classifiers", "text", "texts")
        image_files(options.images)
        inputs, load = {"images": options.images}, load_image_checkpoint
    elif options.text or options.texts is not None:
        texts = [*(options.text or ()), *(() if options.texts is None else read_texts(options.texts))]
        inputs, load = {"texts": texts}, load_checkpoint
    else:
        raise OptionError(
            "local checkpoints are measured on texts or images: give --text TEXT, --texts FILE or --images FOLDER."
        )
    names = _names(options.paths)
    start = time.perf_counter()
    with report.staged(options.out) as folder, quiet_hosts(), one_thread():
        models = {name: load(path, options.dtype) for name, path in names.items()}
        found = own_models.compare_models(models, **inputs, methods=methods)
        own_report.write(folder, found)
    print(f"{found}\n\n{textwrap.fill(own_report.caption(found), 118)}")
    print(f"\nReport: {options.out / report.PAGE}, {report.NUMBERS} ({time.perf_counter() - start:.0f} s)")


def _names(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the checkpoints by the names of their folders, or by the given paths where two names are equal."""
    places = [path.resolve() for path in paths]
    if len(set(places)) < len(places):
        raise OptionError(f"{', '.join(map(str, paths))} names a folder twice; name each checkpoint once.")
    short = [place.name for place in places]
    return {name if short.count(name) == 1 else str(path): path for name, path in zip(short, paths, strict=True)}


def _trained(options: argparse.Namespace) -> None:
    """Measure the trained models, print the table and write the report."""
    for module, extra in (("transformers", "hf"), ("matplotlib.figure", "plot")):
        import_extra(module, extra)
    wanted = [registered(name) for name in command.names(options.methods) or METHODS]
    pairs = select(options.task or "all", command.names(options.models))
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
