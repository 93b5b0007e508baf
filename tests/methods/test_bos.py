"""A beginning-of-text token that a text lacks: when the warning of sinks says so, and how `bos` adds it."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

import unilinattn as ula
from tests.methods.sinks import SINK, llama
from unilinattn import cli
from unilinattn.errors import OptionError, SinkWarning
from unilinattn.host.text import encoded
from unilinattn.methods.doubts import missing_start

WORDS = ["[UNK]", "the", "cat", "sat", "on", "a", "<s>", "mat", "in", "hat", "dog", "ran", "to", "red", "big", "end"]
LACKS = "lacks the tokenizer's beginning-of-text token '<s>'"
assert WORDS[SINK] == "the"


def reader(**settings: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose word "the" is the sink of `llama`, and whose token "<s>" is not added to texts."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ["input_ids", "token_type_ids", "attention_mask"]
    settings = {"unk_token": "[UNK]", "bos_token": "<s>", "model_input_names": names, **settings}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def sink_messages(inputs: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ula.explain(llama(), inputs, **{"method": "raw", "layers": [0], **options})
    return [str(each.message) for each in caught if each.category is SinkWarning]


def test_a_first_word_that_sinks_is_told_to_have_no_token_before_it() -> None:
    (message,) = sink_messages("the cat sat", tokenizer=reader())
    assert LACKS in message and "bos=True (--bos on the command line)" in message


@pytest.mark.parametrize(
    "text", ["cat the sat", "<s> the cat", "cat sat on"], ids=["another word sinks", "token first", "no sink"]
)
def test_other_texts_are_not_told(text: str) -> None:
    assert not any(LACKS in message for message in sink_messages(text, tokenizer=reader()))


def test_ids_and_tokenizers_without_the_token_are_not_told() -> None:
    assert len(sink_messages("the cat sat", tokenizer=reader(bos_token=None))) == 1
    assert LACKS not in sink_messages("the cat sat", tokenizer=reader(bos_token=None))[0]
    (message,) = sink_messages(torch.tensor([[SINK, 2, 3]]), tokenizer=reader())
    assert LACKS not in message


def test_one_of_several_texts_is_enough() -> None:
    (message,) = sink_messages(["cat", "the cat sat"], tokenizer=reader(padding_side="left"))
    assert message.count(LACKS) == 1
    (message,) = sink_messages(["cat the", "cat the sat"], tokenizer=reader(padding_side="left"))
    assert LACKS not in message


def test_an_encoder_needs_none() -> None:
    config = BertConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    bert, decoder = BertForMaskedLM(config).eval(), llama()
    starts = {}
    for name, model in (("bert", bert), ("llama", decoder)):
        run = ula.trace(model, "the cat sat", tokenizer=reader())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SinkWarning)
            result = ula.explain(run, method="raw", layers=[0])
        starts[name] = missing_start(replace(result, sinks=((0,),)), run, reader())
    assert starts == {"bert": None, "llama": "<s>"}


@pytest.mark.long
def test_bos_puts_the_token_before_the_text() -> None:
    tokenizer = reader()
    with pytest.warns(SinkWarning, match=r"position 1 ' ?the'") as caught:
        result = ula.explain(llama(), "the cat sat", tokenizer=tokenizer, target="cat", bos=True)
    assert not any(LACKS in str(each.message) for each in caught)
    assert result.tokens is not None and [text.strip() for text in result.tokens[0]] == ["<s>", "the", "cat", "sat"]
    assert result.options["target"] == [2]
    ids = torch.tensor([[6, 1, 2, 3]])
    with pytest.warns(SinkWarning):
        by_ids = ula.explain(llama(), ids, target=2)
    assert torch.equal(result.scores, by_ids.scores)
    assert [text.strip() for text in result.words().tokens[0]] == ["<s>", "the", "cat", "sat"]
    assert ula.trace(llama(), "<s> the cat", tokenizer=tokenizer, bos=True).ids.tolist() == [[6, 1, 2]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_token_comes_before_each_text_of_a_batch(side: str) -> None:
    text = encoded(["cat", ("the cat", "sat")], reader(padding_side=side), bos=True)
    short = [6, 2]
    assert text.arguments["input_ids"].tolist()[1] == [6, 1, 2, 3]
    filled = text.arguments["input_ids"].tolist()[0]
    assert (filled[2:] if side == "left" else filled[:2]) == short
    assert text.arguments["attention_mask"].sum(1).tolist() == [2, 4]
    assert text.arguments["token_type_ids"].tolist()[1] == [0, 0, 0, 1]
    assert text.spans == (((0, 0), (0, 3)), ((0, 0), (0, 3), (4, 7), (7, 10)))
    assert text.words is not None and text.words[1] == (None, 0, 1, 2)


def test_bos_that_cannot_be_added() -> None:
    model = llama()
    with pytest.raises(OptionError, match=r"has no beginning-of-text token .*set `tokenizer.bos_token`"):
        ula.explain(model, "the cat", tokenizer=reader(bos_token=None), bos=True)
    for call in (ula.trace, ula.explain_generation, ula.estimate):
        with pytest.raises(OptionError, match="bos=True, and the inputs are no texts; put the id"):
            call(model, torch.tensor([[2, 3]]), bos=True)
    run = ula.trace(model, torch.tensor([[2, 3]]))
    with pytest.raises(OptionError, match="pass bos=True to `trace`"):
        ula.explain(run, bos=True)


def test_a_comparison_and_a_generated_text() -> None:
    model, tokenizer = llama(), reader()
    with pytest.warns(SinkWarning, match=LACKS):
        result = ula.explain_generation(model, "the cat", tokenizer=tokenizer, max_new_tokens=2, progress=False)
    assert sum(LACKS in message for message in result.warnings) == 1
    with pytest.warns(SinkWarning) as caught:
        begun = ula.explain_generation(model, "the cat", tokenizer=tokenizer, max_new_tokens=2, bos=True)
    assert not any(LACKS in str(each.message) for each in caught)
    assert begun.tokens is not None and begun.tokens[0][0] == "<s>" and begun.sizes["key"] == 5
    with pytest.warns(SinkWarning):
        table = ula.compare({"a": model}, "the cat", tokenizer=tokenizer, methods=["raw"], target=-1, bos=True)
    ((_, _, compared),) = table.results()
    assert compared.sizes["key"] == 3


@pytest.mark.long
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path)
    reader().save_pretrained(tmp_path)
    arguments = ["explain", str(tmp_path), "--text", "the cat sat"]
    for more in ([], ["--generate", "2"]):
        assert cli.main([*arguments, *more]) == 0
        assert LACKS in capsys.readouterr().out
        assert cli.main([*arguments, *more, "--bos"]) == 0
        out = capsys.readouterr().out
        assert LACKS not in out and "<s>" in out
    reader(bos_token=None).save_pretrained(tmp_path)
    assert cli.main([*arguments, "--bos"]) == 2
    assert "has no beginning-of-text token" in capsys.readouterr().err
