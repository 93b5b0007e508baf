"""The command `unilinattn explain`: the scores of one method for a local checkpoint on a text."""

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from unilinattn.aligned import aligned
from unilinattn.cli.arguments import option
from unilinattn.errors import ExactnessWarning, OptionError, ResultFileError, SinkWarning, UncoveredError
from unilinattn.evaluation.checkpoints import load_checkpoint, quiet_hosts
from unilinattn.host.labels import token_text
from unilinattn.methods.generation import explain_generation
from unilinattn.methods.run import explain
from unilinattn.methods.targets import position_of
from unilinattn.registry import method as registered
from unilinattn.results.attribution import Attribution
from unilinattn.results.explained import number_name
from unilinattn.results.panels import counts_residual
from unilinattn.results.summary import cancellation, fact_lines
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace, trace

LARGEST = 4
"""Keys that are printed for each generated token."""

BAR = 40
"""Characters of the longest bar."""


SINK = "attention sink, no bar"

NO_OTHERS = "no tokens before it but attention sinks"


def run(options: argparse.Namespace) -> None:
    """Explain a local checkpoint on a text: print its tokens' scores for the target, and save them with --out."""
    if options.method is not None:
        registered(options.method)
    _check_out(options.out)
    if options.generate is not None:
        _run_generation(options)
        return
    with quiet_hosts():
        host, tokenizer = load_checkpoint(options.path, options.dtype)
        observed = trace(host, options.text, tokenizer=tokenizer, bos=options.bos)
        target = position_of(observed, _integer("-1" if options.target is None else options.target))
        keywords = _method_options(options)
        with warnings.catch_warnings():
            _ignore_doubts()
            keywords |= {"trust": options.trust, "check": options.check}
            result = explain(observed, method=options.method, target=target, **keywords)
    assert result.tokens is not None
    texts, position = result.tokens[0], int(observed.positions(-1 if target is None else target)[0])
    column, scores = _shown_scores(result, options.layer)
    scope = f", scope {result.scope}" if result.scope else ""
    print(f"{observed.model} from {options.path}, {len(observed.layers)} layers")
    print(_layer_lines(observed))
    print(f"\n{result.method}{scope}: scores for position {position} {texts[position]!r}, {column}")
    if (following := _prediction(observed, position, tokenizer)) is not None:
        print(f"the model predicts {following!r} after it")
    for line in fact_lines(result):
        print(f"  {line}")
    label = "the token itself and the residual stream" if counts_residual(result) else "the token itself"
    sinks = () if result.sinks is None else result.sinks[0]
    print(bar_chart(texts, scores, position, label, sinks))
    if "gap" in result.extras and "layer" not in result.dims:
        print(_sum_line(result))
    _finish(result, options.out)


def _run_generation(options: argparse.Namespace) -> None:
    """Generate tokens after the text, and print the largest scores for each of them."""
    for name in ("target", "logit"):
        if getattr(options, name) is not None:
            raise OptionError(f"--generate explains every generated token by its own logit; leave --{name} out.")
    if options.check:
        raise OptionError("--check replaces tokens for one explained logit; leave --generate or --check out.")
    with quiet_hosts(), warnings.catch_warnings():
        _ignore_doubts()
        host, tokenizer = load_checkpoint(options.path, options.dtype)
        result = explain_generation(
            host,
            options.text,
            tokenizer=tokenizer,
            max_new_tokens=options.generate,
            method=options.method,
            bos=options.bos,
            trust=options.trust,
            **_method_options(options),
        )
    column, scores = _shown_scores(result, options.layer)
    print(f"{result.model} from {options.path}, {len(result.layers)} layers\n")
    print(f"{result.method}: largest scores for each generated token, {column}")
    assert result.tokens is not None and result.query_tokens is not None
    texts, made = result.tokens[0], result.query_tokens[0]
    rows, sinks = [], () if result.sinks is None else result.sinks[0]
    for position, (text, row) in enumerate(zip(made, scores.view(len(made), -1), strict=True), len(texts) - len(made)):
        # The keys from the generated token on have scores of zero.
        ranking = [key for key in row[:position].abs().argsort(descending=True).tolist() if key not in sinks]
        named = "   ".join(f"{texts[key]!r} {float(row[key]):.3g}" for key in ranking[:LARGEST])
        rows.append((f"{position:>4}", repr(text), named or NO_OTHERS))
    print(aligned(rows, indent=2))
    if cancels := cancellation(result):
        print(f"  {cancels}")
    _finish(result, options.out)


