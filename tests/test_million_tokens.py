"""The benchmark of very long inputs runs, and what it prints is right, at a length that takes seconds."""

import importlib.util
import json
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
    found = json.loads(written.read_text())
    stages = {stage["stage"].strip(): stage for stage in found["stages"]}
    assert found["length"] == 8200
    assert {"trace", "rollout of the last token", "identity"} <= stages.keys()
    assert stages["rollout of the last token"]["finite"]
    assert stages["identity"]["relative_difference"] <= 1e-5
    for k in range(2):
        assert stages[f"backbone.layers.{k}.mixer checked"]["prefix_error"] <= 1e-5
    assert capsys.readouterr().out.count("peak RSS") == len(found["stages"])
