"""One answer, from a model to the scores of its tokens, beside LXT, captum and inseq.

python -m benchmarks.answers --python .venv-answers/bin/python            measure, and print the table
python -m benchmarks.answers --python .venv-answers/bin/python --write    also record, and write docs/performance.md

The environment of the other tools (LXT 2.1 does not import on transformers 5; torchvision's CPU build is that of
pytorch.org):

    python -m venv .venv-answers
    .venv-answers/bin/pip install torch==2.13.0 torchvision==0.28.0 transformers==4.57.1 inseq==0.7.1 zennit accelerate
    .venv-answers/bin/pip install --no-deps lxt==2.1

Each tool runs in a process, since LXT changes classes of transformers, and in turns with the forward pass of its host,
whose time is the unit.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.answer_worker import TOOLS
from benchmarks.machine import machine, versions_of
from benchmarks.page import table
from benchmarks.peers import stored
from tools.markers import replace_section
from unilinattn.testing import relative_error

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "answers.json"

LENGTHS = (256, 1024)
TOLERANCE = 1e-3
"""Largest relative difference of the scores of a pair of tools, in float32."""


def worker(python: str, tool: str, length: int, rounds: int, folder: str) -> dict[str, Any]:
    """Run one tool in a process; return its figures, and its scores for a text that is not generated."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "benchmarks.answer_worker", tool, str(length), str(rounds), folder]
    environment = {**os.environ, **offline, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ChildProcessError(f"{tool} at {length} tokens ended with {done.returncode}:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**figures, "scores": torch.load(Path(folder) / "scores.pt")} if length else figures


def measured(python: str, length: int, rounds: int, folder: str) -> list[dict[str, Any]]:
    """Return a row for each pair of tools at a length, 0 for generated text.

    Raises `ArithmeticError` for scores that differ by more than `TOLERANCE`.
    """
    tools = list(TOOLS) if length else ["unilinattn `input_x_gradient`", "inseq"]
    rows = []
    for pair in zip(tools[::2], tools[1::2], strict=True):
        # Another interpreter may be wrong, which its own run tells at once.
        peer = worker(python, pair[1], length, rounds, folder)
        ours = worker(sys.executable, pair[0], length, rounds, folder)
        row = {"length": length, "tools": pair, "seconds": [ours["seconds"], peer["seconds"]]}
        if length:
            difference = float(relative_error(ours["scores"].double(), peer["scores"].double()))
            if not difference <= TOLERANCE:
                raise ArithmeticError(f"{' and '.join(pair)} at {length} tokens differ by {difference:.1e} (relative)")
            row["difference"] = float(f"{difference:.1e}")
        rows.append({**row, "versions": peer["versions"]})
    return rows


def section(record: Mapping[str, Any]) -> str:
    """Return the section of the page."""
    header = ("tokens", "unilinattn", "forwards", "other tool", "forwards", "ratio", "difference")
    about = record["machine"]
    others = ", ".join(f"{name} {number}" for name, number in record["rows"][0]["versions"].items())
    versions = (
        f"{about['cpu']}; 1 thread, {about['memory']} of memory; {versions_of(about)}; the other tools: {others}."
    )
    return table(header, [tuple(_cells(row)) for row in record["rows"]]) + f"\n\n{versions}"


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield str(row["length"] or "generated")
    forwards = [median(seconds["answer"]) / median(seconds["forward"]) for seconds in row["seconds"]]
    for tool, count in zip(row["tools"], forwards, strict=True):
        yield from (tool.removeprefix("unilinattn "), f"{count:.1f}")
    yield f"{forwards[0] / forwards[1]:.2f}"
    yield f"{row['difference']:.0e}" if "difference" in row else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.answers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter of the other tools")
    parser.add_argument("--lengths", type=int, nargs="+", default=[*LENGTHS, 0], metavar="L", help="0: generated text")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, fewer if they take long")
    parser.add_argument("--write", action="store_true", help="record the figures and write the page")
    options = parser.parse_args(arguments)
    rows = []
    with TemporaryDirectory() as folder:
        for length in options.lengths:
            try:
                rows += measured(options.python, length, options.rounds, folder)
            except (OSError, ChildProcessError) as error:
                parser.error(f"{error}\nSee --help for the environment that --python {options.python} needs.")
            print(f"measured {f'{length} tokens' if length else 'generated text'}", flush=True)
    record = {"machine": machine("cpu"), "rows": rows}
    print(section(record))
    if options.write:
        RECORD.write_text(stored(record))
        page = ROOT / "docs" / "performance.md"
        page.write_text(replace_section(page.read_text(), "answers", section(record)))


if __name__ == "__main__":
    main()