def _ignore_doubts() -> None:
    """Ignore the warnings of a result, which `_finish` prints."""
    for category in (ExactnessWarning, SinkWarning):
        warnings.simplefilter("ignore", category)


def _finish(result: Attribution, out: Path | None) -> None:
    """Print the doubts about a result, and save it."""
    for doubt in result.warnings:
        print(f"\nWARNING: {doubt}")
    if out is not None:
        _save(result, out)
        print(f"\nSaved to {out}")


def _integer(text: str) -> int | str:
    """Convert `text` to an int if it is a decimal number; return it unchanged otherwise."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def _method_options(options: argparse.Namespace) -> dict[str, Any]:
    keywords: dict[str, Any] = dict(option("--option", pair) for pair in options.option)
    if options.scope is not None:
        keywords["scope"] = options.scope
    if options.logit is not None:
        tokens = tuple(map(_integer, options.logit))
        if len(tokens) > 2:
            raise OptionError(f"--logit takes one token, or two for their difference; got {len(tokens)}.")
        keywords["logit"] = tokens[0] if len(tokens) == 1 else tokens
    return keywords


def _shown_scores(result: Attribution, layer: str) -> tuple[str, Tensor]:
    """Return the title of the printed column and the score of each key, the mean over heads."""
    if "head" in result.dims:
        head = result.dims.index("head")
        heads = f"mean over {result.sizes['head']} {result.head_kind}s"
        dims = tuple(axis for axis in result.dims if axis != "head")
        whole = replace(result, scores=result.scores.mean(head), dims=dims, heads=None, extras={})
        column, scores = _shown_scores(whole, layer)
        return f"{column}, {heads}", scores
    if "layer" not in result.dims:
        if layer != "mean":
            raise OptionError(f"{result.method} has no layers to choose from here; leave --layer out.")
        return "all layers", result.scores.flatten()
    if layer == "mean":
        count = len(result.layers)
        column = f"mean over {count} layers (--layer shows one)" if count > 1 else result.layers[0]
        return column, result.scores.mean(0).flatten()
    selected = result.select(layer=int(layer) if layer.lstrip("-").isdecimal() else layer)
    return selected.layers[0], selected.scores.flatten()


def _layer_lines(observed: Trace) -> str:
    rows = [("layer", "mixer", "reconstruction error")]
    rows += [
        (f"{number:>2}  {layer.name}", layer.kind, _error_text(layer)) for number, layer in enumerate(observed.layers)
    ]
    return aligned(rows, indent=2)


def _error_text(layer: Layer) -> str:
    try:
        return f"{error:.1e}" if (error := layer.reconstruction_error()) else "0"
    except UncoveredError:
        return "not covered: only its core is"


def _prediction(observed: Trace, position: int, tokenizer: Any) -> str | None:
    logits = getattr(observed.output, "logits", None)
    return None if logits is None else token_text(tokenizer, int(logits[0, position].argmax()))


def bar_chart(texts: Sequence[str], scores: Tensor, query: int, query_name: str, sinks: Sequence[int] = ()) -> str:
    """Return a line with the score of each token: `query` first, then the others with bars relative to the largest.

    `query` and the attention sinks have no bar.
    """
    shown = [text if text.isprintable() and text == text.strip() else repr(text) for text in texts]
    values = [float(score) for score in scores]
    others = [key for key in range(len(shown)) if key != query]
    largest = max((abs(values[key]) for key in others if key not in sinks), default=0.0) or 1.0
    bars = {key: ("#" if values[key] >= 0 else "-") * round(BAR * abs(values[key]) / largest) for key in others}
    bars |= dict.fromkeys(sinks, SINK) | {query: f"{query_name}, no bar"}
    return aligned(
        [(f"{key:>4}", shown[key], f"{values[key]:>10.4g}", bars[key]) for key in [query, *others]], indent=2
    )


def _sum_line(result: Attribution) -> str:
    """Return the line that adds up the shares of a logit."""
    bias, rest, value, gap = (float(result.extras[name][0]) for name in ("bias", "remainder", "logit", "gap"))
    number = number_name(result)
    nonlinear = f" + remainder {rest:.4g}" if number == "log-odds" else ""
    return (
        f"  tokens {float(result.scores.sum()):.4g} + biases {bias:.4g}{nonlinear} = {value:.4g}, the model's own "
        f"{number}, to {gap:.0e}"
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
