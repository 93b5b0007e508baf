"""Sequences per second of each method by batch size and number of threads, on two layers of the published 130m sizes.

python -m benchmarks.throughput            measure, and print the table
python -m benchmarks.throughput --write    measure, record, and write the section of docs/performance.md

Weights and tokens are random. Rates are relative to one sequence on one thread, by medians of turns of all cases.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import unilinattn as ula
from benchmarks.machine import machine, versions_of
from benchmarks.memory import usage
from benchmarks.models import VOCABULARY, build
from benchmarks.page import STRUCTURES, stored
from benchmarks.timing import interleaved
from tools.markers import replace_section
from unilinattn.tracing.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "throughput.json"

KINDS = ("mamba", "mamba2", "softmax")
METHODS = {"rollout": -1, "latim": None, "attribution": -1, "logit": -1}
"""Methods with their targets: the last token, or all queries."""

LENGTH = 64
BATCHES = (1, 4, 16)
THREADS = (1, 2)


def measured(kind: str, length: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each method: torch calls by batch size, and relative rates by threads and batch size."""
    generator = torch.Generator().manual_seed(0)
    model = build(kind, layers=2)
    traces = {
        batch: ula.trace(model, torch.randint(VOCABULARY, (batch, length), generator=generator), progress=False)
        for batch in BATCHES
    }
    rows = []
    for method, target in METHODS.items():

        def run(trace: Trace, threads: int, method: str = method, target: int | None = target) -> None:
            torch.set_num_threads(threads)
            ula.explain(trace, method=method, target=target, progress=False)

        for trace in traces.values():
            # The first call builds the operators.
            run(trace, 1)
        calls = [usage(lambda trace=trace: run(trace, 1), "cpu").calls for trace in traces.values()]
        cases: dict[str, Callable[[], None]] = {
            f"{threads} {batch}": (lambda trace=trace, threads=threads: run(trace, threads))
            for threads in THREADS
            for batch, trace in traces.items()
        }
        times = interleaved(cases, rounds=rounds, least=rounds, seconds=0, device="cpu")
        alone = median(times[f"1 {BATCHES[0]}"])
        rates = {
            str(threads): [round(batch * alone / median(times[f"{threads} {batch}"]), 2) for batch in BATCHES]
            for threads in THREADS
        }
        rows.append({"structure": STRUCTURES[kind], "method": method, "length": length, "calls": calls, "rates": rates})
    torch.set_num_threads(1)
    return rows


def section(record: Mapping[str, Any]) -> str:
    """Return the section of the page."""
    batches = [f"B = {batch}" for batch in BATCHES]
    heads = [f"{batch}, {threads} thread{'s' if threads > 1 else ''}" for threads in THREADS for batch in batches]
    lines = [
        f"| structure | method | {' | '.join(heads)} | calls by batch size |",
        f"| --- | --- |{' --- |' * len(heads)} --- |",
    ]
    for row in record["rows"]:
        rates = [f"{rate:.2f}" for threads in THREADS for rate in row["rates"][str(threads)]]
        calls = ", ".join(map(str, row["calls"]))
        lines.append(f"| {row['structure']} | `{row['method']}` | {' | '.join(rates)} | {calls} |")
    about = record["machine"]
    lines += ["", f"L = {record['rows'][0]['length']}, {about['cpu']}, {about['cores']} cores, {versions_of(about)}."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", type=int, default=LENGTH, help=f"tokens (default: {LENGTH})")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each case (default: 3)")
    parser.add_argument("--write", action="store_true", help="record the numbers and write the page")
    options = parser.parse_args(arguments)
    rows = [row for kind in KINDS for row in measured(kind, options.length, options.rounds)]
    record = {"machine": machine("cpu"), "rows": rows}
    print(section(record))
    if options.write:
        RECORD.write_text(stored(record))
        page = ROOT / "docs" / "performance.md"
        page.write_text(replace_section(page.read_text(), "throughput", section(record)))


if __name__ == "__main__":
    main()
