"""Train a shipped example from scratch: `python -m unilinattn.examples.train --task T --model M`."""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from tqdm import trange

from unilinattn.errors import OptionError, nearest
from unilinattn.examples import FOLDER, MODELS, TASKS, accuracy, build
from unilinattn.examples.tasks import HELD_OUT_SEED, NO_ANSWER, TRAINING_SEEDS, Task
from unilinattn.host.substitution import through_operators

HELD_OUT_SEQUENCES = 512
"""Number of sequences for the recorded accuracy."""

THROUGH_OPERATORS = {"mamba", "mamba2"}
"""Models whose host scans slowly on a CPU: trained through their operators, measured by the host's forward pass."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a training: AdamW on fresh sequences, linear warm-up, then cosine decay to zero."""

    steps: int
    learning_rate: float
    batch: int = 32
    warmup: int = 100
    weight_decay: float = 0.01
    gradient_norm: float = 1.0
    initial_seed: int = 0

    def schedule(self, step: int) -> float:
        """Return the learning-rate factor of a step."""
        progress = torch.tensor(step / self.steps)
        return min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + torch.cos(torch.pi * progress).item())


RECIPES = {
    "copying": Recipe(steps=2400, learning_rate=5e-3),
    "induction": Recipe(steps=1500, learning_rate=3e-3),
}
"""The recipe of each task: its models see the same sequences in the same order."""

PATIENT = {("induction", "s4d"): Recipe(steps=6000, learning_rate=1e-2)}
"""Recipes of single models: a fixed mixer learns induction slowly, so it trains about as many seconds as Mamba-1."""


def configuration(task: Task, model: str) -> dict[str, Any]:
    """Return the keyword arguments of a model's configuration class: two layers of width 64.

    Raises `OptionError` if `model` is unknown.
    """
    if model == "s4d":
        return {"vocab_size": task.vocabulary, "d_model": 64, "n_layers": 2, "d_state": 64}
    sizes: dict[str, dict[str, int]] = {
        "mamba": {"state_size": 16},
        "mamba2": {"state_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 48},
        "transformer": {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": 64,
        },
    }
    if model not in sizes:
        raise OptionError(f"Unknown example model {model!r}{nearest(model, MODELS)}")
    # The default ids lie outside this small vocabulary, and no task has special tokens.
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    shape = {"vocab_size": task.vocabulary, "hidden_size": 64, "num_hidden_layers": 2, **sizes[model]}
    return {**shape, **tokens, "tie_word_embeddings": False, "use_cache": False}


def train(
    task: Task, model: str, recipe: Recipe, config: dict[str, Any], *, show: bool = False
) -> tuple[nn.Module, list[float]]:
    """Train on all positions with an answer; return the model, in evaluation mode, and the loss of each step."""
    torch.manual_seed(recipe.initial_seed)
    host = build(model, config).train()
    optimizer = torch.optim.AdamW(host.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.schedule)
    losses = []
    with through_operators(host) if model in THROUGH_OPERATORS else nullcontext():
        steps = trange(recipe.steps, desc=f"{task.name} {model}", disable=not show)
        for step in steps:
            batch = task.sample(recipe.batch, TRAINING_SEEDS[step])
            logits = host(batch.input_ids).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=NO_ANSWER)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(host.parameters(), recipe.gradient_norm)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            steps.set_postfix(loss=f"{losses[-1]:.4f}")
    return host.eval(), losses


def save(folder: Path, task: str, model: str, host: nn.Module, measured: dict[str, Any]) -> None:
    """Write the weights to `folder`, and the record to its `index.json`."""
    weights = f"{task}-{model}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in host.state_dict().items()}, folder / weights)
    path = folder / "index.json"
    records = json.loads(path.read_text()) if path.exists() else {}
    records.setdefault(task, {})[model] = {"weights": weights, **measured}
    ordered = {t: {m: records[t][m] for m in MODELS if m in records[t]} for t in TASKS if t in records}
    path.write_text(json.dumps(ordered, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model, measure its accuracy on held-out sequences by the host's own forward pass, and save it."""
    parser = argparse.ArgumentParser(prog="python -m unilinattn.examples.train", description=__doc__)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the weights and index.json")
    options = parser.parse_args(arguments)
    task = TASKS[options.task]
    recipe = PATIENT.get((options.task, options.model), RECIPES[options.task])
    config = configuration(task, options.model)

    # Tensors of this size gain nothing from a second thread.
    torch.set_num_threads(1)
    start = time.perf_counter()
    host, losses = train(task, options.model, recipe, config, show=True)
    seconds = time.perf_counter() - start
    reached = accuracy(host, task.sample(HELD_OUT_SEQUENCES, HELD_OUT_SEED))
    print(f"{options.task} {options.model}: accuracy {reached:.4f} on held-out sequences, {seconds:.0f} s")

    options.out.mkdir(parents=True, exist_ok=True)
    record = {
        "class": MODELS[options.model][2],
        "config": config,
        "task": asdict(task),
        "parameters": sum(parameter.numel() for parameter in host.parameters()),
        "recipe": asdict(recipe),
        "training_seeds": [TRAINING_SEEDS[0], TRAINING_SEEDS[recipe.steps - 1]],
        "held_out_seed": HELD_OUT_SEED,
        "held_out_sequences": HELD_OUT_SEQUENCES,
        "accuracy": reached,
        "last_loss": losses[-1],
        "seconds": round(seconds),
        "versions": {package: version(package) for package in ("torch", "transformers")},
    }
    save(options.out, options.task, options.model, host, record)


if __name__ == "__main__":
    main()
