"""The training script: decreasing loss, reproducibility, and its files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unilinattn.errors import OptionError
from unilinattn.examples import MODELS, TASKS, accuracy, build
from unilinattn.examples import train as script
from unilinattn.examples.tasks import Copying
from unilinattn.examples.train import RECIPES, Recipe, configuration, main, train

TINY = Copying(source_length=3, source_vocabulary=4)
SHORT = Recipe(steps=40, learning_rate=1e-2, batch=64, warmup=5)


def shrunk(model: str) -> dict[str, object]:
    narrow = {
        "mamba": {"hidden_size": 16, "state_size": 4},
        "mamba2": {"hidden_size": 16, "state_size": 4, "num_heads": 2, "head_dim": 16, "chunk_size": 8},
        "transformer": {"hidden_size": 16, "intermediate_size": 16},
        "s4d": {"d_model": 16, "d_state": 8},
    }
    return {**configuration(TINY, model), **narrow[model]}


def drop(losses: list[float]) -> float:
    return sum(losses[:5]) / 5 - sum(losses[-5:]) / 5


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_the_loss_falls(model: str) -> None:
    host, losses = train(TINY, model, SHORT, shrunk(model))
    assert len(losses) == SHORT.steps
    assert drop(losses) > 0.1
    assert not host.training
    assert "forward" not in vars(next(m for name, m in host.named_modules() if name.endswith("layers.0")))


def test_without_a_learning_rate_the_loss_does_not_fall() -> None:
    _, losses = train(TINY, "s4d", replace(SHORT, learning_rate=0.0), shrunk("s4d"))
    assert abs(drop(losses)) < 0.1


def test_a_training_is_reproducible() -> None:
    short = replace(SHORT, steps=4)
    first, losses = train(TINY, "mamba", short, shrunk("mamba"))
    torch.rand(3)
    again, repeated = train(TINY, "mamba", short, shrunk("mamba"))
    assert losses == repeated
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    factors = [SHORT.schedule(step) for step in range(SHORT.steps + 1)]
    peak = factors.index(max(factors))
    assert peak < SHORT.warmup
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] == pytest.approx(0, abs=1e-6)


def test_the_script_writes_loadable_weights_and_adds_to_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECIPES, "copying", replace(SHORT, steps=3))
    monkeypatch.setattr(script, "HELD_OUT_SEQUENCES", 4)
    for model in ("s4d", "transformer"):
        main(["--task", "copying", "--model", model, "--out", str(tmp_path / "new")])
        assert f"copying {model}: accuracy 0." in capsys.readouterr().out
    index = json.loads((tmp_path / "new" / "index.json").read_text())
    assert [(task, model) for task in index for model in index[task]] == [
        ("copying", "transformer"),
        ("copying", "s4d"),
    ]
    for model, entry in index["copying"].items():
        host = build(model, entry["config"])
        host.load_state_dict(load_file(tmp_path / "new" / entry["weights"]), strict=True)
        assert entry["recipe"]["steps"] == 3
        batch = TASKS["copying"].sample(entry["held_out_sequences"], entry["held_out_seed"])
        assert accuracy(host.eval(), batch) == entry["accuracy"]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--task", "copying", "--model", "rnn"])
    assert "mamba2" in capsys.readouterr().err
    for make in (lambda: configuration(TINY, "s4"), lambda: build("s4", {})):
        with pytest.raises(OptionError, match="did you mean 's4d'"):
            make()
