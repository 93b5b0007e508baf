"""Time, peak memory and torch calls of each method on whole models of published shapes, beside the host's forward.

python -m benchmarks.whole_models                                 measure everything, on one thread
python -m benchmarks.whole_models --models gpt2 --lengths 256 --methods rollout latim-all
python -m benchmarks.whole_models --table                         write the page from the recorded figures

Weights and tokens are random. The figures of a part replace that part of the recorded figures of the same machine. A
call whose predicted time or memory is out of reach does not run; its prediction is recorded.
"""

import argparse
import copy
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import unilinattn as ula
from benchmarks import whole_page
from benchmarks.machine import machine
from benchmarks.memory import usage
from benchmarks.published import SHAPES, tokens
from benchmarks.rivals import Place, Rival, vectors_floor
from benchmarks.timing import interleaved
from benchmarks.whole_checks import checked, row_sum_error
from tools.markers import replace_section
from unilinattn.errors import MemoryLimitError
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "whole-models.json"
LENGTHS = (256, 1024, 4096)

OF_A_TOKEN = ("raw", "rollout", "latim", "alti", "attribution", "contribution", "logit", "lrp", "alti_logit")
OF_ALL = ("raw", "rollout", "latim", "alti")
METHODS: Mapping[str, tuple[str, int | None]] = {
    **{method: (method, -1) for method in OF_A_TOKEN},
    **{f"{method}-all": (method, None) for method in OF_ALL},
}
"""Method and target of each measured call: the last token, or all queries."""


@dataclass(frozen=True)
class Limits:
    """Largest predicted seconds and bytes of a call, number of rounds, and seconds after which a round is the last."""

    seconds: float
    bytes: float
    rounds: int
    in_turns: float


