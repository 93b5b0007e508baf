"""Training by seed, and the files of weights."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from unilinattn.errors import CheckpointError
from unilinattn.host.substitution import through_operators
from unilinattn.progress import progress

STEPS_OF_A_SEED = 1_000_000
"""Seeds of training batches of one model: those from its seed times this number."""

HELD_OUT_SEED = 1_000_000_000
"""Seed of the samples of the recorded accuracies, and the first seed of scored samples; no model is trained on them."""

SELECTION_SEED = 1_000_000_001
"""The first seed of samples on which layers are chosen; they are neither scored nor trained on."""


def scored_seed(seed: int) -> int:
    """Return the seed of the samples on which the models of a seed are scored."""
    return HELD_OUT_SEED + 2 * (1 + seed)


def selection_seed(seed: int) -> int:
    """Return the seed of the samples on which layers of the models of a seed are chosen."""
    return SELECTION_SEED + 2 * (1 + seed)


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a training: AdamW on fresh samples, with the learning rate of `OneCycleLR`.

    Attributes:
        steps: number of batches.
        learning_rate: the largest learning rate.
        batch: samples of a batch.
        weight_decay, gradient_norm: the weight decay, and the norm at which gradients are clipped.
        through_operators: train through the operators of the layers, for hosts that scan slowly on a CPU.
    """

    steps: int
    learning_rate: float
    batch: int = 32
    weight_decay: float = 0.05
    gradient_norm: float = 1.0
    through_operators: bool = False

    @property
    def samples(self) -> int:
        """Number of samples of the whole training."""
        return self.steps * self.batch

    def progress(self, seed: int) -> float:
        """Return the share of the training before the batch of a seed, from 0 to 1."""
        return seed % STEPS_OF_A_SEED / self.steps


def fit(host: nn.Module, recipe: Recipe, seed: int, loss: Callable[[nn.Module, int], Tensor], label: str) -> float:
    """Train a model in place and return its last loss.

    `loss(host, seed)` returns the loss of the model on the batch of a seed. The model ends in evaluation mode.
    """
    host.train()
    optimizer = torch.optim.AdamW(host.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=recipe.steps)
    value = torch.tensor(float("nan"))
    with through_operators(host) if recipe.through_operators else nullcontext():
        for step in progress(range(recipe.steps), label):
            value = loss(host, seed * STEPS_OF_A_SEED + step)
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(host.parameters(), recipe.gradient_norm)
            optimizer.step()
            schedule.step()
    host.eval()
    return float(value.detach())


def trained(
    build: Callable[[], nn.Module],
    recipe: Recipe,
    seed: int,
    loss: Callable[[nn.Module, int], Tensor],
    accuracy: Callable[[nn.Module], float],
    path: Path,
) -> None:
    """Train a model on one thread and store its weights in half precision, with a record of the training.

    The recorded accuracy is that of the stored weights.
    """
    threads, start = torch.get_num_threads(), time.process_time()
    # Tensors of this size gain nothing from a second thread, and the sums do not depend on their number.
    torch.set_num_threads(1)
    try:
        torch.manual_seed(seed)
        host = build()
        last = fit(host, recipe, seed, loss, path.stem)
        seconds = time.process_time() - start
        weights = {name: _as(tensor, torch.float16).contiguous() for name, tensor in host.state_dict().items()}
        host.load_state_dict({name: _as(tensor, torch.float32) for name, tensor in weights.items()})
        record = {
            "class": type(host).__name__,
            "parameters": sum(parameter.numel() for parameter in host.parameters()),
            "seed": seed,
            "recipe": asdict(recipe),
            "accuracy": accuracy(host),
            "last_loss": last,
            "cpu_seconds": round(seconds),
            "versions": {package: version(package) for package in ("torch", "transformers")},
        }
    finally:
        torch.set_num_threads(threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(weights, partial, metadata={"record": json.dumps(record)})
    partial.replace(path)


def record(path: Path) -> Mapping[str, Any]:
    """Return the record of a training.

    Raises `CheckpointError` if there is no such file or no record in it.
    """
    return _read(path)[0]


def loaded(build: Callable[[], nn.Module], path: Path) -> nn.Module:
    """Return a trained model in float32 and evaluation mode.

    Raises `CheckpointError` if the file is absent, damaged, or of another model.
    """
    weights = _read(path)[1]
    host = build()
    try:
        host.load_state_dict({name: _as(tensor, torch.float32) for name, tensor in weights.items()})
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit {type(host).__name__}: {error}. Train it again.") from error
    return host.eval()


def fingerprint(hosts: Mapping[str, Callable[[], nn.Module]]) -> str:
    """Return twelve hexadecimal digits of a hash of the weights of all models."""
    digest = hashlib.sha256()
    for name, load in sorted(hosts.items()):
        for key, weight in load().state_dict().items():
            digest.update(f"{name} {key} {tuple(weight.shape)}".encode())
            digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _read(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    if not path.is_file():
        study = path.name.partition("-")[0]
        raise CheckpointError(f'{path} is absent; train its study with `make evidence ARGS="{study} --train --write"`.')
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["record"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is no file of trained weights: {error}. Train it again.") from error
