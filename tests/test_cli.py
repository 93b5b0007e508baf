import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from unilinattn import cli
from unilinattn.analysis import compare
from unilinattn.cli import explain as explain_command
from unilinattn.cli.arguments import METHODS
from unilinattn.evaluation.checkpoints import load_checkpoint
from unilinattn.evaluation.trained import Counts
from unilinattn.examples import names
from unilinattn.results.attribution import Attribution
from unilinattn.results.summary import fact_lines

WORDS = ["[UNK]", "<s>", "the", "cat", "sat", "on", "a", "mat"]
TEXT = "the cat sat on a mat"


def save_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="<s>").save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mamba in float32 and a Llama in bfloat16, each with a tokenizer, and a Mamba without."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    small = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2}
    mamba = MambaForCausalLM(MambaConfig(**small, state_size=4))
    llama = LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=2, intermediate_size=32)).to(torch.bfloat16)
    for name, model in {"mamba": mamba, "llama": llama, "silent": mamba}.items():
        model.save_pretrained(folder / name)
        if name != "silent":
            save_tokenizer(folder / name)
    return folder


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail: exit code 2, nothing on stdout, one message on stderr, which is returned."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("unilinattn ") and err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.long
def test_compare_writes_a_report_and_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    arguments = ["--task", "induction", "--models", "transformer,s4d", "--methods", "raw", "rollout", "--out", str(out)]
    assert cli.main(["compare", *arguments]) == 0
    printed = capsys.readouterr()
    assert "softmax attention" in printed.out and "S4D (fixed mixer)" in printed.out and str(out) in printed.out
    assert printed.err == ""
    assert (logging.get_verbosity(), torch.get_num_threads()) == (verbosity, threads)
    report = json.loads((out / "compare.json").read_text())
    (stored,) = report["comparisons"]
    assert (stored["task"], list(stored["models"])) == ("induction", ["transformer", "s4d"])
    rows = ["random", "recency", "primacy", "raw", "rollout", "intervention"]
    assert list(dict.fromkeys(row["method"] for row in stored["table"] if row["model"] == "s4d")) == rows
    assert all(f"  {row} " in printed.out for row in rows)
    assert stored["models"]["transformer"]["accuracy"] >= 0.9
    assert report["seeds"]["selection"] != report["seeds"]["held_out"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report"]


@pytest.mark.slow
def test_compare_needs_no_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "Counts", lambda: Counts(accuracy=64, selection=1, scored=1))
    assert cli.main(["compare"]) == 0
    report = json.loads(Path("unilinattn-report/compare.json").read_text())
    rows = ["random", "recency", "primacy", *METHODS, "alti (composed)", "intervention"]
    models = {(stored["task"], name): one for stored in report["comparisons"] for name, one in stored["models"].items()}
    assert list(models) == names()
    for stored in report["comparisons"]:
        for name in stored["models"]:
            assert list(dict.fromkeys(row["method"] for row in stored["table"] if row["model"] == name)) == rows
    for (task, name), one in models.items():
        assert one["worst_error"] <= 1e-5
        if name != "s4d":
            assert one["accuracy"] >= {"copying": 0.99, "induction": 0.9}[task]
    # HMA ACL Theorem 1: a fixed mixer cannot retrieve an answer whose position depends on the tokens.
    assert models["induction", "s4d"]["accuracy"] < 0.9


def test_compare_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "did you mean 'copying'" in fails(capsys, "compare", "--task", "copyng")
    assert "did you mean 'mamba2'" in fails(capsys, "compare", "--models", "mamba22")
    assert "did you mean 'rollout'" in fails(capsys, "compare", "--methods", "raw", "rolout")
    assert "notes.txt" in fails(capsys, "compare", "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("model", "method", "mixer"),
    [("mamba", "latim", "Mamba-1 (S6)"), ("llama", "rollout", "softmax attention")],
)
def test_explain_prints_tokens_and_layers(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], model: str, method: str, mixer: str
) -> None:
    assert cli.main(["explain", str(checkpoints / model), "--text", TEXT, "--method", method]) == 0
    out, err = capsys.readouterr()
    assert out.count(mixer) == 2 and "position 5 ' mat'" in out
    target, *others = out.splitlines()[-6:]
    for place, (line, word) in enumerate(zip(others, re.findall(r" ?\S+", TEXT)[:-1], strict=True)):
        assert line.split()[0] == str(place) and (repr(word) if place else word) in line
    assert max(line.count("#") for line in others) == explain_command.BAR
    words = "the token itself and the residual stream" if method == "rollout" else "the token itself"
    assert target.split()[0] == "5" and "' mat'" in target and target.endswith(f"{words}, no bar") and "#" not in target
    assert err == ""


