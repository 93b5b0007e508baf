"""Training by seed, and the files of weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evidence.training import Recipe, fingerprint, loaded, record, trained
from unilinattn.errors import CheckpointError

RECIPE = Recipe(steps=80, learning_rate=0.1, batch=8)


def build() -> nn.Module:
    return nn.Linear(4, 1)


def loss(host: nn.Module, seed: int) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return (host(x)[:, 0] - x.sum(1)).square().mean()


def accuracy(host: nn.Module) -> float:
    return float(host.weight.detach().sum())


def test_a_training_depends_on_its_seed_alone(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in ("first", "again", "other")]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        torch.rand(3)
        trained(build, RECIPE, seed, loss, accuracy, path)
    first, again, other = (loaded(build, path).weight for path in paths)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float((first - 1).abs().max()) < 0.2


def test_the_progress_of_a_training_is_that_of_its_batches(tmp_path: Path) -> None:
    seen = []

    def watched(host: nn.Module, seed: int) -> Tensor:
        seen.append(RECIPE.progress(seed))
        return loss(host, seed)

    trained(build, RECIPE, 3, watched, accuracy, tmp_path / "a.safetensors")
    assert seen == [step / 80 for step in range(80)]


def test_the_recorded_accuracy_is_that_of_the_stored_weights(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    trained(build, RECIPE, 0, loss, accuracy, path)
    host = loaded(build, path)
    assert record(path)["accuracy"] == accuracy(host)
    assert torch.equal(host.weight, host.weight.half().float())
    assert record(path)["recipe"]["steps"] == 80


def test_a_fingerprint_depends_on_every_weight_and_name() -> None:
    models = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}

    def found() -> str:
        return fingerprint({name: lambda name=name: models[name] for name in models})

    first = found()
    assert found() == first
    with torch.no_grad():
        models["b"].bias[1] += 1e-6
    assert found() != first
    assert fingerprint({"a": lambda: models["a"]}) != fingerprint({"b": lambda: models["a"]})


def test_weights_that_are_absent_damaged_or_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "study-model-0.safetensors"
    with pytest.raises(CheckpointError, match=r"is absent; train its study with `make evidence ARGS=\"study --train"):
        loaded(build, path)
    path.write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="is no file of trained weights"):
        record(path)
    trained(build, RECIPE, 0, loss, accuracy, path)
    with pytest.raises(CheckpointError, match="does not fit Linear"):
        loaded(lambda: nn.Linear(3, 1), path)


def test_an_interrupted_training_leaves_no_weights_and_restores_the_threads(tmp_path: Path) -> None:
    def stop(host: nn.Module, seed: int) -> Tensor:
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        trained(build, RECIPE, 0, stop, accuracy, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())
    assert torch.get_num_threads() == threads
