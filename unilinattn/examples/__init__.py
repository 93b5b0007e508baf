"""Small trained models for tasks with known answers, with their weights and measured accuracies."""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from unilinattn.errors import OptionError, nearest
from unilinattn.examples.tasks import NO_ANSWER, TASKS, Task, TaskBatch

__all__ = ["MODELS", "TASKS", "Task", "TaskBatch", "accuracy", "build", "load", "names", "record"]

FOLDER = Path(__file__).parent
"""Folder of the weights and of `index.json`."""

AT_ONCE = 64
"""Sequences in one run of a model; hosts that keep a state per token are slower on a CPU with larger batches."""

MODELS: dict[str, tuple[str, str, str]] = {
    "mamba": ("transformers", "MambaConfig", "MambaForCausalLM"),
    "mamba2": ("transformers", "Mamba2Config", "Mamba2ForCausalLM"),
    "transformer": ("transformers", "LlamaConfig", "LlamaForCausalLM"),
    "s4d": ("unilinattn.models.s4", "S4DConfig", "S4DForCausalLM"),
}
"""Host of each model by name: the package, its configuration class and its model class."""


def build(model: str, config: dict[str, Any]) -> nn.Module:
    """Build an untrained host from keyword arguments of its configuration class.

    Raises `OptionError` if `model` is not one of `MODELS`.
    """
    if model not in MODELS:
        raise OptionError(f"Unknown example model {model!r}{nearest(model, MODELS)}")
    package, config_class, model_class = MODELS[model]
    host = importlib.import_module(package)
    return getattr(host, model_class)(getattr(host, config_class)(**config))


def index() -> dict[str, dict[str, dict[str, Any]]]:
    """Return all records by task and model."""
    return json.loads((FOLDER / "index.json").read_text())


def names() -> list[tuple[str, str]]:
    """Return the shipped (task, model) pairs."""
    return [(task, model) for task, models in index().items() for model in models]


def record(task: str, model: str) -> dict[str, Any]:
    """Return the training record of a shipped model: its class, configuration, recipe, seeds and accuracy.

    `accuracy` is the share of right answers on `held_out_sequences` sequences drawn from `held_out_seed`, by the
    host's own forward pass.

    Raises `OptionError` if the task or the model is not shipped.
    """
    records = index()
    if task not in records:
        raise OptionError(f"Unknown task {task!r}{nearest(task, records)}")
    if model not in records[task]:
        raise OptionError(f"No model {model!r} was trained on {task}{nearest(model, records[task])}")
    return records[task][model]


def load(task: str, model: str) -> nn.Module:
    """Load a trained model in evaluation mode.

    Raises `OptionError` if the task or the model is not shipped.
    """
    entry = record(task, model)
    host = build(model, entry["config"])
    host.load_state_dict(load_file(FOLDER / entry["weights"]), strict=True)
    return host.eval()


@torch.no_grad()
def accuracy(model: nn.Module, batch: TaskBatch) -> float:
    """Return the share of right predictions over all positions with an answer."""
    predicted = torch.cat([model(ids).logits.argmax(dim=-1) for ids in batch.input_ids.split(AT_ONCE)])
    asked = batch.labels != NO_ANSWER
    return (predicted == batch.labels)[asked].double().mean().item()
