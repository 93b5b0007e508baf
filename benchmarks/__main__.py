"""Time every operation and its floor in one process, and write the figures, the page and the plot.

python -m benchmarks                  measure on two threads of the CPU
python -m benchmarks --device cuda    measure on a GPU
python -m benchmarks --only logit     measure one operation, and keep the recorded figures of the others
python -m benchmarks --avx2           measure the operations with goals, limited to the vector instructions of AVX2
python -m benchmarks --table          write the page and the plot from the recorded figures
"""

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import cases, page, structures
from benchmarks.cases import Case
from benchmarks.checks import checked
from benchmarks.growth import grown
from benchmarks.machine import AVX2, machine, uses_avx2
from benchmarks.memory import usage
from benchmarks.models import NARROW, PUBLISHED
from benchmarks.rivals import Place
from benchmarks.timing import interleaved
from tools.markers import replace_section

ROOT = Path(__file__).resolve().parents[1]


def measured(case: Case, place: Place, seconds: float, *, growth: bool) -> dict[str, Any]:
    """Run a case and its rivals: once each as a warm-up that counts memory and calls, then in turns.

    A case without rounds runs once: its time is that of the run that counts memory, or on a GPU, where kernels are
    compiled then, of the run after it. `growth`: also measure the growth of a process.
    """
    prepared = cases.prepared(case, place)
    start = time.perf_counter()
    used = usage(prepared.call, place.device)
    once = time.perf_counter() - start
    memory: dict[str, int | None] = {"counted": used.peak, "resident": None}
    operations = used.calls
    # The result is freed before the timing.
    del used
    for rival in prepared.rivals.values():
        rival.call()
    calls = {**{name: rival.call for name, rival in prepared.rivals.items()}, "": prepared.call}
    rounds = max(case.rounds, int(place.device == "cuda"))
    times = interleaved(calls, rounds=rounds, least=case.least, seconds=seconds, device=place.device)
    rivals = {name: _rounded(times[name], rival.times) for name, rival in prepared.rivals.items()}
    row: dict[str, Any] = {"operation": case.operation, "structure": case.structure, "length": case.length}
    row |= {"seconds": _rounded(times[""] or [once]), "rivals": rivals, "goals": case.goals.get(place.device, {})}
    row["calls"] = operations
    if growth and case.rounds and place.device == "cpu" and place.sizes is PUBLISHED:
        memory["resident"] = grown(case, torch.get_num_threads())
    return {**row, "memory": memory}


def everything(
    device: str, *, quick: bool, seconds: float, only: Collection[str] = (), with_goals: bool = False
) -> Iterator[dict[str, Any]]:
    """Check every operation, then measure every case; print one line for each, and yield the figures so far.

    `only`: operations, by default all. `with_goals`: only cases with a goal, and without the growth of processes.
    """
    torch.manual_seed(0)
    listed = list(cases.all_cases(_shrunk if quick else lambda length: length))
    listed = [case for case in listed if not only or case.operation in only]
    listed = [case for case in listed if not with_goals or case.goals.get(device)]
    threads = torch.get_num_threads()
    # Threads only cost time on a narrow layer.
    torch.set_num_threads(1)
    pairs = sorted({(case.operation, case.structure) for case in listed if not case.operation.startswith("plain")})
    checks = []
    for check in checked(iter(pairs), Place(NARROW, device)):
        checks.append(check)
        print(f"checked  {check['operation']:<14} {check['structure']:<10} error {check['error']:.1e}", flush=True)
    torch.set_num_threads(threads)
    # Imported objects are never freed: exclude them from the collector, which would visit them at every collection.
    gc.collect()
    gc.freeze()
    place = Place(NARROW if quick else PUBLISHED, device)
    rows: list[dict[str, Any]] = []
    settings = {"dtype": "float32", "width": place.sizes.width, "inner": place.sizes.inner, "state": place.sizes.state}
    figures = {"device": device, "machine": machine(device), "settings": settings, "checks": checks, "rows": rows}
    for case in listed:
        row = measured(case, place, seconds, growth=not with_goals)
        # Goals hold for the published sizes.
        row["goals"] = {} if quick else row["goals"]
        rows.append(row)
        print(_line(row), flush=True)
        yield figures


