"""Explanations of generated text: a row for each generated token, from one trace of the finished text."""

import copy
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

import unilinattn as ula
from tests.texts import LONDON, PARIS, VOCABULARY, mamba, tokenizer
from unilinattn.errors import InputError, ModelStateError, OptionError, UncoveredError, UnilinattnError
from unilinattn.frozen.live import LiveRun
from unilinattn.frozen.run import FrozenRun
from unilinattn.host import weights
from unilinattn.reruns.embedded import EmbeddedModel
from unilinattn.scoring import numbers
from unilinattn.testing import promoted
from unilinattn.testing.hosts import basic, delta, latent, recurrent
from unilinattn.testing.hosts import mamba as mamba_hosts
from unilinattn.viz.colours import shown

PROMPT = "The capital of France"
SMALL: dict[str, Any] = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None)
WIDTH: dict[str, Any] = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)


def gpt2(**settings: Any) -> GPT2LMHeadModel:
    # With these weights the generated tokens differ.
    torch.manual_seed(5)
    config = GPT2Config(**{**SMALL, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.4, **settings})
    return GPT2LMHeadModel(config).eval()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **WIDTH, initializer_range=0.4)).eval()


def explained(model: Any = None, prompt: Any = PROMPT, **options: Any) -> ula.Attribution:
    options = {"tokenizer": tokenizer(), "max_new_tokens": 3, **options}
    return ula.explain_generation(gpt2() if model is None else model, prompt, **options)


@pytest.mark.parametrize("host", ["mamba", "gpt2", "llama"])
def test_the_shares_of_a_row_add_up_to_the_logit_of_its_token(host: str) -> None:
    model = copy.deepcopy({"mamba": mamba, "gpt2": gpt2, "llama": llama}[host]()).double()
    prompt = tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    with promoted(), torch.no_grad():
        result = explained(model, method="logit")
        finished = model.generate(prompt, max_new_tokens=3, do_sample=False)
        logits = model(finished).logits[0]
    length, count = finished.shape[1], prompt.shape[1]
    assert result.dims == ("batch", "query", "key") and result.scores.shape == (1, 3, length)
    for row, place in enumerate(range(count, length)):
        total = result.scores[0, row].sum() + result.extras["bias"][0, row]
        assert total.item() == pytest.approx(logits[place - 1, finished[0, place]].item(), rel=1e-10)
        assert not result.scores[0, row, place:].any() and result.scores[0, row, :place].all()
    assert result.options["target"] == [list(range(count - 1, length - 1))]
    assert result.options["logit"] == [finished[0, count:].tolist()]
    assert result.completeness_gap is not None and result.completeness_gap < 1e-10


GRADIENTS = ["gradient", "input_x_gradient", "integrated_gradients", "smoothgrad"]
METHODS = ["latim", "lrp", "transformer_attribution", "knockout", "occlusion", *GRADIENTS]


@pytest.mark.parametrize("method", METHODS)
def test_a_row_is_the_explanation_of_one_target(method: str) -> None:
    result = explained(method=method)
    ids = torch.cat(
        [tokenizer()(PROMPT, return_tensors="pt")["input_ids"], torch.tensor(result.options.get("logit") or _ids())], 1
    )
    trace = ula.trace(gpt2(), ids)
    assert len(set(_ids()[0])) == 3
    for row, place in enumerate(result.options["target"][0]):
        named = {"logit": int(ids[0, place + 1])} if "logit" in result.options else {}
        alone = ula.explain(trace, method=method, target=place, **named)
        assert torch.allclose(result.scores[..., row, :], alone.scores, rtol=1e-4, atol=1e-6)
        assert not result.scores[..., row, place + 1 :].any()
        for name, values in alone.extras.items():
            if values.shape == alone.scores.shape[:-1]:
                assert torch.allclose(result.extras[name][..., row], values, rtol=1e-3, atol=1e-6)
        if "decomposition_error" in alone.extras:
            assert (result.extras["decomposition_error"] >= alone.extras["decomposition_error"]).all()


def test_generated_tokens_are_explained_by_head() -> None:
    result = explained(method="alti", by_head=True)
    length = result.sizes["key"]
    assert result.dims == ("layer", "batch", "head", "query", "key")
    assert result.scores.shape == (2, 1, 2, 3, length) and result.extras["residual"].shape == (2, 1, 3)
    sums = result.scores.sum((2, 4)) + result.extras["residual"]
    assert torch.allclose(sums, torch.ones_like(sums))


@cache
def greedy() -> ula.Attribution:
    return explained()


def _ids() -> Any:
    return greedy().options["logit"]


