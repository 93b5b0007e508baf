"""Memory and time of `logit` on a model whose weights stay in files: `python -m benchmarks.disk [NAME] [--write]`.

A model of random weights is written to shards in bfloat16, block by block, and opened by `from_pretrained` with
`device_map={"": "disk"}`, as a user opens a model larger than the memory. Peaks are those of the memory that the
kernel cannot take back (RssAnon): mapped files are left out, whose pages it drops when memory is short.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import unilinattn as ula
from benchmarks.machine import machine
from tools.markers import replace_section, table

RESULTS = Path(__file__).parent / "results" / "disk.json"
PAGE = Path(__file__).parents[1] / "docs" / "howto" / "large_models.md"

DEFAULT = ("mamba-2.8b", "llama-7b")

MIB = 1 << 20

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tiny": ("LlamaForCausalLM", {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}),
    "mamba-2.8b": ("MambaForCausalLM", {"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280}),
    "mamba2-2.7b": (
        "Mamba2ForCausalLM",
        {"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50288, "num_heads": 80, "n_groups": 1},
    ),
    "llama-7b": (
        "LlamaForCausalLM",
        {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
}
"""Class and sizes of each model, those of the published checkpoints of its name."""


def write_shards(name: str, folder: Path) -> int:
    """Write a model of random weights to a folder, a shard for each block, and return the bytes of its weights.

    Weights are those of the class's own initialisation of one block after the other.
    """
    kind, sizes = MODELS[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**sizes, dtype="bfloat16")
    with torch.device("meta"):
        model = model_class(config)
    shapes = {key: value for key, value in model.state_dict().items()}
    tied = {key for key in model._tied_weights_keys or ()} if config.tie_word_embeddings else set()
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for key in shapes.keys() - tied:
        shards.setdefault(".".join(part for part in key.split(".")[:3]), {})[key] = shapes[key]
    small = model_class(model_class.config_class(**{**sizes, "num_hidden_layers": 1, "vocab_size": 64}))
    values = small.state_dict()
    index: dict[str, str] = {}
    total = 0
    torch.manual_seed(0)
    for number, (_, shard) in enumerate(sorted(shards.items())):
        tensors = {key: _initial(key, value.shape, values) for key, value in shard.items()}
        total += sum(tensor.nbytes for tensor in tensors.values())
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    config.architectures = [kind]
    config.save_pretrained(folder)
    return total


def _initial(key: str, shape: torch.Size, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return random values of a matrix, and those of a one-layer model of its class for other weights."""
    first = ".".join("0" if part.isdigit() else part for part in key.split("."))
    if len(shape) != 2 or key.endswith("A_log"):
        return values[first].to(torch.bfloat16).contiguous()
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)


class Peak:
    """The largest RssAnon of this process while a call runs, sampled every 5 ms."""

    def __init__(self) -> None:
        """Start from the present size."""
        self.started = self.largest = anonymous()
        self._stop = threading.Event()

    def watch(self) -> None:
        """Sample until `stop`."""
        while not self._stop.wait(0.005):
            self.largest = max(self.largest, anonymous())

    def stop(self) -> None:
        """End the samples."""
        self._stop.set()


def anonymous() -> int:
    """Return the bytes of this process's memory that no file backs."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


@contextmanager
def watched() -> Iterator[Peak]:
    """Watch the memory of a block."""
    peak = Peak()
    thread = threading.Thread(target=peak.watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        peak.stop()
        thread.join()


def measured(label: str, call: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """Return the seconds and the growth of a call, and its result."""
    with watched() as peak:
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
    row = {"step": label, "seconds": round(seconds, 1), "growth_mib": round((peak.largest - peak.started) / MIB)}
    row["peak_mib"] = round(peak.largest / MIB)
    print(json.dumps(row), flush=True)
    return row, result


def run(name: str, length: int, folder: Path) -> dict[str, Any]:
    """Measure one model."""
    total = write_shards(name, folder)
    kind = getattr(transformers, MODELS[name][0])
    model: nn.Module = kind.from_pretrained(
        folder, device_map={"": "disk"}, offload_folder=str(folder / "offload"), dtype=torch.bfloat16
    ).eval()
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rows = [measured("forward", lambda: model(ids).logits)[0]]
    row, trace = measured("trace", lambda: ula.trace(model, ids, progress=False))
    rows.append(row)
    row, result = measured("logit", lambda: ula.explain(trace, method="logit", target=-1, progress=False))
    rows.append(row)
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_mib": round(total / MIB),
        "tokens": length,
        "reconstruction_error": max(layer.reconstruction_error() for layer in trace.layers),
        "completeness_gap": result.completeness_gap,
        "rows": rows,
        "machine": machine("cpu"),
    }


def section(records: list[dict[str, Any]]) -> str:
    """Return the table of the records, as the page has it."""
    steps = [row["step"] for row in records[0]["rows"]]
    head = ("model", "weights", "tokens", *(f"{step}: peak, time" for step in steps), "largest reconstruction error")
    rows = []
    for record in records:
        cells = [f"{row['peak_mib']:,} MiB, {row['seconds']:.0f} s" for row in record["rows"]]
        error = f"{record['reconstruction_error']:.0e}"
        rows.append((record["model"], f"{record['weights_mib']:,} MiB", record["tokens"], *cells, error))
    cpu = records[0]["machine"]
    machine_text = f"{cpu['cpu']}, {cpu['threads']} of {cpu['cores']} cores, {cpu['memory']}; torch {cpu['torch']}."
    return f"{table(head, rows)}\n\n{machine_text}"


def model_name(text: str) -> str:
    """Return a name on the command line, if it is that of a model."""
    if text not in MODELS:
        raise argparse.ArgumentTypeError(f"unknown model {text!r}; there are {', '.join(MODELS)}")
    return text


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk", description=__doc__)
    parser.add_argument("models", nargs="*", type=model_name, help=f"by default {' and '.join(DEFAULT)}")
    parser.add_argument("--tokens", type=int, default=128, help="length of the input")
    parser.add_argument("--write", action="store_true", help=f"record the numbers in {RESULTS.name}")
    options = parser.parse_args()
    records = []
    for name in options.models or DEFAULT:
        with tempfile.TemporaryDirectory(prefix="unilinattn-") as folder:
            records.append(run(name, options.tokens, Path(folder)))
            print(json.dumps(records[-1]), flush=True)
    if options.write:
        RESULTS.write_text(json.dumps(records, indent=1) + "\n")
        PAGE.write_text(replace_section(PAGE.read_text(), "disk", section(records)))


if __name__ == "__main__":
    main()