@pytest.mark.long
def test_explain_refuses_an_inexact_layer_without_trust_warn(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = explain_command.load_checkpoint

    def hooked(*arguments: Any) -> Any:
        host, tokenizer = load(*arguments)
        host.backbone.layers[1].mixer.in_proj.register_forward_hook(lambda module, args, out: out + out**2)
        return host, tokenizer

    monkeypatch.setattr(explain_command, "load_checkpoint", hooked)
    arguments = ["explain", str(checkpoints / "mamba"), "--text", TEXT, "--method", "raw"]
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and "layers.1.mixer misses the host's output" in err and "a forward hook on in_proj" in err
    assert cli.main([*arguments, "--trust", "warn"]) == 0
    out, err = capsys.readouterr()
    assert "WARNING: the operator of backbone.layers.1.mixer misses the host's output" in out and err == ""


def test_the_parts_of_the_default_add_up(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.safetensors"
    assert cli.main(["explain", str(checkpoints / "mamba"), "--text", TEXT, "--out", str(out)]) == 0
    result = Attribution.load(out)
    assert result.method == "lrp" and result.dims == ("batch", "key")
    printed = capsys.readouterr().out
    assert "lrp: scores for position 5 ' mat', all layers" in printed
    facts = [f"  {line}" for line in fact_lines(result)]
    assert "\n".join(facts) in printed and any(line.startswith("  bias ") for line in facts)
    parts = re.search(r"tokens (\S+) \+ biases (\S+) \+ remainder (\S+) = (\S+), the model's own log-odds", printed)
    tokens, bias, rest, value = (float(x) for x in parts.groups())
    assert tokens + bias + rest == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert value == pytest.approx(float(result.extras["logit"][0]), rel=1e-3)
    assert "the token itself and the residual stream" in printed


def test_bars_are_shares_of_the_largest_other_token() -> None:
    own, *others = explain_command.bar_chart(
        ["a", "b", "c"], torch.tensor([0.1, -0.2, 9.0]), 2, "the token itself"
    ).splitlines()
    assert own.split()[:3] == ["2", "c", "9"]
    assert [line.split()[-1] for line in others] == ["#" * (explain_command.BAR // 2), "-" * explain_command.BAR]
    assert explain_command.bar_chart(["a"], torch.tensor([1.0]), 0, "the token itself").count("\n") == 0


def test_the_printed_scores_are_those_of_the_saved_result(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.safetensors"
    arguments = ["explain", str(checkpoints / "mamba"), "--text", TEXT, "--method", "latim", "--target", "3"]
    assert cli.main([*arguments, "--option", "p=1", "--layer", "1", "--out", str(out)]) == 0
    result = Attribution.load(out)
    assert result.options["p"] == 1 and result.options["target"] == 3
    assert result.tokens == (tuple(re.findall(r" ?\S+", TEXT)),)
    printed = [
        float(line.split()[-2]) for line in capsys.readouterr().out.splitlines() if re.match(r" +2 +' sat'", line)
    ]
    assert printed == pytest.approx([float(result.scores[1, 0, 2])], rel=1e-3)
    assert result.scores[:, 0, 4:].abs().max() == 0


def test_explain_prints_the_mean_over_heads(checkpoints: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "result.safetensors"
    arguments = ["explain", str(checkpoints / "mamba"), "--text", TEXT, "--method", "latim", "--target", "3"]
    assert cli.main([*arguments, "--option", "by_head=true", "heads=[0,2]", "--layer", "1", "--out", str(out)]) == 0
    result = Attribution.load(out)
    assert result.dims == ("layer", "batch", "head", "key") and result.heads == (0, 2)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("backbone.layers.1.mixer, mean over 2 channels") for line in lines)
    printed = [float(line.split()[-2]) for line in lines if re.match(r" +2 +' sat'", line)]
    assert printed == pytest.approx([float(result.scores[1, 0, :, 2].mean())], rel=1e-3)


@pytest.mark.parametrize(("ending", "start"), [("html", b"<!doctype html>"), ("png", b"\x89PNG")])
def test_explain_saves_pictures(checkpoints: Path, tmp_path: Path, ending: str, start: bytes) -> None:
    out = tmp_path / f"result.{ending}"
    assert cli.main(["explain", str(checkpoints / "llama"), "--text", TEXT, "--out", str(out)]) == 0
    assert out.read_bytes().startswith(start)


def test_explain_prints_and_saves_the_check(checkpoints: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "result.safetensors"
    arguments = ["explain", str(checkpoints / "mamba"), "--text", TEXT, "--check", "--out", str(out)]
    assert cli.main(arguments) == 0
    (check,) = Attribution.load(out).checks or ()
    assert f"\n  {check.sentence}\n" in capsys.readouterr().out
    assert cli.main(arguments[:4]) == 0
    assert "replacing the top" not in capsys.readouterr().out
    assert "leave --generate or --check out" in fails(capsys, *arguments[:5], "--generate", "2")


def test_explain_explains_generated_tokens(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.safetensors"
    command = ["explain", str(checkpoints / "mamba"), "--text", TEXT, "--generate", "3", "--out", str(out)]
    assert cli.main(command) == 0
    result = Attribution.load(out)
    assert result.dims == ("batch", "query", "key") and result.tokens is not None
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("     ")]
    assert len(rows) == result.scores.shape[1] <= 3
    length = len(result.tokens[0]) - len(rows)
    for place, (line, row) in enumerate(zip(rows, result.scores[0], strict=True), length):
        assert line.split()[0] == str(place) and repr(result.tokens[0][place]) in line
        largest = int(row.abs().argmax())
        assert f"{result.tokens[0][largest]!r} {float(row[largest]):.3g}" in line
    for option in ("target", "logit"):
        error = fails(capsys, *command[:-2], f"--{option}", "1")
        assert f"leave --{option} out" in error


@pytest.mark.long
def test_the_logit_is_a_token_an_id_or_two(checkpoints: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.safetensors"
    arguments = ["explain", str(checkpoints / "llama"), "--text", TEXT, "--method", "attribution", "--out", str(out)]
    for words, stored in ((["mat"], 7), (["7"], 7), (["mat", "cat"], [7, 3])):
        assert cli.main([*arguments, "--scope", "mixer", "--logit", *words]) == 0
        result = Attribution.load(out)
        assert result.options["logit"] == stored and result.scope == "mixer"


def test_the_default_dtype_is_that_of_the_checkpoint(checkpoints: Path) -> None:
    host, _ = load_checkpoint(checkpoints / "llama")
    assert host.dtype is torch.bfloat16
    assert load_checkpoint(checkpoints / "llama", "float64")[0].dtype is torch.float64


def test_explain_refuses_paths_without_a_complete_checkpoint(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> str:
        return fails(capsys, "explain", path, "--text", TEXT)

    assert "is not a folder" in refused(tmp_path / "nowhere")
    assert "holds no config.json" in refused(tmp_path)
    assert "no tokenizer" in refused(checkpoints / "silent")
    config = (checkpoints / "llama" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert "cannot be loaded" in refused(tmp_path)
    weights = (checkpoints / "llama" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:500])
    assert "cannot be loaded" in refused(tmp_path)


def test_explain_refuses_a_checkpoint_with_missing_weights(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((checkpoints / "llama" / "config.json").read_text())
    config["num_hidden_layers"] = 3
    if "layer_types" in config:
        config["layer_types"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((checkpoints / "llama" / "model.safetensors").read_bytes())
    save_tokenizer(tmp_path)
    assert "lacks 9 weights of LlamaForCausalLM" in fails(capsys, "explain", tmp_path, "--text", TEXT)


@pytest.mark.long
def test_explain_refuses_bad_options(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: object) -> str:
        return fails(capsys, "explain", checkpoints / "mamba", "--text", TEXT, *arguments)

    assert "did you mean 'rollout'" in refused("--method", "rolout")
    assert "did you mean 'unified'" in refused("--method", "rollout", "--scope", "unifid")
    assert "did you mean 'discard'" in refused("--method", "rollout", "--option", "discrad=0.1")
    assert "lrp takes no option 'scope'" in refused("--scope", "core")
    assert "is not NAME=VALUE" in refused("--option", "discard")
    assert "no option 'logit'" in refused("--method", "alti", "--logit", "mat")
    assert "did you mean 'mat'? Give" in refused("--method", "attribution", "--logit", "matt")
    assert "one token, or two" in refused("--method", "attribution", "--logit", "mat", "cat", "on")
    assert "target 6 is out of range" in refused("--target", "6")
    assert "target -7 is out of range" in refused("--target", "-7")
    assert "did you mean 'float32'" in refused("--dtype", "float3")
    assert "out of range" in refused("--method", "raw", "--layer", "2")
    assert "leave --layer out" in refused("--layer", "1")
    assert ".safetensors" in refused("--out", tmp_path / "result.txt")
    assert "no folder" in refused("--out", tmp_path / "nowhere" / "result.html")
    assert "at least one" in fails(capsys, "explain", checkpoints / "mamba", "--text", "")


def test_the_logit_is_a_text_of_one_token(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.safetensors"
    arguments = ["explain", str(checkpoints / "mamba"), "--text", TEXT, "--out", str(out)]
    assert cli.main([*arguments, "--logit", " mat"]) == 0
    assert Attribution.load(out).options["logit"] == 7
    capsys.readouterr()
    assert "'the cat' is not one token of this tokenizer: it has 2" in fails(capsys, *arguments, "--logit", "the cat")


def test_evaluate_continues_and_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["evaluate", "--task", "copying", "--models", "s4d", "--samples", "2", "--out", str(out)]
    chosen = ["--methods", "raw", "rollout:sign=abs", "--metrics", "ap", "hit_at_1", "--baselines", "recency"]
    assert cli.main([*arguments, *chosen]) == 0
    printed = capsys.readouterr().out
    rows = [line.split()[:2] for line in printed.splitlines() if line.startswith("s4d ")]
    assert rows == [["s4d", "recency"], ["s4d", "raw"], ["s4d", "rollout"]]
    assert "rollout (sign='abs')" in printed and "copying, 2 samples" in printed and "table.csv" in printed
    files = {path: path.read_bytes() for path in out.rglob("*.json")}
    assert cli.main([*arguments, *chosen]) == 0
    assert capsys.readouterr().out == printed
    assert {path: path.read_bytes() for path in out.rglob("*.json")} == files
    assert "seed is 0 there, 1 now" in fails(capsys, *arguments, *chosen, "--seed", "1")


@pytest.mark.long
def test_evaluate_reads_texts_for_checkpoints(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "the cat sat", "relevant": [1]}\n{"text": "a mat on the cat", "relevant": [0, 1]}\n')
    arguments = ["evaluate", "--models", str(checkpoints / "mamba"), str(checkpoints / "llama"), "--data", str(data)]
    assert cli.main([*arguments, "--methods", "logit", "--metrics", "ap", "--baselines"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[:3] for line in printed.splitlines() if " logit " in line] == [
        ["mamba", "logit", "all"],
        ["llama", "logit", "all"],
    ]
    assert "give `selection`" in fails(capsys, *arguments, "--methods", "raw", "--metrics", "ap")
    data.write_text('{"text": "the cat", "relevant": [2]}\n')
    assert "texts.jsonl, line 1: the gold link (0, 2) lies outside" in fails(capsys, *arguments)


def test_evaluate_refuses_bad_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "did you mean 'copying'" in fails(capsys, "evaluate", "--task", "copyng")
    assert "did you mean 'mamba2'" in fails(capsys, "evaluate", "--models", "mamba22")
    assert "did you mean 'rollout'" in fails(capsys, "evaluate", "--methods", "rolout")
    assert "did you mean 'auc'" in fails(capsys, "evaluate", "--metrics", "aucc")
    assert "raw:scope 'scope' is not NAME=VALUE" in fails(capsys, "evaluate", "--methods", "raw:scope")
    assert "is for --data" in fails(capsys, "evaluate", "--selection", tmp_path)
    assert "--data needs --models" in fails(capsys, "evaluate", "--data", tmp_path)
    assert "are for the trained models" in fails(capsys, "evaluate", "--data", tmp_path, "--task", "copying")


@pytest.mark.slow
def test_compare_takes_methods_beyond_its_default(tmp_path: Path) -> None:
    out = tmp_path / "report"
    arguments = ["--task", "copying", "--models", "s4d", "--out", str(out), "--methods", "knockout", "logit"]
    assert cli.main(["compare", *arguments]) == 0
    table = json.loads((out / "compare.json").read_text())["comparisons"][0]["table"]
    scores = {row["method"]: row["value"] for row in table if row["metric"] == "auc"}
    assert list(scores) == ["random", "recency", "primacy", "knockout", "logit", "intervention"]
    assert 0.5 < scores["knockout"] <= 1


@pytest.mark.long
def test_decomposition_prints_the_errors_of_a_checkpoint(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["decomposition", str(checkpoints / "mamba"), "--text", TEXT, "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[3:] == ["exact", "silu", "relu", "identity", "taylor1", "taylor2"]
    assert [line.split()[1] for line in lines[1:3]] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert (tmp_path / "out" / "decomposition.json").is_file()
    assert "give PATH and --text, or neither" in fails(capsys, "decomposition", checkpoints / "mamba")
    assert "give PATH and --text, or neither" in fails(capsys, "decomposition", "--text", TEXT)


@pytest.mark.slow
def test_decomposition_measures_the_trained_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["decomposition"]) == 0
    printed = capsys.readouterr().out
    assert "induction/mamba2 " in printed and "copying/s4d " in printed
