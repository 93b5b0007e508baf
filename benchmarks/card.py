"""Memory and time of models of published sizes on one GPU: `python -m benchmarks.card [NAME ...] [--write]`.

Models of random weights in bfloat16. Peaks are those of torch's allocator, without the weights; each step runs twice,
and the second run is timed: the first compiles and tunes kernels.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import unilinattn as ula
from benchmarks.disk import MIB, MODELS, PAGE, model_name
from benchmarks.machine import machine
from tools.markers import replace_section, table

RESULTS = Path(__file__).parent / "results" / "card.json"

DEFAULT = ("llama-7b", "mamba-2.8b")


def built(name: str, device: str) -> nn.Module:
    """Return a model of random weights in bfloat16, initialised by its class on the device."""
    kind, sizes = MODELS[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: nn.Module = model_class(model_class.config_class(**sizes))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def measured(label: str, call: Callable[[], Any], device: str) -> tuple[dict[str, Any], Any]:
    """Return the seconds and the peak of the second of two runs, and its result."""
    call()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    start = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    row = {"step": label, "seconds": round(seconds, 3), "peak_mib": round(peak / MIB)}
    print(json.dumps(row), flush=True)
    return row, result


def run(name: str, length: int, device: str) -> dict[str, Any]:
    """Measure one model."""
    model = built(name, device)
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        rows = [measured("forward", lambda: model(ids).logits, device)[0]]
    row, trace = measured("trace", lambda: ula.trace(model, ids, progress=False), device)
    error = max(layer.reconstruction_error() for layer in trace.layers)
    del trace
    rows.append(row)
    row, result = measured("explain", lambda: ula.explain(model, ids, target=-1, progress=False), device)
    rows.append(row)
    return {
        "model": name,
        "weights_mib": round(sum(parameter.nbytes for parameter in model.parameters()) / MIB),
        "tokens": length,
        "method": result.method,
        "reconstruction_error": error,
        "completeness_gap": result.completeness_gap,
        "rows": rows,
        "machine": machine(device),
    }


def section(records: list[dict[str, Any]]) -> str:
    """Return the table of the records, as the page has it."""
    steps = [row["step"] for row in records[0]["rows"]]
    head = ("model", "weights", "tokens", *(f"{step}: peak, time" for step in steps), "method", "reconstruction error")
    rows = []
    for record in records:
        cells = [f"+{row['peak_mib']:,} MiB, {row['seconds']:.2f} s" for row in record["rows"]]
        error = f"{record['reconstruction_error']:.0e}"
        weights = f"{record['weights_mib']:,} MiB"
        rows.append((record["model"], weights, record["tokens"], *cells, f"`{record['method']}`", error))
    gpu = records[0]["machine"]
    return f"{table(head, rows)}\n\n{gpu['gpu']}; torch {gpu['torch']}, transformers {gpu['transformers']}."


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.card", description=__doc__)
    parser.add_argument("models", nargs="*", type=model_name, help=f"by default {' and '.join(DEFAULT)}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="lengths of the inputs")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to test this command")
    parser.add_argument(
        "--write", action="store_true", help=f"record the numbers in {RESULTS.name}, and write the page"
    )
    parser.add_argument("--page", action="store_true", help="write the page from the recorded numbers")
    options = parser.parse_args()
    if options.write and options.device != "cuda":
        parser.error("--write records figures of a GPU; leave --device out")
    if not options.page:
        if options.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device cuda: torch sees no GPU here")
        records = [run(name, length, options.device) for name in options.models or DEFAULT for length in options.tokens]
        print(json.dumps(records), flush=True)
        if options.write:
            RESULTS.write_text(json.dumps(records, indent=1) + "\n")
    if options.page or options.write:
        PAGE.write_text(replace_section(PAGE.read_text(), "card", section(json.loads(RESULTS.read_text()))))


if __name__ == "__main__":
    main()
