"""The command line: `unilinattn compare`, `evaluate`, `explain`, `decomposition` and `list`."""

import argparse
import sys
import textwrap
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from torch import Tensor
from tqdm import tqdm

from unilinattn import __version__
from unilinattn.errors import (
    ExactnessWarning,
    OptionError,
    ResultFileError,
    UncoveredError,
    UnilinattnError,
)
from unilinattn.evaluation import command, decomposition, decomposition_errors, report
from unilinattn.evaluation.checkpoints import DTYPES, load_checkpoint
from unilinattn.evaluation.side_by_side import (
    Counts,
    example_decompositions,
    measure,
    one_thread,
    quiet_hosts,
    select,
)
from unilinattn.methods.run import COMPOSED, explain
from unilinattn.methods.targets import position_of
from unilinattn.optional import import_extra
from unilinattn.registry import list_architectures, list_methods
from unilinattn.registry import method as registered
from unilinattn.results.attribution import Attribution
from unilinattn.results.panels import counts_residual
from unilinattn.startup import INTERRUPTED, interrupts_raise
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.text import token_text
from unilinattn.tracing.trace import Trace, trace
from unilinattn.tracing.trust import Trust

METHODS = ("logit", "raw", "rollout", "attribution", "latim", "alti")
"""Default methods of `compare`."""

OUT = Path("unilinattn-report")
BAR = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for an error reported on stderr, 130 if interrupted."""
    options = _parser().parse_args(arguments)
    try:
        interrupts_raise()
        options.run(options)
    except UnilinattnError as error:
        print(f"unilinattn {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"unilinattn {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def compare(options: argparse.Namespace) -> None:
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


def explain_checkpoint(options: argparse.Namespace) -> None:
    """Explain a local checkpoint on a text: print its tokens' scores for the target, and save them with --out."""
    if options.method is not None:
        registered(options.method)
    _check_out(options.out)
    with quiet_hosts():
        host, tokenizer = load_checkpoint(options.path, options.dtype)
        observed = trace(host, options.text, tokenizer=tokenizer)
        target = position_of(observed, _integer(options.target))
        chosen = _method_options(options)
        with warnings.catch_warnings():
            # The doubts are printed below.
            warnings.simplefilter("ignore", ExactnessWarning)
            result = explain(observed, method=options.method, target=target, trust=options.trust, **chosen)
    assert result.tokens is not None
    texts, place = result.tokens[0], int(observed.positions(-1 if target is None else target)[0])
    column, scores = _shown_scores(result, options.layer)
    scope = f", scope {result.scope}" if result.scope else ""
    print(f"{observed.model} from {options.path}, {len(observed.layers)} layers")
    print(_layer_lines(observed))
    print(f"\n{result.method}{scope}: scores for position {place} {texts[place]!r}, {column}")
    if (following := _prediction(observed, place, tokenizer)) is not None:
        print(f"the model predicts {following!r} after it")
    label = "the token itself and the residual stream" if counts_residual(result) else "the token itself"
    print(bar_chart(texts, scores, place, label))
    if result.method == "logit":
        print(_sum_line(result))
    for doubt in result.warnings:
        print(f"\nWARNING: {doubt}")
    if options.out is not None:
        _save(result, options.out)
        print(f"\nSaved to {options.out}")


def decompose(options: argparse.Namespace) -> None:
    """Print the decomposition errors of a checkpoint on a text, or of the trained models; write them with --out."""
    if (options.path is None) != (options.text is None):
        raise OptionError("a checkpoint is measured on a text: give PATH and --text, or neither.")
    with quiet_hosts(), one_thread():
        if options.path is not None:
            host, tokenizer = load_checkpoint(options.path)
            found = trace(host, options.text, tokenizer=tokenizer)
        errors = {options.path.name: decomposition_errors(found)} if options.path else example_decompositions()
    print(decomposition.text_table(errors))
    if options.out is not None:
        decomposition.write(errors, options.out)


def list_registered(options: argparse.Namespace) -> None:
    """Print the registered architectures and methods."""
    print("Architectures")
    for architecture in list_architectures().values():
        print(f"  {architecture.name}: {architecture.kind}\n      {architecture.summary}")
        for host in architecture.hosts or ("any, known by what it calls",):
            print(f"      host  {host}")
    print("\nMethods")
    methods = list_methods()
    width = max(map(len, methods), default=0)
    for method in methods.values():
        print(f"  {method.name.ljust(width)}  {method.summary}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unilinattn",
        description="The attention matrix hidden in linear RNNs and Transformers, exact and explained.",
    )
    parser.add_argument("--version", action="version", version=f"unilinattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    side = commands.add_parser("compare", help="the trained models side by side: a table and a report")
    side.add_argument("--task", default="all", help="copying, induction or all (default: all)")
    side.add_argument("--models", nargs="+", metavar="MODEL", help="names of trained models (default: all)")
    side.add_argument("--methods", nargs="+", metavar="METHOD", help=f"methods (default: {' '.join(METHODS)})")
    side.add_argument("--out", type=Path, default=OUT, help=f"folder of the report (default: {OUT})")
    side.set_defaults(run=compare)

    command.add(commands, METHODS)

    one = commands.add_parser("explain", help="explain a local checkpoint on a text")
    one.add_argument("path", type=Path, metavar="PATH", help="folder with a causal language model and its tokenizer")
    one.add_argument("--text", required=True, help="the input")
    one.add_argument(
        "--method",
        help=f"name of a method, see `unilinattn list` (default: logit; without logits {COMPOSED} over all layers)",
    )
    one.add_argument(
        "--target",
        default="-1",
        help="position to explain, negative from the end, or a text that occurs once, for its last token (default: -1)",
    )
    one.add_argument(
        "--logit",
        nargs="+",
        metavar="TOKEN",
        help="token (id or text) whose logit is explained, or two: their difference",
    )
    one.add_argument("--scope", help="stages that form the attention matrix: core, mixer or unified")
    one.add_argument(
        "--option", nargs="+", default=[], metavar="NAME=VALUE", help="further options of the method, such as p=1"
    )
    one.add_argument("--layer", default="mean", help="layer to print, an index or a name (default: their mean)")
    one.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default: as stored)")
    one.add_argument(
        "--trust",
        default="require",
        choices=get_args(Trust),
        help="a layer that misses the model's own output is an error (require, default) or a warning (warn)",
    )
    one.add_argument("--out", type=Path, help="file for the result: .html, .png or .safetensors")
    one.set_defaults(run=explain_checkpoint)

    split = commands.add_parser("decomposition", help="errors of LaTIM's splits of the activation, by layer")
    split.add_argument("path", type=Path, nargs="?", metavar="PATH", help="a checkpoint (default: the trained models)")
    split.add_argument("--text", help="the input of the checkpoint")
    split.add_argument("--out", type=Path, help=f"folder for {decomposition.PICTURE} and {decomposition.NUMBERS}")
    split.set_defaults(run=decompose)

    commands.add_parser("list", help="the registered architectures and methods").set_defaults(run=list_registered)
    return parser