@pytest.mark.parametrize(("method", "kind"), [("logit", FrozenRun), ("attn_lrp", LiveRun)])
def test_rows_share_one_run(method: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    original = kind.__init__

    def counted(self: Any, *args: Any, **options: Any) -> None:
        runs.append(options)
        original(self, *args, **options)

    monkeypatch.setattr(kind, "__init__", counted)
    explained(method=method)
    assert len(runs) == 1
    trace = ula.trace(gpt2(), torch.tensor([[1, 2, 3]]))
    for target in (1, 2):
        ula.explain(trace, method=method, target=target)
    # Outside of the context each call has its own run.
    assert len(runs) == 3


@pytest.mark.long
@pytest.mark.parametrize("method", ["gradient", "integrated_gradients"])
def test_gradients_of_all_rows_are_those_of_one_run(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    original = EmbeddedModel.run

    def counted(self: Any, vectors: Any, *args: Any) -> Any:
        runs[-1] += 1
        return original(self, vectors, *args)

    monkeypatch.setattr(EmbeddedModel, "run", counted)
    results = []
    for count, tokens_at_once in ((2, 4096), (6, 4096), (6, 1)):
        monkeypatch.setattr(numbers, "TOKENS", tokens_at_once)
        runs.append(0)
        results.append(explained(method=method, max_new_tokens=count))
    few, many, one_by_one = runs
    assert few == many < one_by_one
    assert torch.allclose(results[1].scores, results[2].scores, rtol=1e-4, atol=1e-6)


def test_sampled_scores_have_no_part_of_later_tokens() -> None:
    result = explained(method="kernel_shap", max_new_tokens=2)
    assert result.scores[0, 0].any() and not result.scores[0, 0, result.options["target"][0][0] + 1 :].any()


def test_sampled_text_is_explained_as_it_was_sampled() -> None:
    settings = {"do_sample": True, "top_k": 0}
    torch.manual_seed(5)
    result = explained(generate_kwargs=settings)
    torch.manual_seed(5)
    prompt = tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    sampled = gpt2().generate(prompt, max_new_tokens=3, **settings)[0, prompt.shape[1] :].tolist()
    assert result.options["logit"] == [sampled] and sampled != _ids()[0]
    assert result.options["generate_kwargs"] == settings


def test_a_text_that_ends_has_fewer_rows() -> None:
    first = _ids()[0][0]
    result = explained(generate_kwargs={"eos_token_id": first})
    assert result.options["logit"] == [[first]] and result.sizes["query"] == 1


def test_results_have_labels_pictures_words_and_files(tmp_path: Path) -> None:
    result = greedy()
    assert result.tokens is not None and result.query_tokens is not None
    assert "".join(result.tokens[0]).startswith(PROMPT)
    assert result.query_tokens[0] == result.tokens[0][-3:]
    loaded = ula.Attribution.load(result.save(tmp_path / "result.safetensors"))
    assert loaded.query_tokens == result.query_tokens and torch.equal(loaded.scores, result.scores)
    panel = result.plot().axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == list(map(shown, result.query_tokens[0]))
    page = result.to_html()
    assert all(escape(shown(text)) in page for text in (*result.tokens[0], *result.query_tokens[0]))
    words = result.words()
    assert words.tokens is not None and words.tokens[0][:4] == ("The", " capital", " of", " France")
    assert words.query_tokens == result.query_tokens
    assert torch.allclose(words.scores.sum(-1), result.scores.sum(-1), atol=1e-5)
    table = result.to_dataframe()
    assert table["query_token"].unique().tolist() == list(dict.fromkeys(result.query_tokens[0]))
    assert result.select(batch=0).query_tokens == result.query_tokens
    assert explained(tokenizer=None, prompt=torch.tensor([[1, 2]])).query_tokens is None


def test_prompts_are_texts_ids_or_a_tokenizers_mapping() -> None:
    arguments = tokenizer()(PROMPT, return_tensors="pt")
    expected = greedy()
    for prompt in (arguments["input_ids"], {name: arguments[name] for name in ("input_ids", "attention_mask")}):
        assert torch.equal(explained(prompt=prompt).scores, expected.scores)


def test_the_model_is_left_as_it_was() -> None:
    model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()
    before = copy.deepcopy(model.state_dict())
    explained(model)
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ModelStateError):
        explained(gpt2().train())
    # This host divides its weights in place at its first evaluation pass.
    settings: dict[str, Any] = dict(hidden_size=16, attention_hidden_size=16, num_hidden_layers=2, rescale_every=1)
    rwkv = RwkvForCausalLM(RwkvConfig(**SMALL, **settings)).eval()
    before = copy.deepcopy(rwkv.state_dict())
    result = explained(rwkv)
    assert all(torch.equal(value, before[name]) for name, value in rwkv.state_dict().items())
    prompt = tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    assert rwkv.generate(prompt, max_new_tokens=3, do_sample=False)[0, -3:].tolist() == result.options["logit"][0]
    assert not torch.equal(rwkv.rwkv.blocks[1].attention.output.weight, before["rwkv.blocks.1.attention.output.weight"])


BAD: list[tuple[Any, dict[str, Any], type[UnilinattnError], str]] = [
    ([PARIS, LONDON], {}, InputError, "the prompt is a list; explain one prompt at a time"),
    (torch.ones(2, 3, dtype=torch.long), {}, InputError, "the prompt holds 2 sequences; explain one"),
    ("", {}, InputError, "text 0, '', has no tokens"),
    (PROMPT, {"tokenizer": None}, InputError, "the input is text, with no tokenizer"),
    (torch.tensor([[1, VOCABULARY]]), {}, InputError, "the model knows ids 0 to"),
    (
        {"input_ids": torch.tensor([[1, 2]]), "pixel_values": torch.rand(1, 3, 8, 8)},
        {},
        InputError,
        "the prompt holds pixel_values; .* An image in the prompt is not covered",
    ),
    (torch.rand(4, 4, 3).numpy(), {}, InputError, "the prompt is an image"),
    (
        {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[0, 1]])},
        {},
        InputError,
        "the prompt has padding",
    ),
    ({"attention_mask": torch.tensor([[1]])}, {}, InputError, "the prompt has no input_ids"),
    (PROMPT, {"max_new_tokens": 0}, OptionError, "max_new_tokens=0; give the positive number"),
    (PROMPT, {"max_new_tokens": 1020}, InputError, "has positions for 1024; give a shorter prompt or generate at most"),
    (PROMPT, {"target": -1}, OptionError, "target=-1: every generated token is explained"),
    (PROMPT, {"logit": 3}, OptionError, "logit=3: every generated token is explained, by its own logit"),
    (PROMPT, {"generate_kwargs": {"max_length": 9}}, OptionError, "generate_kwargs holds 'max_length'"),
    (PROMPT, {"generate_kwargs": {"num_return_sequences": 2}}, OptionError, "num_return_sequences=2; one text"),
    (PROMPT, {"method": "latm"}, OptionError, "unknown method 'latm'; did you mean 'latim'"),
    (PROMPT, {"method": "latim", "q": 2}, OptionError, "latim takes no option 'q'"),
]


