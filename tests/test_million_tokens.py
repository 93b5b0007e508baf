"""The benchmark of very long inputs, at a length that takes seconds."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "million_tokens.py"


@pytest.mark.parametrize("model", ["mamba", "mamba2"])
def test_every_stage_is_logged(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("million_tokens", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = tmp_path / "figures.json"
    options = ["--model", model, "--length", "8200", "--width", "16", "--json", str(written)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    script.main()
    record = json.loads(written.read_text())
    stages = {stage["stage"].strip(): stage for stage in record["stages"]}
    assert record["length"] == 8200
    assert {"trace", "rollout of the last token", "identity"} <= stages.keys()
    assert stages["rollout of the last token"]["finite"]
    assert stages["identity"]["relative_difference"] <= 1e-5
    for k in range(2):
        assert stages[f"backbone.layers.{k}.mixer checked"]["prefix_error"] <= 1e-5
    assert capsys.readouterr().out.count("peak RSS") == len(record["stages"])


@pytest.mark.parametrize("model", ["mamba", "mamba2"])
def test_memory_is_linear_with_a_small_constant(model: str, tmp_path: Path) -> None:
    length, width, layers = 65536, 64, 2
    written = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--model", model, "--length", str(length), "--json", str(written)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}, check=False)
    assert done.returncode == 0
    stages = json.loads(written.read_text())["stages"]
    used = max(stage["peak_gib"] for stage in stages) - stages[0]["peak_gib"]
    # 16 bytes per channel of the model in each layer, 40 per inner channel in the running layer; the host's scan
    # would take three tensors of 4 * 16 bytes per inner channel.
    expected = length * (16 * width * layers + 40 * 2 * width) / 2**30
    assert used <= 1.25 * expected + 0.1
