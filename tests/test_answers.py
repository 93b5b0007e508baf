"""The benchmark beside LXT, captum and inseq: this package's tools and captum, which these environments have."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import answer_worker, answers
from benchmarks.answer_worker import TOOLS
from unilinattn.testing import relative_error

OWN = [tool for tool in TOOLS if tool.startswith("unilinattn")]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    original = transformers.LlamaConfig
    sizes = dict(hidden_size=24, num_attention_heads=3, num_key_value_heads=1, num_hidden_layers=2)
    monkeypatch.setattr(transformers, "LlamaConfig", lambda **options: original(**{**options, **sizes}))
    monkeypatch.setattr(answer_worker, "VOCABULARY", 64)
    monkeypatch.setattr(answer_worker, "GENERATED", 3)


@pytest.mark.usefixtures("small")
def test_tools_compute_the_same_and_are_timed_beside_the_host(tmp_path: Path) -> None:
    scores = {}
    for tool in [*OWN, "captum InputXGradient"]:
        figures = answer_worker.work(tool, 12, 3, str(tmp_path))
        assert figures["seconds"].keys() == {"forward", "answer"} and figures["versions"]["captum"]
        scores[tool] = torch.load(tmp_path / "scores.pt")
        assert scores[tool].shape == (1, 12)
    products = scores["captum InputXGradient"]
    assert relative_error(scores["unilinattn `input_x_gradient`"], products) < 1e-5
    assert all(relative_error(scores[tool], products) > 1e-2 for tool in OWN[:2])
    assert len(answer_worker.work(OWN[2], 0, 3, str(tmp_path))["seconds"]["answer"]) == 3


def test_pairs_are_compared_and_make_a_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(python: str, tool: str, length: int, *_: Any) -> dict[str, Any]:
        seconds = {"forward": [1.0, 1.0], "answer": [2.0, 4.0] if tool in OWN else [6.0, 6.0]}
        scores = torch.ones(1, 4) * (1 if tool in OWN else factor)
        return {"seconds": seconds, "versions": {"lxt": "2"}, **({"scores": scores} if length else {})}

    monkeypatch.setattr(answers, "worker", worker)
    factor = 1.0
    rows = answers.measured("python", 4, 2, "")
    assert [row["tools"] for row in rows] == list(zip(OWN, [tool for tool in TOOLS if tool not in OWN], strict=True))
    machine = {"cpu": "a cpu", "memory": "1 GiB", "torch": "2"}
    text = answers.section({"machine": machine, "rows": [*rows, *answers.measured("python", 0, 2, "")]})
    assert "| 4 | `logit` | 3.0 | LXT CP-LRP | 6.0 | 0.50 | 0e+00 |" in text
    assert "| generated | `input_x_gradient` | 3.0 | inseq | 6.0 | 0.50 |  |" in text
    factor = 1.1
    with pytest.raises(ArithmeticError, match="unilinattn `attn_lrp` and LXT AttnLRP at 4 tokens differ by"):
        answers.measured("python", 4, 2, "")


def test_an_absent_interpreter_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        answers.main(["--python", str(tmp_path / "python"), "--lengths", "8", "--rounds", "1"])
    printed = capsys.readouterr().err
    assert str(tmp_path / "python") in printed and "See --help for the environment" in printed
