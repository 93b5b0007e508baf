"""The shipped text models: their record, their perplexity on held-out text, and their layers."""

import math

import pytest
import torch
from torch import Tensor

import unilinattn as ula
from evidence import texts
from evidence.text_data import Document
from evidence.text_prompts import FAR, LONGEST, PROBABILITY, PROMPTS, RECENT, SHORTEST, is_far
from evidence.texts import MODELS, WEIGHTS, build, configuration, load, nats, passages, prompts, records
from unilinattn.errors import CheckpointError, OptionError
from unilinattn.testing import tolerance

TIMES_BELOW_UNIGRAM = 20
"""The perplexity on the passages is at most that of token frequencies divided by this number."""


def held_out() -> Tensor:
    return torch.tensor([passage["ids"] for passage in passages()])


@pytest.mark.parametrize("name", MODELS)
def test_a_shipped_model_predicts_held_out_text(name: str) -> None:
    host, _ = load(name)
    bound = records()["baselines"]["unigram_perplexity"] / TIMES_BELOW_UNIGRAM
    assert math.exp(nats(host, held_out())) < bound
    torch.manual_seed(0)
    assert math.exp(nats(build(name).eval(), held_out())) > bound * TIMES_BELOW_UNIGRAM / 2


@pytest.mark.parametrize("name", MODELS)
def test_operators_of_a_shipped_model_are_exact_on_held_out_text(name: str) -> None:
    host, _ = load(name)
    layers = ula.trace(host, held_out()[:2]).layers
    assert len(layers) == host.config.num_hidden_layers
    for layer in layers:
        assert layer.operator.reconstruction_error() < tolerance("reconstruction", torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_model_expects_the_recorded_token_after_each_prompt(name: str) -> None:
    host, tokenizer = load(name)
    assert len(prompts()) == PROMPTS
    for prompt in prompts():
        assert SHORTEST <= len(prompt["ids"]) <= LONGEST
        assert [tokenizer.bos_token_id, *tokenizer.encode(prompt["text"])] == prompt["ids"]
        assert tokenizer.decode([prompt["expected"]]) == prompt["word"]
        top = host(torch.tensor([prompt["ids"]])).logits[0, -1].softmax(-1).max(-1)
        assert top.indices == prompt["expected"]
        assert float(top.values) == pytest.approx(prompt["probability"][name], abs=1e-3)
        assert prompt["probability"][name] > PROBABILITY
        recent = host(torch.tensor([prompt["ids"][-RECENT:]])).logits[0, -1].softmax(-1)[prompt["expected"]]
        assert float(recent) == pytest.approx(prompt["probability_after_recent"][name], abs=1e-3)


def test_half_of_the_prompts_need_more_than_the_last_tokens_and_all_are_held_out() -> None:
    assert sum(map(is_far, prompts())) == FAR
    assert all(Document(text["source"], ()).held_out for text in (*prompts(), *passages()))
    assert len({tuple(prompt["ids"]) for prompt in prompts()}) == PROMPTS


@pytest.mark.parametrize("name", MODELS)
def test_the_record_is_that_of_the_shipped_model(name: str) -> None:
    record = records()["models"][name]
    host, _ = load(name)
    assert record["class"] == type(host).__name__
    assert record["config"] == configuration(name)
    assert record["parameters"] == sum(weight.numel() for weight in host.parameters())
    assert record["held_out_perplexity"] < records()["baselines"]["trigram_perplexity"]
    assert (WEIGHTS / f"text-{name}.safetensors").stat().st_size < 3_000_000


def test_the_large_size_has_more_layers_and_wider_ones() -> None:
    small, large = (configuration("gated_deltanet", size) for size in ("small", "large"))
    assert large["num_hidden_layers"] == len(large["layer_types"]) == 2 * small["num_hidden_layers"]
    assert large["hidden_size"] == 2 * small["hidden_size"]


def test_unknown_names_and_absent_files_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    with pytest.raises(OptionError, match="did you mean 'mamba2'"):
        load("mamba")
    with pytest.raises(OptionError, match="unknown size 'huge'"):
        build("mamba2", "huge")
    monkeypatch.setattr(texts, "WEIGHTS", tmp_path)
    with pytest.raises(CheckpointError, match=r"is absent; train it with `python -m evidence.train_text mamba2`"):
        load("mamba2")
