"""Time and error of LaTIM's estimated norms against the exact ones, on one layer of the published 130m sizes.

python -m benchmarks.sketch            measure, and print the table
python -m benchmarks.sketch --write    measure, record, and write the section of docs/performance.md

Weights and tokens are random. Times are medians of turns with the exact norms, on one thread.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import unilinattn as ula
from benchmarks.machine import machine, versions_of
from benchmarks.models import VOCABULARY, build
from benchmarks.page import STRUCTURES, stored
from benchmarks.timing import interleaved
from tools.markers import replace_section

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "sketch.json"

KINDS = ("mamba", "mamba2", "softmax")
LENGTH = 512
SIZES = (4, 16, 64, 256)
RANKED = 16
"""Size of the sketch by which keys are ranked before some are computed again."""
TOP = 0.05
"""Share of the keys that are computed again."""


def measured(kind: str, length: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each size of the sketch, and for a small one whose largest keys are exact."""
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    trace = ula.trace(build(kind), ids, progress=False)
    top = max(1, round(TOP * length))
    options: dict[str, Mapping[str, int]] = {"exact": {}, **{str(size): {"sketch": size} for size in SIZES}}
    options[f"{RANKED}, then exact"] = {"sketch": RANKED, "exact_keys": top}

    def scores(name: str) -> Tensor:
        return ula.explain(trace, method="latim", progress=False, **options[name]).scores[0, 0]

    found = {name: scores(name) for name in options}
    times = interleaved(
        {name: (lambda name=name: scores(name)) for name in options},
        rounds=rounds,
        least=rounds,
        seconds=0,
        device="cpu",
    )
    exact = found.pop("exact")
    # The squares of smaller norms are no normal numbers.
    pairs = exact > torch.finfo(exact.dtype).tiny ** 0.5
    # Rows with fewer keys than are computed again have nothing to rank.
    rows = slice(length // 4, None)
    best = exact[rows].argmax(-1)
    return [
        {
            "structure": STRUCTURES[kind],
            "sketch": name,
            "length": length,
            "time": round(median(t / e for t, e in zip(times[name], times["exact"], strict=True)), 3),
            "error": round(float(((one - exact)[pairs] / exact[pairs]).square().mean().sqrt()), 4),
            "bound": round((2 * options[name]["sketch"]) ** -0.5, 4),
            "best_key": round(float((one[rows].argmax(-1) == best).double().mean()), 3),
        }
        for name, one in found.items()
    ]


def section(record: Mapping[str, Any]) -> str:
    """Return the section of the page."""
    lines = [
        "| structure | sketch | time / exact | relative error | bound | rows whose largest key is found |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in record["rows"]:
        cells = (row["structure"], row["sketch"], f"{row['time']:.2f}", f"{row['error']:.3f}", f"{row['bound']:.3f}")
        lines.append(f"| {' | '.join(cells)} | {100 * row['best_key']:.0f}% |")
    about = record["machine"]
    lines += ["", f"L = {record['rows'][0]['length']}, {about['cpu']}, one thread, {versions_of(about)}."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sketch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=LENGTH, help=f"tokens (default: {LENGTH})")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each size (default: 5)")
    parser.add_argument("--write", action="store_true", help="record the numbers and write the page")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [row for kind in KINDS for row in measured(kind, options.length, options.rounds)]
    record = {"machine": machine("cpu"), "rows": rows}
    print(section(record))
    if options.write:
        RECORD.write_text(stored(record))
        page = ROOT / "docs" / "performance.md"
        page.write_text(replace_section(page.read_text(), "sketch", section(record)))


if __name__ == "__main__":
    main()