def _integer(text: str) -> int | str:
    """Return a number as an int, another text as it is."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def _method_options(options: argparse.Namespace) -> dict[str, Any]:
    chosen: dict[str, Any] = dict(command.option("--option", pair) for pair in options.option)
    if options.scope is not None:
        chosen["scope"] = options.scope
    if options.logit is not None:
        tokens = tuple(map(_integer, options.logit))
        if len(tokens) > 2:
            raise OptionError(f"--logit takes one token, or two for their difference; got {len(tokens)}.")
        chosen["logit"] = tokens[0] if len(tokens) == 1 else tokens
    return chosen


def _shown_scores(result: Attribution, layer: str) -> tuple[str, Tensor]:
    """Return the title of the printed column and the score of each key."""
    if "layer" not in result.dims:
        if layer != "mean":
            raise OptionError(f"{result.method} has no layers to choose from here; leave --layer out.")
        return "all layers", result.scores.flatten()
    if layer == "mean":
        count = len(result.layers)
        column = f"mean over {count} layers (--layer shows one)" if count > 1 else result.layers[0]
        return column, result.scores.mean(0).flatten()
    one = result.select(layer=int(layer) if layer.lstrip("-").isdecimal() else layer)
    return one.layers[0], one.scores.flatten()


def _layer_lines(observed: Trace) -> str:
    names = [layer.name for layer in observed.layers]
    kinds = [layer.kind for layer in observed.layers]
    wide, kind_wide = max(map(len, names)), max(map(len, kinds))
    lines = [f"  {'layer'.ljust(wide + 4)}  {'mixer'.ljust(kind_wide)}  reconstruction error"]
    for index, layer in enumerate(observed.layers):
        error = _error_text(layer)
        lines.append(f"  {index:>2}  {layer.name.ljust(wide)}  {layer.kind.ljust(kind_wide)}  {error}")
    return "\n".join(lines)


def _error_text(layer: Layer) -> str:
    try:
        return report.error_text(layer.reconstruction_error())
    except UncoveredError:
        return "not covered: only its core is"


def _prediction(observed: Trace, place: int, tokenizer: Any) -> str | None:
    logits = getattr(observed.output, "logits", None)
    return None if logits is None else token_text(tokenizer, int(logits[0, place].argmax()))


def bar_chart(texts: Sequence[str], scores: Tensor, own: int, own_name: str) -> str:
    """Return a line with the score of each token: `own` first, then the others with bars relative to the largest."""
    shown = [text if text.isprintable() and text == text.strip() else repr(text) for text in texts]
    wide = max(map(len, shown))
    others = [place for place in range(len(shown)) if place != own]
    largest = max((abs(float(scores[place])) for place in others), default=0.0) or 1.0
    lines = [f"  {own:>4}  {shown[own].ljust(wide)}  {float(scores[own]):>10.4g}  {own_name}, no bar"]
    for place in others:
        score = float(scores[place])
        bar = ("#" if score >= 0 else "-") * round(BAR * abs(score) / largest)
        lines.append(f"  {place:>4}  {shown[place].ljust(wide)}  {score:>10.4g}  {bar}".rstrip())
    return "\n".join(lines)


def _sum_line(result: Attribution) -> str:
    """Return the line that adds up the shares of a logit."""
    bias, value, gap = (float(result.extras[name][0]) for name in ("bias", "logit", "gap"))
    return (
        f"  tokens {float(result.scores.sum()):.4g} + biases {bias:.4g} = {value:.4g}, the model's own logit, "
        f"to {gap:.0e}"
    )


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    if out.suffix not in (".html", ".png", ".safetensors"):
        raise OptionError(f"--out {out} has the ending {out.suffix!r}; accepted: .html, .png, .safetensors.")
    if not out.parent.is_dir():
        raise ResultFileError(f"Cannot save to {out}: there is no folder {out.parent}; create it first.")


def _save(result: Attribution, out: Path) -> None:
    try:
        if out.suffix == ".html":
            result.to_html(out)
        elif out.suffix == ".png":
            result.plot().savefig(out)
        else:
            result.save(out)
    except OSError as error:
        raise ResultFileError(f"Cannot save to {out}: {error.strerror or error}.") from error
