"""The command `unilinattn compare`: models side by side."""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unilinattn.analysis import report, report_folder
from unilinattn.analysis.compare import compare_models, compare_trained
from unilinattn.analysis.comparison import ModelComparison
from unilinattn.cli.arguments import METHODS, names
from unilinattn.errors import OptionError
from unilinattn.evaluation.checkpoints import load_checkpoint, load_image_checkpoint, one_thread, quiet_hosts
from unilinattn.evaluation.readers import image_files
from unilinattn.evaluation.texts import read_texts
from unilinattn.evaluation.trained import select
from unilinattn.optional import import_extra
from unilinattn.registry import method as registered

Measure = Callable[[], ModelComparison]


def run(options: argparse.Namespace) -> None:
    """Measure models side by side, print the tables and write the report.

    Raises `OptionError` for arguments of the trained models beside those of local checkpoints.
    """
    start = time.perf_counter()
    measurements = _checkpoints(options) if options.paths else _trained(options)
    with report_folder.staged(options.out) as folder:
        with quiet_hosts(), one_thread():
            comparisons = [measure() for measure in measurements]
        report.write(folder, comparisons)
    files = [report_folder.PAGE, *([report_folder.PICTURE] if comparisons[0].task else []), report_folder.NUMBERS]
    seconds = time.perf_counter() - start
    print(f"{report.text(comparisons)}\n\nReport: {options.out / files[0]}, {', '.join(files[1:])} ({seconds:.0f} s)")


def _methods(options: argparse.Namespace) -> list[str]:
    """Return the methods to compare, all of them registered."""
    methods = names(options.methods) or list(METHODS)
    for name in methods:
        registered(name)
    return methods


def _refuse(options: argparse.Namespace, reason: str, *names: str) -> None:
    if refused := [f"--{name}" for name in names if getattr(options, name) is not None]:
        raise OptionError(f"{' and '.join(refused)} cannot be given {reason}.")


def _checkpoints(options: argparse.Namespace) -> list[Measure]:
    """Return the measurement of local checkpoints on texts or images."""
    _refuse(options, "with PATH, which measures local checkpoints", "task", "models")
    methods = _methods(options)
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
    paths = _names(options.paths)

    def measure() -> ModelComparison:
        models = {name: load(path, options.dtype) for name, path in paths.items()}
        return compare_models(models, **inputs, methods=methods)

    return [measure]


def _names(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the checkpoints by the names of their folders, or by the given paths where two names are equal."""
    folders = [path.resolve() for path in paths]
    if len(set(folders)) < len(folders):
        raise OptionError(f"{', '.join(map(str, paths))} names a folder twice; name each checkpoint once.")
    short = [folder.name for folder in folders]
    return {name if short.count(name) == 1 else str(path): path for name, path in zip(short, paths, strict=True)}


def _trained(options: argparse.Namespace) -> list[Measure]:
    """Return the measurement of the trained models on each task."""
    inputs = ("text", "texts", "images", "dtype")
    _refuse(options, "without PATH, because the trained models have their own sequences", *inputs)
    for module, extra in (("transformers", "hf"), ("matplotlib.figure", "plot")):
        import_extra(module, extra)
    methods = _methods(options)
    by_task = select(options.task or "all", names(options.models))
    return [partial(compare_trained, task, models, methods) for task, models in by_task.items()]
