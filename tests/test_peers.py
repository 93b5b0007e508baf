"""The benchmark beside TransformerLens, whose bridge is a stand-in here."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import unilinattn as ula
from benchmarks import peer_worker, peers
from tools.markers import read_section

ROOT = Path(__file__).parents[1]
IDS = torch.randint(64, (1, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(peers, "WIDTH", 16)
    monkeypatch.setattr(peers, "STATE", 4)
    peers.save_checkpoint(tmp_path)
    return tmp_path


class Bridge:
    """Stand-in for TransformerLens's bridge and for its cache: all heads' maps, from the operators."""

    def __init__(self, checkpoint: str) -> None:
        self.model = transformers.MambaForCausalLM.from_pretrained(checkpoint).eval()
        self.blocks = [SimpleNamespace(mixer=SimpleNamespace(eager_scan=False)) for _ in range(peers.LAYERS)]

    @classmethod
    def boot_transformers(cls, checkpoint: str, *, device: str) -> "Bridge":
        return cls(checkpoint)

    def run_with_cache(self, ids: torch.Tensor, **_: object) -> tuple[None, "Bridge"]:
        assert all(block.mixer.eager_scan for block in self.blocks)
        self.trace = ula.trace(self.model, ids, progress=False)
        return None, self

    def compute_ssm_effective_attention(self, *, layer: int, include_dt_scaling: bool) -> torch.Tensor:
        assert include_dt_scaling
        return self.trace.layers[layer].operator.matrix(heads=None)


@torch.no_grad()
def test_both_tools_compute_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = ModuleType("transformer_lens.model_bridge")
    lens.TransformerBridge = Bridge
    monkeypatch.setitem(sys.modules, "transformer_lens", ModuleType("transformer_lens"))
    monkeypatch.setitem(sys.modules, "transformer_lens.model_bridge", lens)
    results = {}
    for name, kind in peer_worker.TOOLS.items():
        stages, results[name] = peer_worker.measured(kind(str(checkpoint)), IDS, 2)
        assert all(len(stage["seconds"]) == len(stage["bytes"]) == 2 for stage in stages.values())
    ours, theirs = results["unilinattn"], results["transformer_lens"]
    assert ours["map"].shape == (1, 20, 20) and ours["rollout"].shape == (1, 20)
    for stage in ("map", "rollout"):
        torch.testing.assert_close(ours[stage], theirs[stage])


def test_the_process_of_this_library(checkpoint: Path) -> None:
    figures = peers.worker(sys.executable, "unilinattn", checkpoint, 20, 1, 1)
    assert figures["stages"].keys() == peers.STAGES.keys() and figures["results"].keys() == {"map", "rollout"}
    assert figures["versions"]["unilinattn"] == ula.__version__
    with pytest.raises(ChildProcessError, match="transformer_lens at 20 tokens ended with 1"):
        peers.worker(sys.executable, "transformer_lens", checkpoint, 20, 1, 1)


def answer(factor: float) -> dict[str, Any]:
    stages = {name: {"seconds": [factor, factor], "bytes": [int(factor) << 20, None]} for name in peers.STAGES}
    return {"stages": stages, "results": {"map": torch.ones(1, 2, 2) * factor, "rollout": torch.ones(1, 2)}}


def test_different_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"unilinattn": answer(1.0), "transformer_lens": answer(1.0 + 1e-6)}
    monkeypatch.setattr(peers, "worker", lambda python, tool, *_: answers[tool])
    row = peers.measured("python", 8, Path(), 1, 1, 1e9)
    assert row["differences"] == {"map": pytest.approx(1e-6, rel=0.1), "rollout": 0.0}
    answers["transformer_lens"] = answer(1.01)
    with pytest.raises(ArithmeticError, match=r"map at 8 tokens: the tools differ by 1\.0e-02"):
        peers.measured("python", 8, Path(), 1, 1, 1e9)


def test_too_large_lengths_run_here_only(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(peers, "worker", lambda python, tool, *_: started.append(tool) or answer(1.0))
    row = peers.measured("python", 512, Path(), 1, 1, peers.peer_bytes(512) - 1)
    assert started == ["unilinattn"] and row["peer_bytes"] == 24 << 30
    machine = {"cpu": "a cpu", "threads": 2, "memory": "1 GiB", "torch": "2", "transformers": "5", "unilinattn": "0"}
    text = peers.section({"machine": machine, "rows": [row]})
    assert "| 512 | mean map | 1 s, 1.0 MiB | not run: 24.00 GiB |  |  |" in text
    assert text.endswith("a cpu; 2 threads, 1 GiB of memory; torch 2, transformers 5, unilinattn 0.")


def test_the_environment_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--python", str(tmp_path / "python")])
    assert "there is no such interpreter. Make an environment" in " ".join(capsys.readouterr().err.split())
    without = [sys.executable, "-c", "import importlib.metadata; importlib.metadata.version('transformer_lens')"]
    if subprocess.run(without, capture_output=True, check=False).returncode == 0:
        pytest.skip("this environment has TransformerLens")
    with pytest.raises(ModuleNotFoundError, match=r"no transformer_lens; 4\.3\.0 is measured\. Make an environment"):
        peers.require_peer(sys.executable)


def test_the_page_shows_the_recorded_figures() -> None:
    record = json.loads(peers.RECORD.read_text())
    assert peers.stored(record) == peers.RECORD.read_text()
    assert read_section((ROOT / "docs" / "performance.md").read_text(), "peers") == peers.section(record)
