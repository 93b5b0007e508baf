"""The shipped weights: loading, recorded accuracy, and metadata."""

from dataclasses import asdict
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from unilinattn.errors import OptionError
from unilinattn.examples import FOLDER, MODELS, TASKS, accuracy, load, names, record
from unilinattn.examples.tasks import HELD_OUT_SEED, SELECTION_SEED, TRAINING_SEEDS, TaskBatch
from unilinattn.examples.train import PATIENT, RECIPES, configuration

PROMISED = {"copying": 0.99, "induction": 0.9}
"""Smallest accuracy on each task of every model except the fixed mixer."""

SHIPPED = list(product(TASKS, MODELS))


def held_out(task: str, model: str) -> TaskBatch:
    entry = record(task, model)
    return TASKS[task].sample(entry["held_out_sequences"], entry["held_out_seed"])


def test_every_model_is_shipped_for_every_task() -> None:
    assert names() == SHIPPED


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model"), SHIPPED)
def test_the_host_reaches_the_recorded_accuracy(task: str, model: str) -> None:
    host = load(task, model)
    assert type(host).__name__ == record(task, model)["class"] == MODELS[model][2]
    assert not any(module.training for module in host.modules())
    # On the same sequences only ties can differ, by the rounding of another machine.
    assert accuracy(host, held_out(task, model)) == pytest.approx(record(task, model)["accuracy"], abs=5e-4)


@pytest.mark.parametrize(("task", "model"), [pair for pair in SHIPPED if pair[1] != "s4d"])
def test_the_required_accuracy_is_reached(task: str, model: str) -> None:
    assert record(task, model)["accuracy"] >= PROMISED[task]


def test_a_fixed_mixer_copies_over_a_fixed_distance_but_does_not_solve_induction() -> None:
    assert record("copying", "s4d")["accuracy"] >= PROMISED["copying"]
    assert record("induction", "s4d")["accuracy"] < PROMISED["induction"]


@pytest.mark.parametrize(("task", "model"), [("copying", "transformer"), ("induction", "mamba2")])
def test_shuffled_weights_do_not_reach_the_accuracy(task: str, model: str) -> None:
    host = load(task, model)
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.copy_(parameter.flatten()[torch.randperm(parameter.numel())].view_as(parameter))
    assert accuracy(host, TASKS[task].sample(64, HELD_OUT_SEED)) < 0.3


@pytest.mark.parametrize(("task", "model"), SHIPPED)
def test_weights_are_small_complete_and_float32(task: str, model: str) -> None:
    entry = record(task, model)
    path = FOLDER / entry["weights"]
    assert path.stat().st_size < 1_000_000
    tensors = load_file(path)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert sum(tensor.numel() for tensor in tensors.values()) == entry["parameters"]


@pytest.mark.parametrize(("task", "model"), SHIPPED)
def test_the_record_has_the_task_and_disjoint_seeds(task: str, model: str) -> None:
    entry = record(task, model)
    assert entry["task"] == asdict(TASKS[task])
    first, last = entry["training_seeds"]
    assert last - first + 1 == entry["recipe"]["steps"]
    assert first in TRAINING_SEEDS
    assert last in TRAINING_SEEDS
    assert entry["held_out_seed"] == HELD_OUT_SEED
    assert not {HELD_OUT_SEED, SELECTION_SEED} & set(range(first, last + 1))


@pytest.mark.parametrize(("task", "model"), SHIPPED)
def test_the_record_has_the_current_recipe_of_the_script(task: str, model: str) -> None:
    recipe = PATIENT.get((task, model), RECIPES[task])
    assert record(task, model)["recipe"] == asdict(recipe)
    assert record(task, model)["config"] == configuration(TASKS[task], model)
    assert recipe.steps >= RECIPES[task].steps


@pytest.mark.parametrize(
    ("task", "model", "message"),
    [
        ("copy", "mamba", "did you mean 'copying'"),
        ("copying", "mamba3", "did you mean 'mamba"),
        ("induction", "rnn", "Accepted: mamba, mamba2, s4d, transformer"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(task: str, model: str, message: str) -> None:
    for ask in (load, record):
        with pytest.raises(OptionError, match=message):
            ask(task, model)


class Constant(nn.Module):
    """Answers every query with the same token."""

    def __init__(self, token: int, vocabulary: int) -> None:
        super().__init__()
        self.row = nn.functional.one_hot(torch.tensor(token), vocabulary).float()

    def forward(self, input_ids: torch.Tensor) -> "Constant":
        self.logits = self.row.expand(*input_ids.shape, -1)
        return self


def test_accuracy_counts_only_positions_with_an_answer() -> None:
    ids = torch.tensor([[0, 1, 0, 1]])
    relevant = torch.zeros(1, 4, 4, dtype=torch.bool)
    batch = TaskBatch(input_ids=ids, labels=torch.tensor([[-100, 2, 2, 1]]), relevant=relevant)
    assert accuracy(Constant(2, 3), batch) == pytest.approx(2 / 3)
    assert accuracy(Constant(0, 3), batch) == 0
