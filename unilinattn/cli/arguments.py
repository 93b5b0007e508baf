"""Arguments of the commands, and their values. No import needs torch, so that `--help` is printed at once."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unilinattn.errors import OptionError

METHODS = ("logit", "raw", "rollout", "attribution", "latim", "alti")
"""Default methods of `compare` and `evaluate`."""

OUT = Path("unilinattn-report")
DTYPES = "float32, float64, bfloat16, float16"


def parser(version: str) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of the command line, and that of `evaluate`, which has no arguments yet."""
    parser = argparse.ArgumentParser(
        prog="unilinattn",
        description="The attention matrix hidden in linear RNNs and Transformers, exact and explained.",
    )
    parser.add_argument("--version", action="version", version=f"unilinattn {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _compare(commands)
    evaluate = commands.add_parser(
        "evaluate", help="methods and metrics on the trained models or on local checkpoints: one table"
    )
    _explain(commands)
    _decomposition(commands)
    listing = commands.add_parser("list", help="the registered architectures and methods, or one with its options")
    listing.add_argument("name", nargs="?", metavar="NAME", help="name of a method or an architecture")
    return parser, evaluate


def _compare(commands: Any) -> None:
    side = commands.add_parser(
        "compare",
        help="the trained models, or local checkpoints on texts or images, side by side: tables and a report",
        description="Without PATH the trained models are measured on tasks with known answers. Local checkpoints are "
        "measured on texts or images: reconstruction errors, statistics and similarity of the attention maps, and the "
        "deletion curve of each method.",
    )
    side.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="folders, each with a causal language model and its tokenizer, or with --images an image classifier and "
        "its image processor",
    )
    side.add_argument("--text", action="append", help="a text for the checkpoints; may be repeated")
    side.add_argument(
        "--texts", type=Path, metavar="FILE", help=".txt with a text on each line, or JSON lines with the field `text`"
    )
    side.add_argument("--images", type=Path, metavar="FOLDER", help="a folder of images, in place of texts")
    side.add_argument("--dtype", help=f"of checkpoints: {DTYPES} (default: as stored)")
    side.add_argument("--task", help="of the trained models: copying, induction or all (default: all)")
    side.add_argument("--models", nargs="+", metavar="MODEL", help="names of trained models (default: all)")
    side.add_argument("--methods", nargs="+", metavar="METHOD", help=f"methods (default: {' '.join(METHODS)})")
    side.add_argument("--out", type=Path, default=OUT, help=f"folder of the report (default: {OUT})")


def _explain(commands: Any) -> None:
    explain = commands.add_parser("explain", help="explain a local checkpoint on a text")
    explain.add_argument(
        "path", type=Path, metavar="PATH", help="folder with a causal language model and its tokenizer"
    )
    explain.add_argument("--text", required=True, help="the input")
    explain.add_argument(
        "--bos", action="store_true", help="put the tokenizer's beginning-of-text token before the text"
    )
    explain.add_argument(
        "--method",
        help="name of a method, see `unilinattn list` (default: by the model, attn_lrp in thirds for causal attention "
        "and lrp of the log-odds for others; without logits alti over all layers)",
    )
    explain.add_argument(
        "--target",
        help="position to explain, negative from the end, or a text that occurs once, for its last token (default: -1)",
    )
    explain.add_argument(
        "--generate", type=int, metavar="N", help="generate up to N tokens after the text, and explain each of them"
    )
    explain.add_argument(
        "--logit",
        nargs="+",
        metavar="TOKEN",
        help="token (id or text) whose logit is explained, or two: their difference",
    )
    explain.add_argument("--scope", help="stages that form the attention matrix: core, mixer or unified")
    explain.add_argument(
        "--option",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="further options of the method, such as p=1; `unilinattn list METHOD` prints them",
    )
    explain.add_argument("--layer", default="mean", help="layer to print, an index or a name (default: their mean)")
    explain.add_argument("--dtype", help=f"{DTYPES} (default: as stored)")
    explain.add_argument(
        "--trust",
        default="require",
        choices=("require", "warn"),
        help="a layer that misses the model's own output is an error (require, default) or a warning (warn)",
    )
    explain.add_argument(
        "--check",
        action="store_true",
        help="run the model with other tokens in place of the top three, and of random ones, and print the falls",
    )
    explain.add_argument("--out", type=Path, help="file for the result: .html, .png or .safetensors")


def _decomposition(commands: Any) -> None:
    split = commands.add_parser("decomposition", help="errors of LaTIM's splits of the activation, by layer")
    split.add_argument("path", type=Path, nargs="?", metavar="PATH", help="a checkpoint (default: the trained models)")
    split.add_argument("--text", help="the input of the checkpoint")
    split.add_argument("--out", type=Path, help="folder for decomposition.png and decomposition.json")


def names(texts: Sequence[str] | None) -> list[str]:
    """Return the names of a list separated by spaces or commas, without repetitions."""
    return list(dict.fromkeys(name for text in texts or () for name in text.split(",") if name))


def entry(text: str) -> str | tuple[str, Mapping[str, Any]]:
    """Return a name, or the name and the options of NAME:OPTION=VALUE:OPTION=VALUE.

    Raises `OptionError` for an option without a value.
    """
    name, *pairs = text.split(":")
    return (name, dict(option(text, pair) for pair in pairs)) if pairs else name


def option(where: str, pair: str) -> tuple[str, Any]:
    """Return the name and the value, as JSON or text, of NAME=VALUE.

    Raises `OptionError`, which begins with `where`, for another text.
    """
    name, equals, value = pair.partition("=")
    if not equals:
        raise OptionError(f"{where} {pair!r} is not NAME=VALUE, such as p=1.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