def merged(recorded: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures of some cases with the recorded ones of the others."""

    def both(name: str, axes: Sequence[str]) -> list[dict[str, Any]]:
        rows = {tuple(row[axis] for axis in axes): row for row in (*recorded[name], *figures[name])}
        return sorted(rows.values(), key=lambda row: (row["structure"], row["length"]))

    # All checks of an operation have one length.
    pair = ("operation", "structure")
    return {**figures, "checks": both("checks", pair), "rows": both("rows", (*pair, "length"))}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seconds", type=float, default=30.0, help="time after which three rounds suffice")
    parser.add_argument("--quick", action="store_true", help="narrow layers and short inputs, to test the program")
    operations = sorted({case.operation for case in cases.all_cases()})
    parser.add_argument("--only", nargs="+", choices=operations, default=(), metavar="OPERATION", help="measure these")
    parser.add_argument("--avx2", action="store_true", help="limit torch, its libraries and Numba to AVX2")
    parser.add_argument("--table", action="store_true", help="write the page and the plot from recorded figures")
    parser.add_argument("--out", type=Path, help="folder for the figures and the page, instead of the docs")
    options = parser.parse_args(arguments)
    if options.quick and options.out is None:
        parser.error("--quick gives no figures for the docs; name a folder with --out")
    if options.avx2 and (options.only or options.device != "cpu"):
        parser.error("--avx2 measures every operation with a goal on the CPU; leave --only and --device out")
    if options.avx2 and not options.table and not uses_avx2():
        if os.environ.get("ATEN_CPU_CAPABILITY") == AVX2["ATEN_CPU_CAPABILITY"]:
            parser.error("--avx2: this processor has no AVX2")
        # The libraries read the variables when they are loaded.
        given = sys.argv[1:] if arguments is None else arguments
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *given], os.environ | AVX2)
    results, docs = (options.out, options.out) if options.out else (ROOT / "benchmarks" / "results", ROOT / "docs")
    if not options.table:
        if options.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device cuda: torch sees no GPU here")
        earlier = [
            figures for figures in page.recorded(results) if options.only and figures["device"] == options.device
        ]
        torch.set_num_threads(options.threads)
        if earlier and earlier[0]["machine"] != (now := machine(options.device)):
            parser.error(f"--only: the recorded figures are of {earlier[0]['machine']}, and this is {now}")
        # transformers logs one message per layer about its sequential path, which is the one measured.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        results.mkdir(parents=True, exist_ok=True)
        path = results / f"{'avx2' if options.avx2 else options.device}.json"
        with torch.no_grad():
            for figures in everything(
                options.device,
                quick=options.quick,
                seconds=options.seconds,
                only=options.only,
                with_goals=options.avx2,
            ):
                if earlier:
                    # Rows of a run that is cut short stay; a whole run writes none before it ends.
                    path.write_text(page.stored(merged(earlier[0], figures)))
        if not earlier:
            path.write_text(page.stored(figures))
    if options.avx2 and options.out:
        # The page compares this run with a whole one.
        return
    recorded = page.recorded(results)
    if not recorded:
        parser.error(f"no figures in {results}: run without --table first")
    print("\n" + page.section(recorded))
    page.write(recorded, ROOT / "docs" / "performance.md", docs)
    if options.out is None:
        whole = docs / "performance.md"
        text = replace_section(whole.read_text(), "structures", structures.table())
        text = replace_section(text, "avx2", page.limited(results))
        whole.write_text(replace_section(text, "million", page.long_runs(results)))


def _rounded(seconds: list[float], times: float = 1.0) -> list[float]:
    return [float(f"{times * s:.4g}") for s in seconds]


def _shrunk(length: int) -> int | None:
    if length >= 512:
        return length // 32
    return length if length <= 32 else None


def _line(row: dict[str, Any]) -> str:
    seconds = median(row["seconds"])
    parallel = "".join(f"  {seconds / median(times):6.2f} x {name}" for name, times in row["rivals"].items())
    counted = row["memory"]["counted"] / 2**20
    start = f"{row['operation']:<14} {row['structure']:<10} L {row['length']:>5}"
    return f"{start} {seconds:9.4f} s {counted:9.1f} MiB{parallel}"


if __name__ == "__main__":
    main()
