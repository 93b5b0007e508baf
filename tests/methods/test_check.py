"""Checks of results against the model itself, on ids that have one replacement each, and on trained models."""

import dataclasses
import gc
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import TypeCheckError
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

import unilinattn as ula
from tests.methods import sinks
from tests.texts import PARIS, mamba, tokenizer
from unilinattn.errors import InputError, ModelStateError, OptionError, SinkWarning
from unilinattn.evaluation import Sample
from unilinattn.examples import TASKS, load
from unilinattn.results.attribution import Attribution
from unilinattn.results.check import Check, Falls
from unilinattn.results.intervals import MeanInterval
from unilinattn.results.labels import Header

IDS = torch.tensor([[0, 2]])
"""A token of each ordinary id of `binary`, so that a draw has one outcome."""


def config(**settings: Any) -> LlamaConfig:
    """Return that of a Llama whose ids 0 and 2 are no special ones."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaConfig(vocab_size=3, bos_token_id=1, eos_token_id=None, **{"pad_token_id": None, **sizes, **settings})


def binary(kind: Callable[[LlamaConfig], Any] = LlamaForCausalLM, **settings: Any) -> Any:
    """Return a Llama in float64 in which each ordinary id has one replacement, the other one."""
    torch.manual_seed(0)
    model = kind(config(**settings)).eval().double()
    with torch.no_grad():
        # Logits as large as those of trained models.
        for table in (model.get_input_embeddings(), getattr(model, "lm_head", None)):
            if table is not None:
                table.weight.normal_()
    return model


def last_logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits[0, -1]


def induction(name: str = "mamba") -> tuple[nn.Module, Attribution]:
    model = load("induction", name)
    return model, ula.explain(model, TASKS["induction"].sample(1, 0).input_ids, method="logit", target=-1)


def inputs_of(model: nn.Module, call: Callable[[], Any]) -> Tensor:
    """Return the ids of all sequences that a model reads in a call."""
    read: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0].clone()))  # type: ignore[operator]
    call()
    hook.remove()
    return torch.cat(read)


@pytest.mark.parametrize("logit", [0, 2, (0, 2), None, "function"])
def test_the_falls_are_those_of_the_model_on_other_ids(logit: Any) -> None:
    model = binary()
    here, first, second = (last_logits(model, torch.tensor([ids])) for ids in ([0, 2], [2, 2], [0, 0]))

    def value(logits: Tensor) -> Tensor:
        if isinstance(logit, tuple):
            return logits[0] - logits[2]
        return logits[int(here.argmax()) if logit is None else 2 if logit == "function" else logit]

    option = (lambda out: out.logits[:, -1, 2]) if logit == "function" else logit
    result = ula.explain(model, IDS, target=-1, logit=option)
    check = result.check(top=1, draws=3)
    assert check.keys == (int(result.scores[0].argmax()),) and check.top == 1
    top, random = (first, second) if check.keys == (0,) else (second, first)
    torch.testing.assert_close(check.value.top, float(value(here) - value(top)), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(check.value.random, float(value(here) - value(random)), rtol=1e-10, atol=1e-10)
    assert check.value.top != pytest.approx(check.value.random, abs=1e-3)
    # Each draw has the same outcome, so the interval has no width.
    difference = check.value.difference
    assert difference.low == pytest.approx(difference.mean) == pytest.approx(difference.high)
    assert difference.mean == pytest.approx(check.value.top - check.value.random)
    assert (check.log_p is None) == isinstance(logit, tuple | str)
    if check.log_p is not None:
        target = int(here.argmax()) if logit is None else logit
        here, top, random = (logits.log_softmax(-1)[target] for logits in (here, top, random))
        torch.testing.assert_close(check.log_p.top, float(here - top), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(check.log_p.random, float(here - random), rtol=1e-10, atol=1e-10)


def test_the_prediction_at_the_target_is_the_value_of_a_method_that_explains_no_logit() -> None:
    model = binary()
    check = ula.explain(model, IDS, target=-1, method="alti", compose="rollout").check()
    logits = last_logits(model, IDS)
    changed = last_logits(model, torch.tensor([[2, 2]]) if check.keys == (0,) else torch.tensor([[0, 0]]))
    assert check.value.top == pytest.approx(float((logits - changed)[logits.argmax()]), abs=1e-10)


def test_a_class_logit_has_a_log_probability_unless_it_is_the_only_one() -> None:
    settings = {"num_labels": 3, "pad_token_id": 1}
    check = ula.explain(binary(LlamaForSequenceClassification, **settings), IDS).check()
    assert check.log_p is not None
    regression = ula.explain(binary(LlamaForSequenceClassification, num_labels=1, pad_token_id=1), IDS).check()
    assert regression.log_p is None and regression.value.top != 0
    assert "lowers the output by" in regression.sentence


def test_the_log_probability_of_a_label_is_that_of_its_sigmoid() -> None:
    settings = {"num_labels": 3, "pad_token_id": 1, "problem_type": "multi_label_classification"}
    model = binary(LlamaForSequenceClassification, **settings)
    torch.nn.init.normal_(model.score.weight)
    check = ula.explain(model, IDS, logit=2).check()
    changed = torch.tensor([[2, 2]]) if check.keys == (0,) else torch.tensor([[0, 0]])
    with torch.no_grad():
        before, after = (nn.functional.logsigmoid(model(ids).logits)[0, 2] for ids in (IDS, changed))
    assert check.log_p is not None and check.log_p.top == pytest.approx(float(before - after), abs=1e-10)
    assert abs(check.log_p.top) > 1e-3


def test_each_sequence_of_a_padded_batch_has_the_check_of_itself() -> None:
    # The masks of one sequence go with it, and padding is neither replaced nor drawn.
    texts = [PARIS, "The capital"]
    batch = ula.explain(mamba(), texts, tokenizer=tokenizer("left"), target=-1, check=True)
    assert batch.checks is not None and len(batch.checks) == 2
    for text, check in zip(texts, batch.checks, strict=True):
        single = ula.explain(mamba(), text, tokenizer=tokenizer("left"), target=-1).check()
        shift = batch.sizes["key"] - len(tokenizer()(text).input_ids)
        assert check.keys == tuple(key + shift for key in single.keys)
    assert batch.select(batch=1).checks == (batch.checks[1],)
    with pytest.raises(InputError, match="selected by sequence"):
        batch.select(batch=1).check()
    with pytest.raises(InputError, match="batch=2: the result has 2 sequences; give 0 to 1"):
        batch.check(batch=2)


def test_draws_replace_the_top_tokens_or_as_many_others_by_ordinary_ids() -> None:
    model, result = induction()
    ids = TASKS["induction"].sample(1, 0).input_ids
    checks: list[Check] = []
    read = inputs_of(model, lambda: checks.append(result.check(top=4, draws=10)))[-21:]
    check = checks[0]
    changed = read != ids
    assert torch.equal(read[0], ids[0])
    top = torch.zeros_like(changed[0])
    top[list(check.keys)] = True
    assert torch.equal(top, result.scores[0] >= result.scores[0].sort().values[-4])
    assert (changed[1:11] == top).all()
    assert not (changed[11:] & top).any() and (changed[11:].sum(1) == 4).all()
    assert len(changed[11:].unique(dim=0)) > 5 and len(read[1:11].unique(dim=0)) > 5
    assert int(read.min()) >= 0 and int(read.max()) < model.config.vocab_size  # type: ignore[union-attr,operator]


def test_special_ids_are_neither_replaced_nor_drawn() -> None:
    model = binary()
    ids = torch.tensor([[1, 0, 2, 1, 2]])
    result = ula.explain(model, ids, target=-1)
    read = inputs_of(model, lambda: result.check(draws=20))[-41:]
    assert torch.equal(read == 1, (ids == 1).expand(41, -1))
    assert result.check().top == 1


def test_tokens_behind_the_target_of_a_decoder_are_not_drawn() -> None:
    model = load("copying", "transformer")
    ids = TASKS["copying"].sample(1, 0).input_ids
    result = ula.explain(model, ids, target=5)
    read = inputs_of(model, lambda: result.check(draws=20))[-41:]
    changed = (read != ids).any(0)
    assert changed[:6].all() and not changed[6:].any()


@pytest.mark.long
def test_a_seed_repeats_its_draws() -> None:
    _, result = induction()
    assert result.check() == result.check() == result.check(seed=0)
    assert result.check(seed=1) != dataclasses.replace(result.check(), seed=1)
    assert result.check(draws=5).draws == 5


@pytest.mark.parametrize("name", ["mamba", "mamba2", "transformer"])
def test_the_top_tokens_of_trained_models_carry_the_logit(name: str) -> None:
    _, result = induction(name)
    check = result.check()
    assert check.log_p is not None and check.log_p.difference.low > 0 and check.log_p.top > 3
    # The check rejects scores of the other sign.
    wrong = dataclasses.replace(result, scores=-result.scores).check()
    assert wrong.log_p is not None and wrong.log_p.difference.low <= 0


def test_many_tokens_are_as_many_as_half_of_them() -> None:
    _, result = induction()
    assert result.check(top=1000, draws=2).top == 24
    assert ula.explain(binary(), torch.tensor([[0, 2, 0]]), target=-1).check().top == 1


def test_sinks_are_not_replaced() -> None:
    model = sinks.llama()
    ids = torch.tensor([[2, sinks.SINK, 3, 4, 5, 6]])
    model.config.bos_token_id = None
    with pytest.warns(SinkWarning):
        result = ula.explain(model, ids, target=-1)
    assert result.sinks == ((1,),)
    result = dataclasses.replace(result, scores=torch.arange(6.0).flip(0)[None])
    assert result.check().keys == (0, 2)
    read = inputs_of(model, lambda: result.check())
    assert (read[-49:, 1] == sinks.SINK).all()
    everything = dataclasses.replace(result, sinks=[range(6)])
    with pytest.raises(InputError, match="0 of 6 tokens can be replaced"):
        everything.check()


def test_a_single_token_is_refused() -> None:
    with pytest.raises(InputError, match="1 of 1 tokens can be replaced"):
        ula.explain(binary(), torch.tensor([[0]]), target=-1, check=True)


@pytest.mark.long
def test_a_check_is_saved_and_loaded(tmp_path: Path) -> None:
    _, result = induction()
    checked = dataclasses.replace(result, checks=[result.check()])
    loaded = Attribution.load(checked.save(tmp_path / "checked.safetensors"))
    assert loaded.checks == checked.checks and loaded.checks is not None
    assert loaded.checks[0].sentence == result.check().sentence
    for copied in (loaded, pickle.loads(pickle.dumps(checked))):
        assert copied.checks == checked.checks
        with pytest.raises(InputError, match="explain again with check=True"):
            copied.check()
    plain = Attribution.load(result.save(tmp_path / "plain.safetensors"))
    assert plain.checks is None
    # Files of older versions have no entry.
    older = json.loads(result._header().model_dump_json())
    assert older.pop("checks", "absent") is None
    assert Header.model_validate_json(json.dumps(older)).checks is None
    with pytest.raises(InputError, match="checks must be 1 records"):
        dataclasses.replace(checked, checks=[result.check()] * 2)


@pytest.mark.long
def test_explain_stores_the_check() -> None:
    model, result = induction()
    stored = ula.explain(model, TASKS["induction"].sample(1, 0).input_ids, method="logit", target=-1, check=True)
    assert stored.checks == (result.check(),) and result.checks is None
    assert dataclasses.replace(stored, model="other").check() == result.check()


def test_a_check_of_a_model_that_changed_is_refused() -> None:
    model = binary()
    traced = ula.trace(model, IDS)
    result = ula.explain(traced, target=-1)
    next(model.parameters()).data.mul_(2)
    with pytest.raises(ModelStateError, match="a check would be that of another model"):
        result.check()


def test_a_result_does_not_keep_its_model() -> None:
    model = binary()
    traced = ula.trace(model, IDS)
    result = ula.explain(traced, target=-1)
    first = result.check()
    del traced
    gc.collect()
    # The trace is made again.
    assert result.check() == first
    with torch.no_grad():
        model.lm_head.weight += 1
    with pytest.raises(ModelStateError, match="the weights of LlamaForCausalLM changed since the trace"):
        result.check()
    del model
    gc.collect()
    with pytest.raises(InputError, match="the LlamaForCausalLM of this result exists no longer"):
        result.check()


def test_results_without_one_score_for_each_token_are_refused() -> None:
    model = binary()
    with pytest.raises(InputError, match="query axis; explain one position, such as target=-1"):
        ula.explain(model, IDS, method="latim", layers="mean", check=True)
    layers = ula.explain(model, IDS, method="latim", target=-1)
    with pytest.raises(InputError, match=r"layer axis; compose the layers, or take one: result.select\(layer=0\)"):
        layers.check()
    assert layers.select(layer=0).check().top == 1
    text = ula.explain(mamba(), PARIS, tokenizer=tokenizer(), target=-1)
    with pytest.raises(InputError, match="merged"):
        text.words().check()
    with pytest.raises(InputError, match="the result has 3 scores, and the sequence 2 ids"):
        longer = dataclasses.replace(layers.select(layer=0), scores=torch.ones(1, 3), mask=None, sinks=None)
        longer.check()


@pytest.mark.long
def test_inputs_without_ids_and_models_without_logits_are_refused() -> None:
    model = binary()
    with pytest.raises(InputError, match="was not given one tensor of token ids"):
        ula.explain(model, {"inputs_embeds": torch.randn(1, 2, 16, dtype=torch.float64)}, target=-1, check=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = ula.explain(binary(LlamaModel), IDS, target=-1)
    with pytest.raises(InputError, match=r"LlamaModel returns no logits, .* logit=lambda out"):
        result.check()
    torch.manual_seed(0)
    settings = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=12)
    t5 = T5ForConditionalGeneration(settings).eval()
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "decoder_input_ids": torch.tensor([[0, 4]])}
    with pytest.raises(InputError, match="The ids of an encoder and a decoder are two streams"):
        ula.explain(t5, inputs, target=-1, check=True)


@pytest.mark.parametrize("options", [{"top": 0}, {"draws": 1}, {"seed": -1}, {"top": True}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    (name, value), *_ = options.items()
    result = ula.explain(binary(), IDS, target=-1)
    with pytest.raises(OptionError, match=f"{name}={value}; give a whole number of at least"):
        result.check(**options)


def test_a_number_that_is_not_whole_is_refused() -> None:
    result = ula.explain(binary(), IDS, target=-1)
    # A thorough run checks the types of arguments before.
    types = (OptionError, BeartypeCallHintParamViolation, TypeCheckError)
    with pytest.raises(types, match=r"draws=2\.0; give a whole number of|draws=2\.0 violates|'draws': 2\.0"):
        result.check(draws=2.0)  # type: ignore[arg-type]  # the refused type


@pytest.mark.parametrize("label", [0, 2])
def test_the_gain_of_an_evaluation_is_that_of_the_label(label: int) -> None:
    # Only the two tokens before the target are ranked.
    model, ids = binary(), torch.tensor([[0, 2, 0]])
    samples = [Sample(inputs=ids, target=-1, label=label)]
    rows = {"first": lambda *_: torch.tensor([1.0, 0.0, 5.0]), "second": lambda *_: torch.tensor([0.0, 1.0, 5.0])}
    table = ula.evaluate({"llama": model}, samples, rows, ["replacement_gain"], baselines=[])
    first, second = (
        float(last_logits(model, torch.tensor([changed])).log_softmax(-1)[label]) for changed in ([2, 2, 0], [0, 0, 0])
    )
    values = {row["method"]: row["value"] for row in table}
    assert values["first"] == pytest.approx(second - first, abs=1e-10) == -values["second"]
    assert abs(second - first) > 1e-3


def test_the_sentence_has_both_falls() -> None:
    value = Falls(5.13, 1.2, MeanInterval(3.93, 2.0, 5.0, 24))
    check = Check("the logit", (4, 2, 9), 24, 0, value, value)
    assert check.sentence == "replacing the top 3 tokens lowers log p by 5.1, three random ones by 1.2 (24 draws)"
    tied = Falls(0.123, -1e-9, MeanInterval(0.1, -0.2, 0.3, 5))
    assert Check("the difference of two logits", (4,), 5, 0, tied).sentence == (
        "replacing the top token lowers the difference of two logits by 0.12, a random one by 0 "
        "(5 draws, a difference of -0.2 to 0.3 at 95 %, which may be none)"
    )


class TwoTables(nn.Module):
    """A Transformer of torch with tables of words and of positions, which names neither."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, 16), nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(16, 30)

    def forward(self, input_ids: Tensor) -> Tensor:
        vectors = self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        return self.head(self.encoder(vectors))


def test_ids_are_drawn_from_the_table_with_a_logit_for_each() -> None:
    torch.manual_seed(0)
    ids = torch.randint(20, (1, 9))
    result = ula.explain(TwoTables(30).eval(), ids, target=-1, check=True)
    assert result.checks is not None and result.checks[0].log_p is not None
    with pytest.raises(InputError, match=r"number of ids of TwoTables is unknown.*get_input_embeddings"):
        ula.explain(TwoTables(25).eval(), ids, method="logit", target=0, logit=lambda out: out[:, -1, 3], check=True)