@pytest.mark.parametrize(("prompt", "options", "error", "message"), BAD)
def test_invalid_generations_are_refused(prompt: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        explained(prompt=prompt, **options)


def test_models_that_do_not_continue_a_text_are_refused() -> None:
    with pytest.raises(UncoveredError, match="BertModel does not generate text"):
        explained(BertModel(BertConfig(vocab_size=VOCABULARY, **WIDTH)).eval())


@pytest.mark.slow
def test_real_hosts_generate() -> None:
    classes: set[type] = set()
    for host in (*basic.HOSTS, *delta.HOSTS, *latent.HOSTS, *mamba_hosts.HOSTS, *recurrent.HOSTS):
        model, ids = host.model(), host.inputs()[:1, :5]
        # xLSTM's own `generate` fails at this size.
        if type(model) in classes or not hasattr(model, "generate") or "xLSTM" in type(model).__name__:
            continue
        classes.add(type(model))
        before = copy.deepcopy(model.state_dict())
        try:
            result = ula.explain_generation(model, ids, max_new_tokens=2)
        except UncoveredError as error:
            assert "does not generate text" in str(error), host.name
            continue
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), host.name
        trace = ula.trace(model, torch.cat([ids, torch.tensor(result.options["logit"])], 1))
        for row, place in enumerate(result.options["target"][0]):
            alone = ula.explain(trace, target=place, logit=result.options["logit"][0][row])
            largest = alone.scores.abs().max()
            assert torch.allclose(result.scores[0, row], alone.scores[0], rtol=1e-3, atol=1e-4 * largest), host.name
    assert len(classes) > 35


def test_the_weights_are_not_read_again_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons: list[int] = []
    checksums = weights._checksums

    def counted(module: torch.nn.Module, by_id: Any) -> Any:
        comparisons[-1] += 1
        return checksums(module, by_id)

    monkeypatch.setattr(weights, "_checksums", counted)
    for count in (2, 6):
        comparisons.append(0)
        explained(method="lrp", max_new_tokens=count)
    assert comparisons[0] == comparisons[1] > 0
