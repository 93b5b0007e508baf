"""The adjoint scan of a Mamba-1 layer as operations of torch, as a step that torch.compile fuses, and as Numba's loop.

python -m benchmarks.fused            measure, and print the table
python -m benchmarks.fused --write    measure, record, and write the section of docs/performance.md

The layer has the published 130m sizes and random weights. The step for torch.compile, which needs a C++ compiler, is no
part of the library.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import machine, versions_of
from benchmarks.models import PUBLISHED
from benchmarks.page import stored
from benchmarks.plain import core_of
from benchmarks.rivals import Place, exponentials
from benchmarks.timing import interleaved
from tools.markers import replace_section
from unilinattn.kernels import loops
from unilinattn.kernels.backend import Backend, using
from unilinattn.mixers import DiagonalDecay

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "fused.json"

LENGTHS = (512, 2048)
STEPS = 16
"""Tokens of a fused step."""


def step(
    state: Tensor, query: Tensor, key: Tensor, log_decay: Tensor, scale: Tensor, rate: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the adjoint recurrence of some tokens from the state (state, channel) after them."""
    outputs = []
    for t in range(len(grad) - 1, -1, -1):
        state = state + query[t, :, None] * grad[t]
        outputs.append((state * key[t, :, None]).sum(0) * scale[t])
        state = state * torch.exp(log_decay[t] * rate)
    return torch.stack(outputs[::-1]), state


def adjoint(run: Callable[..., tuple[Tensor, Tensor]], mixer: DiagonalDecay, grad: Tensor) -> Tensor:
    """Apply the transposed mixer to vectors (token, channel), `STEPS` tokens at a time."""
    assert mixer.rate is not None and mixer.key_scale is not None
    query, key, log_decay = mixer.query[0, :, 0], mixer.key[0, :, 0], mixer.log_decay[0, :, :, 0]
    scale, rate = mixer.key_scale[0], mixer.rate.T.contiguous()
    state, outputs = torch.zeros_like(rate), []
    for factors in list(zip(*(t.split(STEPS) for t in (query, key, log_decay, scale, grad)), strict=True))[::-1]:
        *given, vectors = factors
        output, state = run(state, *given, rate, vectors)
        outputs.append(output)
    return torch.cat(outputs[::-1])


def measured(rounds: int) -> dict[str, Any]:
    """Return a row for each length, and the seconds of the first fused call and of the compilation by Numba."""
    place, compiled = Place(PUBLISHED, "cpu"), torch.compile(step)
    rows: list[dict[str, Any]] = []
    first: dict[str, float] = {}
    for length in LENGTHS:
        mixer = core_of(place.operator("mamba", length))
        assert isinstance(mixer, DiagonalDecay)
        grad = place.numbers(length, mixer.heads)

        def form(name: Backend, mixer: DiagonalDecay = mixer, grad: Tensor = grad) -> Tensor:
            with using(name):
                return mixer.adjoint(grad[None, :, :, None])[0, :, :, 0]

        calls: dict[str, Callable[[], Tensor]] = {
            "torch": partial(form, "torch"),
            "torch.compile": partial(adjoint, compiled, mixer, grad),
            "Numba": partial(form, "numba"),
        }
        expected, errors = calls["torch"](), {}
        for name in ("torch.compile", "Numba"):
            start = time.perf_counter()
            found = calls[name]()
            first.setdefault(name, time.perf_counter() - start)
            errors[name] = float(f"{float((found - expected).norm() / expected.norm()):.1e}")
            if errors[name] > 1e-5:
                raise RuntimeError(f"the scan of {length} tokens by {name} has a relative error of {errors[name]:.1e}.")
        reference = exponentials("mamba", length, place)
        reference.call()
        calls["exponentials"] = reference.call
        times = interleaved(calls, rounds=rounds, least=rounds, seconds=0, device="cpu")
        seconds = {name: median(each) for name, each in times.items()}
        seconds["exponentials"] *= reference.times
        rows.append({"length": length, "errors": errors, **seconds})
    start = time.perf_counter()
    loops.scan_adjoint.recompile()
    first["Numba"] = time.perf_counter() - start
    return {
        "machine": machine("cpu"),
        "threads": torch.get_num_threads(),
        "first": {name: round(seconds, 1) for name, seconds in first.items()},
        "rows": rows,
    }


def section(record: dict[str, Any]) -> str:
    """Return the section of the page."""
    names = ("exponentials", "torch", "torch.compile", "Numba")
    lines = [
        "| L | exponentials | torch | torch.compile | Numba | torch / Numba |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in record["rows"]:
        cells = [f"{1e3 * row[name]:.1f} ms" for name in names]
        lines.append(f"| {row['length']} | {' | '.join(cells)} | {row['torch'] / row['Numba']:.1f} |")
    about, first = record["machine"], record["first"]
    where = f"{about['cpu']}, {record['threads']} threads, {versions_of(about)}"
    lines += [
        "",
        f"The first call of the step of torch.compile took {first['torch.compile']:.0f} s; Numba compiles the loop in "
        f"{first['Numba']:.1f} s, once on a machine. {where}.",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fused", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns of each scan (default: 15)")
    parser.add_argument("--write", action="store_true", help="record the numbers and write the page")
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    record = measured(options.rounds)
    print(section(record))
    if options.write:
        RECORD.write_text(stored(record))
        page = ROOT / "docs" / "performance.md"
        page.write_text(replace_section(page.read_text(), "fused", section(record)))


if __name__ == "__main__":
    main()
