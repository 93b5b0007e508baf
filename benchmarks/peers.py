"""The hidden attention of a Mamba-1 model and its rollout, beside TransformerLens in an environment of its own.

python -m benchmarks.peers --python .venv-peers/bin/python            measure, and print the table
python -m benchmarks.peers --python .venv-peers/bin/python --write    also record, and write docs/performance.md

The environment is made by

    python -m venv .venv-peers
    .venv-peers/bin/pip install torch==2.13.0 transformers==5.23.0 transformer-lens==4.3.0

Both tools load the same weights from a temporary folder and run one after the other, each in its process.
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
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.machine import machine, versions_of
from benchmarks.page import in_bytes, table
from tools.markers import replace_section
from unilinattn.testing import relative_error

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "peers.json"

VERSION = "4.3.0"
INSTALL = (
    "Make an environment for it with: python -m venv .venv-peers && .venv-peers/bin/pip install torch==2.13.0 "
    f"transformers==5.23.0 transformer-lens=={VERSION}"
)
WIDTH, STATE, LAYERS, VOCABULARY = 192, 16, 2, 64
"""Sizes of the model: E = 2 x 192 = 384 channels."""

LENGTHS = (64, 128, 256, 512, 1024)
TOLERANCE = 1e-4
"""Largest relative difference of the results, in float32."""

STAGES = {"run": "run", "map": "mean map", "rollout": "rollout"}


def peer_bytes(length: int) -> int:
    """Return the memory that TransformerLens needs: four tensors (channel, state, query, key) of a layer in float32."""
    return 4 * 4 * 2 * WIDTH * STATE * length**2


def save_checkpoint(folder: Path) -> None:
    """Write a model with random weights, and the tokenizer that TransformerLens needs."""
    torch.manual_seed(0)
    tokens = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    config = transformers.MambaConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=STATE, **tokens)
    transformers.MambaForCausalLM(config).save_pretrained(folder)
    words = WordLevel({f"w{k}": k for k in range(VOCABULARY)}, unk_token="w0")
    special = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "w0")
    transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)


def require_peer(python: str) -> None:
    """Raise `FileNotFoundError` without the interpreter, `ModuleNotFoundError` without TransformerLens `VERSION`."""
    command = [python, "-c", "from importlib.metadata import version; print(version('transformer_lens'))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise FileNotFoundError(f"--python {python}: there is no such interpreter. {INSTALL}") from error
    found = done.stdout.strip() if done.returncode == 0 else "no transformer_lens"
    if found != VERSION:
        raise ModuleNotFoundError(f"--python {python} has {found}; {VERSION} is measured. {INSTALL}")


def worker(python: str, tool: str, checkpoint: Path, length: int, rounds: int, threads: int) -> dict[str, Any]:
    """Run one tool in a process; return its figures and results."""
    results = checkpoint / f"{tool}.pt"
    arguments = [tool, str(checkpoint), str(length), str(rounds), str(threads), str(results)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    command = [python, "-m", "benchmarks.peer_worker", *arguments]
    environment = {**os.environ, **offline}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ChildProcessError(f"{tool} at {length} tokens ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "results": torch.load(results)}


def measured(python: str, length: int, checkpoint: Path, rounds: int, threads: int, memory: float) -> dict[str, Any]:
    """Return the figures of both tools at a length, and the relative differences of their results.

    TransformerLens does not run if it needs more than `memory` bytes. Raises `ArithmeticError` for a difference above
    `TOLERANCE`.
    """
    ours = worker(sys.executable, "unilinattn", checkpoint, length, rounds, threads)
    row: dict[str, Any] = {"length": length, "unilinattn": ours["stages"]}
    if peer_bytes(length) > memory:
        return {**row, "peer_bytes": peer_bytes(length)}
    peer = worker(python, "transformer_lens", checkpoint, length, rounds, threads)
    differences = {}
    for stage, result in ours["results"].items():
        # The own key of a rollout holds the identity, which is larger than the others by orders of magnitude.
        keys = slice(-1) if stage == "rollout" else slice(None)
        difference = float(relative_error(peer["results"][stage][..., keys].double(), result[..., keys].double()))
        if not difference <= TOLERANCE:
            raise ArithmeticError(f"{stage} at {length} tokens: the tools differ by {difference:.1e} (relative)")
        differences[stage] = float(f"{difference:.1e}")
    return {**row, "transformer_lens": peer["stages"], "differences": differences}


def section(record: Mapping[str, Any]) -> str:
    """Return the section of the page."""
    header = ("L", "", "unilinattn", "TransformerLens", "ratios", "difference")
    lines = [(str(row["length"]), *cells) for row in record["rows"] for cells in _stages(row)]
    about = record["machine"]
    threads = f"{about['threads']} thread{'' if about['threads'] == 1 else 's'}"
    return table(header, lines) + f"\n\n{about['cpu']}; {threads}, {about['memory']} of memory; {versions_of(about)}."


def stored(record: Mapping[str, Any]) -> str:
    """Return a record as JSON with one line per row."""
    head = json.dumps({key: value for key, value in record.items() if key != "rows"}, indent=2).removesuffix("\n}")
    rows = ",\n".join(f"    {json.dumps(row)}" for row in record["rows"])
    return f'{head},\n  "rows": [\n{rows}\n  ]\n}}\n'


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help=f"interpreter that has transformer_lens {VERSION}")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="L", help="numbers of tokens")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, fewer if they take long")
    parser.add_argument("--memory", type=float, default=12.0, help="largest memory of TransformerLens in GiB")
    parser.add_argument("--write", action="store_true", help="record the figures and write the page")
    options = parser.parse_args(arguments)
    try:
        require_peer(options.python)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        parser.error(str(error))
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = []
    with TemporaryDirectory() as folder:
        save_checkpoint(Path(folder))
        for length in options.lengths:
            memory = options.memory * 2**30
            rows.append(measured(options.python, length, Path(folder), options.rounds, options.threads, memory))
            print(f"measured {length} tokens", flush=True)
    record = {"machine": machine("cpu"), "transformer_lens": VERSION, "rows": rows}
    print(section(record))
    if options.write:
        RECORD.write_text(stored(record))
        page = ROOT / "docs" / "performance.md"
        page.write_text(replace_section(page.read_text(), "peers", section(record)))


def _stages(row: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for stage, name in STAGES.items():
        ours, theirs = row["unilinattn"][stage], row.get("transformer_lens", {}).get(stage)
        if theirs is None:
            needed = "" if stage == "run" else f"not run: {in_bytes(row['peer_bytes'])}"
            yield name, _cell(ours), needed, "", ""
        else:
            slower = median(theirs["seconds"]) / median(ours["seconds"])
            larger = _largest(theirs) / max(1, _largest(ours))
            difference = f"{row['differences'][stage]:.0e}" if stage in row["differences"] else ""
            yield name, _cell(ours), _cell(theirs), f"{_ratio(slower)}, {_ratio(larger)}", difference


def _cell(figures: Mapping[str, Any]) -> str:
    seconds = median(figures["seconds"])
    time = f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
    return f"{time}, {in_bytes(_largest(figures))}"


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _largest(figures: Mapping[str, Any]) -> int:
    return max(size or 0 for size in figures["bytes"])


if __name__ == "__main__":
    main()
