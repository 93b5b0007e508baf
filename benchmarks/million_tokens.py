"""Rollout of the last token of a very long input: time and peak memory of every stage, and the error of the result.

    python benchmarks/million_tokens.py --model mamba --length 1000000 --json million.json
    python benchmarks/million_tokens.py --model mamba2 --length 10000000 --stream-to FOLDER --json million.json

The model is a small transformers model with random weights. The row of the rollout is checked with a linear identity:
its sum is the last entry of the same product of maps applied to a vector of ones, computed in the forward direction.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from benchmarks.machine import machine
from unilinattn.operator.carry import Carry, carried_by
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.piecewise import PiecewiseOperator
from unilinattn.operator.scopes import scoped
from unilinattn.operator.stages import run
from unilinattn.tracing.layer import Layer


def build(model: str, layers: int, width: int) -> nn.Module:
    """Return a small host with random weights, whose layers change the residual stream by similar amounts."""
    shape = dict(vocab_size=256, hidden_size=width, num_hidden_layers=layers, use_cache=False, state_size=16)
    if model == "mamba2":
        config = transformers.Mamba2Config(**shape, head_dim=width // 4, num_heads=8, n_groups=1)
        return transformers.Mamba2ForCausalLM(config).eval()
    return transformers.MambaForCausalLM(transformers.MambaConfig(**shape)).eval()


class Log:
    """Prints one line per stage, and collects the stages for the JSON."""

    def __init__(self) -> None:
        self.stages: list[dict[str, Any]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Time the body of a `with` statement; entries of the yielded mapping are added to the stage."""
        figures: dict[str, Any] = {}
        start = time.perf_counter()
        yield figures
        self.add(name, time.perf_counter() - start, **figures)

    def add(self, name: str, seconds: float, **figures: Any) -> None:
        """Print and store a stage."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.stages.append({"stage": name, "seconds": round(seconds, 3), "peak_gib": round(peak, 3), **figures})
        more = "".join(f"  {key} {value}" for key, value in figures.items())
        print(f"{name:<34} {seconds:9.2f} s   peak RSS {peak:6.2f} GiB{more}", flush=True)


@contextmanager
def timed_mixers(model: nn.Module, log: Log) -> Iterator[None]:
    """Log the time of each mixer that runs in the body of a `with` statement."""
    handles, started = [], {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Mixer"):

            def enter(_: nn.Module, __: object, name: str = name) -> None:
                started[name] = time.perf_counter()

            def leave(_: nn.Module, __: object, ___: object, name: str = name) -> None:
                log.add(f"  {name}", time.perf_counter() - started[name])

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def forward_map(layer: Layer, ones: Tensor) -> Tensor:
    """Apply the channel-mean map of a layer's core to one number per token, (batch, length)."""
    operator, carry = layer.operator, Carry()
    if not isinstance(operator, PiecewiseOperator):
        return _through_core(operator, layer, ones)
    product = torch.empty_like(ones)
    for tokens, piece in operator.pieces():
        with carried_by(carry):
            product[:, tokens] = _through_core(piece, layer, ones[:, tokens])
    return product


def _through_core(operator: MixerOperator, layer: Layer, ones: Tensor) -> Tensor:
    chain, channels = scoped(operator.chains["x"], "core", layer.input.shape[-1])
    return run(chain, ones[..., None].expand(-1, -1, channels), bias=False).mean(-1)


@torch.no_grad()
def main() -> None:
    """Run and print every stage, and write the JSON of `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["mamba", "mamba2"], default="mamba")
    parser.add_argument("--length", type=int, default=1_000_000, help="tokens")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="channels of the residual stream")
    parser.add_argument("--stream-to", type=Path, help="folder for the files of the streams; by default in memory")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()

    log = Log()
    torch.manual_seed(0)
    model = build(options.model, options.layers, options.width)
    ids = torch.randint(256, (1, options.length))
    log.add("start", 0.0)
    with ExitStack() as stack:
        stack.enter_context(log.stage("trace"))
        if options.stream_to is None:
            stack.enter_context(timed_mixers(model, log))
        trace = ula.trace(model, ids, stream_to=options.stream_to)
    for layer in trace.layers:
        log.add(f"  {layer.name} checked", 0.0, prefix_error=layer.prefix_error)
    with log.stage("rollout of the last token") as rollout:
        result = ula.explain(trace, method="rollout", target=-1)
        total = float(result.scores.double().sum())
        rollout.update(row_sum=total, finite=bool(result.scores.isfinite().all()))

    vector = torch.ones(1, options.length)
    for layer in trace.layers:
        with log.stage(f"  {layer.name} forward"):
            vector = vector + forward_map(layer, vector)
    expected = float(vector[0, -1])
    difference = abs(total - expected) / abs(expected)
    log.add("identity", 0.0, row_sum=total, expected=expected, relative_difference=difference)

    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if options.json:
        shape = {key: getattr(options, key) for key in ("model", "length", "layers", "width")}
        shape["in_pieces"] = options.stream_to is not None
        shape["data_limit_gib"] = None if limit == resource.RLIM_INFINITY else round(limit / 2**30, 3)
        written = {**shape, "machine": machine("cpu"), "versions": trace.versions, "stages": log.stages}
        options.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