def measured(
    name: str, model: nn.Module, length: int, methods: Sequence[str], limits: Limits, rates: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the host's forward, of the trace, of building its operators, and of each method.

    The row of a method also has the times "again", with the operators of an earlier call.

    `rates`: seconds of each method at a shorter length for each pair of tokens; those of this length replace them.
    """
    ids = tokens(model, length)

    def host(_: Trace) -> Tensor:
        logits: Tensor = model(ids, use_cache=False, logits_to_keep=1).logits
        return logits

    trace = ula.trace(model, ids, progress=False)
    calls: dict[str, Callable[[Trace], Any]] = {
        "host": host,
        "trace": lambda _: ula.trace(model, ids, progress=False),
        "operators": lambda trace: [layer.reconstruction_error() for layer in trace.layers],
        **{method: lambda trace, method=method: _scores(trace, method) for method in methods},
    }
    kept = kept_bytes(trace)
    estimates = estimated(fresh(trace), methods) if kept <= limits.bytes else {}
    rows: dict[str, dict[str, Any]] = {}
    for call, run in calls.items():
        prediction = {"bytes": 0 if call in ("host", "trace") else kept, "seconds": 0.0}
        if call in estimates:
            prediction["bytes"] += estimates[call].beside + estimates[call].result
            prediction["seconds"] = float(f"{rates.get(call, 0.0) * length**2:.2g}")
        rows[call] = {"predicted": prediction}
        if prediction["bytes"] <= limits.bytes and prediction["seconds"] <= limits.seconds:
            with suppress(MemoryLimitError):
                rows[call] = first_run(call, run, fresh(trace))
    in_turns = {call: (lambda run=run: run(fresh(trace))) for call, run in calls.items() if "peak" in rows[call]}
    repeated = {f"{call} again": call for call in methods if call in in_turns}
    if repeated and kept <= limits.bytes:
        built = fresh(trace)
        calls["operators"](built)
        in_turns |= {again: partial(calls[call], built) for again, call in repeated.items()}
    floors = _floors(name, length) if "latim-all" in in_turns else {}
    for kind, floor in floors.items():
        floor.call()
        in_turns[kind] = floor.call
    times = interleaved(in_turns, rounds=limits.rounds, least=1, seconds=limits.in_turns, device="cpu")
    for call in in_turns.keys() & rows.keys():
        rows[call]["seconds"] = _rounded(times[call])
        if f"{call} again" in times:
            rows[call]["again"] = _rounded(times[f"{call} again"])
    if floors:
        rounds = zip(*([floor.times * s for s in times[kind]] for kind, floor in floors.items()), strict=True)
        rows["latim-all"]["floor"] = _rounded([sum(parts) for parts in rounds])
    for call, row in rows.items():
        if call in estimates and call in in_turns:
            rates[call] = median(row["seconds"]) / length**2
        yield {"model": name, "length": length, "call": call, **row}


def first_run(call: str, run: Callable[[Trace], Any], trace: Trace) -> dict[str, Any]:
    """Run a call on a fresh trace, count its memory and operations, and check its result.

    The library itself refuses layers whose reconstruction error exceeds the tolerance.
    """
    used = usage(lambda: run(trace), "cpu")
    if isinstance(used.result, Tensor) and not used.result.isfinite().all():
        raise ArithmeticError(f"{call} of {trace.model} is not finite")
    row: dict[str, Any] = {"peak": used.peak, "kept": used.kept, "calls": used.calls}
    if call == "operators":
        row["error"] = float(f"{max(used.result):.1e}")
    if call == "rollout":
        row["error"] = float(f"{row_sum_error(trace, used.result):.1e}")
    return row


def kept_bytes(trace: Trace) -> int:
    """Return the bytes that the operators of a trace keep: those of one layer of each kind, times their number."""
    layers = {layer.kind: layer for layer in fresh(trace).layers}
    counts = Counter(layer.kind for layer in trace.layers)
    return sum(counts[kind] * usage(layer.reconstruction_error, "cpu").kept for kind, layer in layers.items())


def estimated(trace: Trace, methods: Sequence[str]) -> dict[str, Estimate]:
    """Return the library's estimate of each method, which does not count the operators; builds them."""
    return {name: ula.estimate(trace, method=METHODS[name][0], target=METHODS[name][1]) for name in methods}


def fresh(trace: Trace) -> Trace:
    """Return a copy that shares no operators with a trace, whose operators must not be built."""
    duplicate = copy.copy(trace)
    layers = {layer.name: copy.copy(layer) for layer in trace.layers}
    duplicate.layers = tuple(layers.values())
    duplicate.steps = tuple(replace(step, layers=tuple(layers[at.name] for at in step.layers)) for step in trace.steps)
    return duplicate


def merged(runs: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return recorded runs with a new one, whose rows replace the same rows of its machine.

    Rows of the same machine with other versions of the packages are dropped.
    """
    machine = figures["machine"]
    kept = [run for run in runs if any(run["machine"][key] != machine[key] for key in ("cpu", "cores", "threads"))]
    earlier = next((run for run in runs if run["machine"] == machine), {"checks": [], "rows": []})

    def both(name: str, *keys: str) -> list[Mapping[str, Any]]:
        rows = {tuple(row[key] for key in keys): row for row in (*earlier[name], *figures[name])}
        return list(rows.values())

    checks, rows = both("checks", "model", "method"), both("rows", "model", "length", "call")
    return [*kept, {"machine": machine, "checks": checks, "rows": rows}]


def everything(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Check every method on narrow models, then yield the figures of each model and length."""
    limits = Limits(options.limit, options.memory * 2**30, options.rounds, options.seconds)
    checks = []
    for model in options.models:
        for method in sorted({METHODS[call][0] for call in options.methods}):
            checks.append(checked(model, method))
            print(f"checked  {model:<20} {method:<14} error {checks[-1]['error']:.1e}", flush=True)
    for name in options.models:
        model, rates = SHAPES[name].build(narrow=options.quick), dict[str, float]()
        for length in sorted(options.lengths):
            rows = []
            for row in measured(name, model, length, options.methods, limits, rates):
                rows.append(row)
                print(_line(row), flush=True)
            yield {"machine": machine("cpu"), "checks": checks, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.whole_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choice: dict[str, Any] = dict(nargs="+", metavar="NAME")
    parser.add_argument("--models", choices=[*SHAPES], default=[*SHAPES], help=f"of {', '.join(SHAPES)}", **choice)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="L", help="numbers of tokens")
    parser.add_argument("--methods", choices=[*METHODS], default=[*METHODS], help=f"of {', '.join(METHODS)}", **choice)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in turns with the host's forward")
    parser.add_argument("--seconds", type=float, default=60.0, help="time after which a round is the last one")
    parser.add_argument("--limit", type=float, default=300.0, help="largest predicted seconds of a call")
    parser.add_argument("--memory", type=float, default=14.0, help="largest predicted memory of a call in GiB")
    parser.add_argument("--quick", action="store_true", help="narrow models, to test the program")
    parser.add_argument("--table", action="store_true", help="write the page from the recorded figures")
    parser.add_argument("--out", type=Path, help="file for the figures, instead of the recorded ones and the page")
    options = parser.parse_args(arguments)
    if options.quick and options.out is None:
        parser.error("--quick gives no figures for the docs; name a file with --out")
    record = options.out or RECORD
    runs = json.loads(record.read_text())["runs"] if record.exists() else []
    if not options.table:
        # transformers logs one message per layer about its sequential path, which is the one measured.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.set_num_threads(options.threads)
        with torch.no_grad():
            for figures in everything(options):
                runs = merged(runs, figures)
                record.write_text(whole_page.stored(runs))
    if not runs:
        parser.error(f"no figures in {record}: run without --table first")
    section = whole_page.section(runs)
    print("\n" + section)
    if options.out is None:
        page = ROOT / "docs" / "performance.md"
        page.write_text(replace_section(page.read_text(), "whole-models", section))


def _scores(trace: Trace, name: str) -> Tensor:
    method, target = METHODS[name]
    return ula.explain(trace, method=method, target=target, progress=False).scores


def _floors(name: str, length: int) -> dict[str, Rival]:
    """Return the floor of LaTIM of all pairs for each kind of layer, times their number."""
    shape = SHAPES[name]
    floors = {kind: vectors_floor(kind, length, Place(shape.sizes, "cpu")) for kind in shape.layers}
    return {f"floor {kind}": Rival(floor.call, floor.times * shape.layers[kind]) for kind, floor in floors.items()}


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [float(f"{s:.4g}") for s in seconds]


def _line(row: Mapping[str, Any]) -> str:
    start = f"{row['model']:<20} L {row['length']:>5} {row['call']:<14}"
    if "predicted" in row:
        prediction = row["predicted"]
        return f"{start} out of reach: {prediction['seconds']:.0f} s, {prediction['bytes'] / 2**20:.0f} MiB"
    return f"{start} {median(row['seconds']):9.3f} s {row['peak'] / 2**20:9.1f} MiB {row['calls']:>8} calls"


if __name__ == "__main__":
    main()
