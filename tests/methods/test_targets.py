"""Texts as inputs, targets and logits, and scores by word."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CpmAntConfig,
    CpmAntForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import unilinattn as ula
from tests.texts import LONDON, PARIS, VOCABULARY, mamba, tokenizer
from unilinattn.errors import InputError, OptionError, UnilinattnError
from unilinattn.host.explained import ExplainedLogit
from unilinattn.host.labels import token_text
from unilinattn.results.explained import explained as explained_in
from unilinattn.viz.colours import shown

SMALL = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)


def explained(text: Any = PARIS, **options: Any) -> ula.Attribution:
    return ula.explain(mamba(), text, tokenizer=tokenizer(), **options)


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_explained_like_their_ids(side: str) -> None:
    texts = [PARIS, LONDON, "matters"]
    result = ula.explain(mamba(), texts, tokenizer=tokenizer(side), method="latim", target="last")
    arguments = tokenizer(side)(texts, padding=True, return_tensors="pt")
    expected = ula.explain(
        mamba(),
        {name: arguments[name] for name in ("input_ids", "attention_mask")},
        method="latim",
        target=-1,
        tokens=tokenizer(side),
    )
    assert torch.equal(result.scores, expected.scores) and result.tokens == expected.tokens
    assert result.mask is not None and expected.mask is not None and torch.equal(result.mask, expected.mask)
    for row, text, real in zip(result.tokens or (), texts, result.mask, strict=True):
        assert "".join(token for token, kept in zip(row, real.tolist(), strict=True) if kept) == text


@pytest.mark.long
def test_one_text_is_a_batch_of_one() -> None:
    assert explained().scores.shape[0] == 1 and explained().mask is None
    assert torch.equal(explained().scores, explained([PARIS]).scores)


@pytest.mark.parametrize(
    "target", ["France", "rance", "of France", re.compile("F[a-z]+e"), re.compile(r"(?<=of )\w+")], ids=str
)
def test_a_target_text_is_its_last_token(target: str | re.Pattern[str]) -> None:
    labels = explained().tokens
    assert labels is not None
    # The position behind which the text reads "The capital of France".
    place = next(k for k in range(len(labels[0])) if "".join(labels[0][: k + 1]).endswith("France"))
    result, expected = explained(target=target), explained(target=place)
    assert torch.equal(result.scores, expected.scores) and result.options["target"] == [place]


def test_a_target_text_has_one_place_in_each_sequence() -> None:
    result = explained([PARIS, LONDON], target="capital")
    assert result.options["target"] == [1, 1]
    with pytest.raises(InputError, match=r"target 'France' does not occur in the text 'The capital of England"):
        explained([PARIS, LONDON], target="France")


def test_cls_is_the_token_that_class_logits_read() -> None:
    bert = BertForSequenceClassification(BertConfig(**SMALL)).eval()
    llama = LlamaForSequenceClassification(LlamaConfig(**SMALL, pad_token_id=0)).eval()
    texts = [PARIS, "matters"]
    ends = [len(tokenizer()(text)["input_ids"]) - 1 for text in texts]
    for model, places in ((bert, [0, 0]), (llama, ends)):
        result = ula.explain(model, texts, tokenizer=tokenizer(), method="rollout", target="cls")
        assert result.options["target"] == places
    with pytest.raises(InputError, match="has logits at every token"):
        explained(target="cls")


def test_a_logit_is_named_by_its_text() -> None:
    ids = [tokenizer().convert_tokens_to_ids(token) for token in ("P", "L")]
    assert explained(target=-1, logit="P").options["logit"] == ids[0]
    assert explained(target=-1, method=ula.methods.Lrp(logit="P")).options["logit"] == ids[0]
    pair = explained(target=-1, logit=("P", "L"))
    assert pair.options["logit"] == ids
    assert explained(target=-1, method=ula.methods.Lrp(logit=("P", "L"))).options["logit"] == ids
    assert torch.equal(pair.scores, explained(target=-1, logit=tuple(ids)).scores)


@pytest.mark.long
def test_padding_changes_no_score(recwarn: pytest.WarningsRecorder) -> None:
    texts = [PARIS, "matters"]
    for side in ("left", "right"):
        batch = ula.explain(mamba(), texts, tokenizer=tokenizer(side), target="last")
        assert batch.mask is not None
        for at, text in enumerate(texts):
            alone, real = explained(text, target="last"), batch.mask[at]
            assert torch.allclose(batch.scores[at, real], alone.scores[0], atol=1e-6)
            assert not batch.scores[at, ~real].any()
            words = batch.select(batch=at).words()
            assert torch.allclose(words.scores, alone.words().scores[0], atol=1e-6)
            assert words.tokens == alone.words().tokens and words.offsets == alone.words().offsets
            assert not [token for token in batch.plot(batch=at).axes[0].get_xticklabels() if "pad" in token.get_text()]
    assert not [warning for warning in recwarn if "padding" in str(warning.message)]


BAD: list[tuple[Any, dict[str, Any], type[UnilinattnError], str]] = [
    (PARIS, {"target": "Rome"}, InputError, "target 'Rome' does not occur in the text"),
    (PARIS, {"target": "is"}, InputError, "target 'is' occurs 2 times, at characters 22, 28"),
    (PARIS, {"target": re.compile("x*")}, InputError, r"the pattern 'x\*' does not occur"),
    (PARIS, {"logit": "Rome"}, OptionError, "logit 'Rome' is not one token of this tokenizer"),
    (PARIS, {"tokenizer": None}, InputError, "the input is text, with no tokenizer; pass tokenizer="),
    (PARIS, {"tokenizer": "gpt2"}, InputError, "with str as tokenizer"),
    ("", {}, InputError, "text 0, '', has no tokens"),
    ([PARIS, ""], {}, InputError, "text 1, '', has no tokens"),
    ([PARIS, 3], {}, InputError, "the inputs hold texts and a int"),
    (torch.tensor([[1, 2]]), {"target": "x"}, InputError, "the model was not given text"),
    (torch.tensor([[1, 2]]), {"logit": "P", "tokenizer": None}, InputError, r"logit 'P' is a text; give .* tokenizer="),
]


@pytest.mark.parametrize(("inputs", "options", "error", "message"), BAD)
def test_invalid_texts_are_refused(inputs: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ula.explain(mamba(), inputs, **{"tokenizer": tokenizer(), **options})


def test_a_text_longer_than_the_positions_is_refused() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=8)).eval()
    bert = BertForSequenceClassification(BertConfig(**SMALL, max_position_embeddings=8)).eval()
    for model in (gpt2, bert):
        with pytest.raises(InputError, match=rf"have \d+ tokens, and {type(model).__name__} has positions for 8"):
            ula.explain(model, PARIS, tokenizer=tokenizer())


def test_a_tokenizer_of_another_model_is_refused() -> None:
    ids = sorted({int(number) for number in tokenizer()(PARIS)["input_ids"]})
    smaller = GPT2LMHeadModel(GPT2Config(vocab_size=ids[-1], n_embd=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(
        InputError, match=rf"the id {ids[-1]}, and GPT2LMHeadModel has ids 0 to {ids[-1] - 1}: .* another"
    ):
        ula.explain(smaller, PARIS, tokenizer=tokenizer())
    enough = GPT2LMHeadModel(GPT2Config(vocab_size=ids[-1] + 1, n_embd=16, n_layer=1, n_head=2)).eval()
    with pytest.warns(UserWarning, match=rf"has {len(tokenizer())} tokens and GPT2LMHeadModel {ids[-1] + 1}"):
        ula.explain(enough, PARIS, tokenizer=tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explained()


def test_words_add_up_their_tokens() -> None:
    result = explained([PARIS, "matters"], target=-1)
    words = result.words()
    assert words.tokens == (("The", " capital", " of", " France", " is", " Paris"), ("matters", *[""] * 5))
    assert words.mask is not None and words.mask.sum(1).tolist() == [6, 1]
    assert torch.allclose(words.scores.sum(1), result.scores.sum(1), atol=1e-6)
    labels, scores = result.tokens, result.scores[0].tolist()
    assert labels is not None
    begin, text = 0, ""
    for word, score in zip(words.tokens[0], words.scores[0].tolist(), strict=True):
        end = begin
        while text != word:
            text, end = text + labels[0][end], end + 1
        assert score == pytest.approx(sum(scores[begin:end]), abs=1e-7)
        begin, text = end, ""


def test_the_query_of_a_word_is_its_last_token() -> None:
    result = explained(method="latim")
    words = result.words("max")
    ids = result.word_ids
    assert ids is not None and words.dims == result.dims and words.scores.shape[-2:] == (6, 6)
    for row in range(6):
        last = max(place for place, word in enumerate(ids[0]) if word == row)
        assert torch.equal(words.extras["bias"][..., row], result.extras["bias"][..., last])
        for column in range(6):
            places = [place for place, word in enumerate(ids[0]) if word == column]
            assert torch.equal(words.scores[..., row, column], result.scores[..., last, :][..., places].amax(-1))


def test_words_are_kept_in_files_and_selections(tmp_path: Any) -> None:
    result = explained([PARIS, LONDON], target=-1)
    loaded = ula.Attribution.load(result.save(tmp_path / "result.safetensors"))
    assert loaded.word_ids == result.word_ids
    assert torch.equal(result.select(batch=1).words().scores, result.words().scores[1])
    with pytest.raises(InputError, match="the words of this result are unknown"):
        ula.explain(mamba(), torch.tensor([[1, 2]])).words()
    with pytest.raises(OptionError, match="unknown reduction 'mean'"):
        result.words("mean")


def test_spans_add_up_the_tokens_of_their_characters() -> None:
    result = explained(target=-1)
    assert result.offsets is not None and result.tokens is not None
    assert all(PARIS[a:b] == token for (a, b), token in zip(result.offsets[0], result.tokens[0], strict=True))
    begin = PARIS.index("France is")
    spans = result.spans([(begin, begin + 9), (0, 3)])
    inside = [a < begin + 9 and b > begin for a, b in result.offsets[0]]
    total = sum(score for score, one in zip(result.scores[0].tolist(), inside, strict=True) if one)
    assert spans.tokens is not None and spans.offsets is not None
    # The token before "F" holds the space or not; every character of the span is in it.
    place = next(k for k, token in enumerate(spans.tokens[0]) if token.strip() == "France is")
    assert spans.scores[0, place].item() == pytest.approx(total, abs=1e-6)
    assert len(spans.tokens[0]) == len(inside) - sum(inside) + 1 and "".join(spans.tokens[0]) == PARIS
    assert PARIS[slice(*spans.offsets[0][place])] == spans.tokens[0][place]
    assert torch.allclose(spans.scores.sum(), result.scores.sum(), atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_spans_of_tokens_count_real_tokens(side: str) -> None:
    result = ula.explain(mamba(), [PARIS, "matters"], tokenizer=tokenizer(side), method="latim")
    merged = result.spans([[(0, 2)], [(0, 1)]], "max", unit="tokens")
    assert result.mask is not None and merged.mask is not None
    for at, width in ((0, 2), (1, 1)):
        first = int(result.mask[at].nonzero()[0])
        whole = result.scores[:, at, first + width - 1, first : first + width].amax(-1)
        assert torch.equal(merged.scores[:, at, 0, 0], whole)
        assert merged.mask[at].sum() == result.mask[at].sum() - width + 1


@pytest.mark.parametrize(
    ("spans", "options", "error", "message"),
    [
        ([(4, 4)], {}, InputError, r"span \(4, 4\) is empty"),
        ([(-1, 4)], {}, InputError, "begins before 0"),
        ([(0, "x")], {}, InputError, "is no pair of integers"),
        ([(0, 3), (2, 5)], {}, InputError, r"span \(2, 5\) of sequence 0 shares token \d+ with another span"),
        ([(900, 901)], {}, InputError, r"span \(900, 901\) of sequence 0 has no token; spans count characters"),
        ([(40, 41)], {"unit": "tokens"}, InputError, "has no token; spans count tokens"),
        ([[(0, 1)], [(0, 1)]], {}, InputError, "spans has 2 lists for 1 sequences"),
        ([(0, 3)], {"unit": "bytes"}, OptionError, "unknown unit 'bytes'"),
        ([(0, 3)], {"reduce": "mean"}, OptionError, "unknown reduction 'mean'"),
    ],
)
def test_invalid_spans_are_refused(spans: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        explained(target=-1).spans(spans, **options)


def test_characters_of_other_inputs_are_unknown() -> None:
    result = ula.explain(mamba(), torch.tensor([[1, 2, 3]]), target=-1)
    with pytest.raises(InputError, match="characters of this result's tokens are unknown"):
        result.spans([(0, 1)])
    assert result.spans([(0, 2)], unit="tokens").scores.shape == (1, 2)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_heading_names_the_prediction_its_target_and_logit(side: str, tmp_path: Path) -> None:
    texts = [PARIS, "London is"]
    result = ula.explain(mamba(), texts, method="lrp", tokenizer=tokenizer(side), target=1)
    for at, text in enumerate(texts):
        ids = tokenizer()(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = mamba()(ids).logits[0, 1]
        name = token_text(tokenizer(), int(logits.argmax()))
        assert result.logit_names[at] == (name,)
        heading = explained_in(result, at)
        assert f"the model's prediction “{shown(name)}” at position 1 “" in heading
        assert heading.endswith(f"= {float(logits.max()):.4g}.")
    result.save(tmp_path / "result.safetensors")
    assert ula.Attribution.load(tmp_path / "result.safetensors").logit_names == result.logit_names
    assert result.select(batch=1).logit_names == result.logit_names[1:]


def test_named_logits_have_their_texts_and_other_results_no_names() -> None:
    one, two = (tokenizer().get_vocab()[token] for token in ("a", "b"))
    assert explained(target=-1, logit=one).logit_names == (("a",),)
    pair = explained(target=-1, logit=(one, two))
    assert f"tokens {one} “a” and {two} “b” at position" in explained_in(pair)
    ids = tokenizer()(PARIS, return_tensors="pt")["input_ids"]
    assert ula.explain(mamba(), ids, target=-1).logit_names is None
    assert explained(target=-1, logit=lambda out: out.logits[:, -1, 3]).logit_names is None
    assert explained(target=-1, method="raw").logit_names is None and explained(method="logit").logit_names is None


def test_the_first_run_decides_where_the_traced_run_computed_no_logits() -> None:
    ids = tokenizer()(PARIS, return_tensors="pt")["input_ids"]
    kept = {"input_ids": ids, "logits_to_keep": 2}
    last = ula.explain(mamba(), kept, tokens=tokenizer(), tokenizer=tokenizer(), target=-2)
    assert last.logit_names == explained(target=-2).logit_names
    long, short = (ula.trace(mamba(), PARIS, tokenizer=tokenizer(), substitute_above=above) for above in (4, 2048))
    assert long.explained_logit.prediction(-2) is None
    assert ula.explain(long, target=-2).logit_names == explained(target=-2).logit_names
    assert torch.equal(long.explained_logit.prediction(-2), short.explained_logit.prediction(-2))


def test_positions_among_tokens_that_the_model_adds_name_no_logits() -> None:
    # The layers read prompts of three tokens before the text, and only the tokens of the text have logits.
    sizes = dict(vocab_size=20, hidden_size=8, num_attention_heads=2, dim_head=4, dim_ff=8, num_hidden_layers=1)
    config = CpmAntConfig(**sizes, prompt_length=3)
    torch.manual_seed(0)
    made = ula.trace(CpmAntForCausalLM(config).eval(), torch.tensor([[3, 4, 5, 6]]), progress=False)
    assert made.layers[0].input.shape[1] > 4
    for target in (-1, 3):
        with pytest.raises(InputError, match="so a target does not name a row of logits"):
            ula.explain(made, method="contribution", target=target, progress=False)


@pytest.mark.parametrize(("logits", "chooses"), [(5, False), (8, True)])
def test_vectors_beside_which_a_model_adds_tokens_keep_logits_only_where_these_are_of_all(
    logits: int, chooses: bool
) -> None:
    """Five vectors of a text among eight tokens of the layers: positions are those of the eight."""
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    arguments = {"inputs_embeds": torch.zeros(1, 5, 8)}
    output = {"logits": torch.zeros(1, logits, 9)}
    explained = ExplainedLogit(output, arguments, (1, 8), lambda _: torch.tensor([3]), "model", frozenset())
    kept = explained.kept_at(LlamaForCausalLM(config), arguments, lambda: [torch.tensor([3])])
    assert ("logits_to_keep" in kept) == chooses
