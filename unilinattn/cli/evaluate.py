"""The command `unilinattn evaluate`: methods and metrics on the trained examples or on local checkpoints."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unilinattn import examples
from unilinattn.cli.arguments import entry, names
from unilinattn.errors import OptionError
from unilinattn.evaluation.checkpoints import DTYPES, load_checkpoint, one_thread, quiet_hosts
from unilinattn.evaluation.evaluate import evaluate
from unilinattn.evaluation.measures import METRICS
from unilinattn.evaluation.processes import Processes
from unilinattn.evaluation.readers import read_samples
from unilinattn.evaluation.scorers import BASELINES
from unilinattn.evaluation.table import Table
from unilinattn.evaluation.trained import (
    CHOSEN_BY,
    CORRELATION,
    INTERVENTION,
    Counts,
    Intervention,
    known_samples,
    select,
)

DEFAULT_METRICS = ("hit_at_1", "ap", "auc")

TASK = "induction"
"""The default task."""


def add_arguments(parser: argparse.ArgumentParser, methods: Sequence[str]) -> None:
    """Add the arguments of the command to its parser; `methods` are its default methods."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        f"metrics: {', '.join(METRICS)};\nof trained models also {CORRELATION}, and the method {INTERVENTION}\n\n"
        "Options of a method or metric follow its name: alti:compose=rollout, latim:p=1:layers=mean,\n"
        "positive_perturbation:masking=token:mask_token_id=0"
    )
    parser.add_argument("--task", help=f"task of the trained models: copying, induction or all (default: {TASK})")
    parser.add_argument(
        "--models", nargs="+", metavar="MODEL", help="trained models (default: all), or with --data folders"
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="JSON lines with text, target, relevant, label, name")
    parser.add_argument(
        "--selection", type=Path, metavar="FILE", help="the same, other texts: layers are chosen on them"
    )
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help=f"methods (default: {' '.join(methods)})")
    parser.add_argument("--metrics", nargs="+", metavar="METRIC", help=f"default: {' '.join(DEFAULT_METRICS)}")
    parser.add_argument("--baselines", nargs="*", default=BASELINES, metavar="NAME", help=f"of {', '.join(BASELINES)}")
    parser.add_argument("--samples", type=int, default=Counts.scored, help="sequences of a task (default: %(default)s)")
    parser.add_argument("--target", type=int, help="the one explained position of a task (default: every answer)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random choices (default: 0)")
    parser.add_argument("--dtype", help=f"of checkpoints: {', '.join(DTYPES)} (default: as stored)")
    parser.add_argument("--out", type=Path, help="folder of the results; the same command continues there")
    parser.set_defaults(default_methods=methods)


def run(options: argparse.Namespace) -> None:
    """Evaluate, and print the summary of the table."""
    methods = [entry(text) for text in options.methods or options.default_methods]
    metrics = [entry(text) for text in options.metrics or DEFAULT_METRICS]
    shared = {"baselines": options.baselines, "seed": options.seed}
    if options.data is None:
        with one_thread(), quiet_hosts():
            for task, arguments in _tasks(options, methods, metrics):
                out = options.out / task if options.task == "all" and options.out is not None else options.out
                table = evaluate(**arguments, **shared, out=out)
                _print(table, task, f"by {CHOSEN_BY} on {Counts.selection} other sequences", out)
        return
    if options.task is not None or options.target is not None:
        raise OptionError("--task and --target are for the trained models; with --data, each line has its target.")
    if not options.models:
        raise OptionError("--data needs --models: local folders, each with a causal language model and its tokenizer.")
    with quiet_hosts():
        for path in map(Path, options.models):
            # Positions and ids depend on the tokenizer, so each model reads the samples with its own.
            host, tokenizer = load_checkpoint(path, options.dtype)
            data = read_samples(options.data, tokenizer)
            others = None if options.selection is None else read_samples(options.selection, tokenizer)
            out = options.out
            if out is not None and len(options.models) > 1:
                out = out / path.name
            table = evaluate({path.name: host}, data, methods, metrics, **shared, selection=others, out=out)
            _print(table, str(options.data), "by the first metric on other samples", out)


def _tasks(
    options: argparse.Namespace, methods: Sequence[Any], metrics: Sequence[Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the arguments of `evaluate` for each task."""
    if options.selection is not None:
        raise OptionError("--selection is for --data; a task has its own sequences for the choice of layers.")
    counts = Counts(scored=options.samples)
    for task, models in select(options.task or TASK, names(options.models)).items():
        truth = Intervention(task, counts.scored)
        yield (
            task,
            {
                "models": {model: partial(examples.load, task, model) for model in models},
                "methods": [truth.row if method == INTERVENTION else method for method in methods],
                "metrics": [truth.correlation if metric == CORRELATION else metric for metric in metrics],
                **known_samples(task, counts, target=options.target),
            },
        )


def _print(table: Table, data: str, choice: str, out: Path | None) -> None:
    if Processes().rank:
        return
    samples = len({row["sample"] for row in table})
    print(f"{data}, {samples} samples\n\n{table}")
    print(
        f"\nlayer: the best {choice}; all: the method composes the layers"
        + (f"\nTables: {out / 'table.csv'}, {out / 'table.json'}\n" if out is not None else "\n")
    )
