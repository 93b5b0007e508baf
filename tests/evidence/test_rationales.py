"""Few-shot prompts with key words: their text, a prefix that is read once, the choice, and the tables."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import unilinattn as ula
from evidence import prompting, rationales, section
from evidence.claims import Results, outcomes, verdict
from evidence.prompting import CLASSES, Review
from evidence.rankings import DEFAULTS
from evidence.rationales import LAST, NONE, RANDOM
from evidence.truths import CAUSAL
from unilinattn import methods

Host = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def host() -> Host:
    splitter = pre_tokenizers.Whitespace()
    texts = [prompting.shown(each, ["a"]) for kind in ("examples", "items") for each in prompting.reviews(kind)]
    words = sorted({piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)})
    vocabulary = {word: at for at, word in enumerate([rationales.BEGIN, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=rationales.BEGIN))
    backend.pre_tokenizer = splitter
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2
    )
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        # At the initial scale all answers are one class.
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(30)
    return model, PreTrainedTokenizerFast(tokenizer_object=backend)


def test_reviews_are_pairs_of_both_classes_and_no_example_is_asked() -> None:
    examples, items = prompting.reviews("examples"), prompting.reviews("items")
    assert len(items) == 240
    for every in (examples, items):
        assert [review.label for review in every] == list(CLASSES) * (len(every) // 2)
    texts = [review.text for review in (*examples, *items)]
    assert len(set(texts)) == len(texts)
    assert not any(label in text.lower() for text in texts for label in CLASSES)


def test_words_have_the_scores_of_their_tokens() -> None:
    text = "It doesn't re-open."
    assert [text[start:end] for _, start, end in prompting.words_of(text)] == ["It", "doesn't", "re-open"]
    spans = [(0, 2), (2, 7), (7, 10), (10, 13), (13, 18), (18, 19)]
    scores = torch.tensor([1.0, 2, 3, 4, 5, 6])
    assert prompting.word_scores(text, scores, spans) == [("It", 1), ("doesn't", 5), ("re-open", 9)]


def test_top_words_are_the_highest_ones_each_once() -> None:
    assert prompting.top_words([("The", 3.0), ("soup", 2.0), ("the", 4.0), ("was", -1.0)], 2) == ["the", "soup"]


def test_an_example_names_its_words_only_if_there_are_some() -> None:
    review = Review("Good.", "positive")
    assert prompting.shown(review, []) == "Review: Good.\nSentiment: positive\n\n"
    assert prompting.shown(review, ["a", "b"]) == "Review: Good.\nSentiment: positive\nThe key words are: a, b\n\n"


def test_examples_of_a_prompt_are_different_and_as_many_of_each_class() -> None:
    examples = prompting.reviews("examples")
    draws = [prompting.demonstrations(8, seed) for seed in range(6)]
    for draw in draws:
        assert len(set(draw)) == 8
        assert sorted(examples[at].label for at in draw) == sorted(CLASSES * 4)
    assert len(set(map(tuple, draws))) == 6
    assert prompting.demonstrations(8, 0) == draws[0]


def test_answers_after_a_prefix_are_those_of_whole_prompts(host: Host) -> None:
    model, tokenizer = host
    prefix = prompting.encoded(tokenizer, prompting.shown(prompting.reviews("examples")[0], ["soup"]))
    questions = [
        prompting.encoded(tokenizer, prompting.question(each.text)) for each in prompting.reviews("items")[:30]
    ]
    logits = prompting.after_prefix(model, prefix, questions)
    for at, ids in enumerate(questions):
        with torch.no_grad():
            expected = model(torch.tensor([prefix + ids])).logits[0, -1]
        torch.testing.assert_close(logits[at], expected, rtol=1e-9, atol=1e-9)
    classes = [3, 5]
    assert prompting.answers(model, prefix, questions, classes) == logits[:, classes].argmax(1).tolist()


def test_words_are_ranked_by_the_logit_of_the_class_of_the_example(host: Host) -> None:
    model, tokenizer = host
    review = Review("Soup was very very good.", "negative")
    ranked = rationales.rankings(model, tokenizer, [review])
    assert list(ranked) == [method.label for method in rationales.METHODS] + [RANDOM, LAST]
    ids = [0, *prompting.encoded(tokenizer, prompting.question(review.text))]
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces[:3] == [rationales.BEGIN, "Review", ":"]
    target = prompting.encoded(tokenizer, "negative")[0]
    result = ula.explain(model, torch.tensor([ids]), method=methods.Logit(logit=target), target=-1, progress=False)
    expected = result.scores[0, 3:8].tolist()
    assert [word for word, _ in ranked["logit"][0]] == ["Soup", "was", "very", "very", "good"]
    assert [score for _, score in ranked["logit"][0]] == pytest.approx(expected, rel=1e-6)
    assert prompting.top_words(ranked[LAST][0], 3) == ["good", "very", "was"]
    again = rationales.rankings(model, tokenizer, [review, review])
    assert again[RANDOM][0] == ranked[RANDOM][0] != again[RANDOM][1]


def test_shares_of_right_answers_are_those_of_each_prompt(host: Host) -> None:
    model, tokenizer = host
    items, examples = prompting.reviews("items")[:6], prompting.reviews("examples")
    ranked = [[(word, 0.0) for word, _, _ in prompting.words_of(each.text)] for each in examples]
    shares = rationales.right(model, tokenizer, items, ranked, shots=4, words=2, seeds=(1, 2))
    ids = [prompting.encoded(tokenizer, label)[0] for label in CLASSES]
    for item, share in zip(items, shares, strict=True):
        hits = []
        for seed in (1, 2):
            shown = [
                prompting.shown(examples[at], prompting.top_words(ranked[at], 2))
                for at in prompting.demonstrations(4, seed)
            ]
            prompt = "".join(shown) + prompting.question(item.text)
            with torch.no_grad():
                logits = model(torch.tensor([[0, *prompting.encoded(tokenizer, prompt)]])).logits[0, -1, ids]
            hits.append(CLASSES[int(logits.argmax())] == item.label)
        assert share == sum(hits) / 2
    assert 0 < sum(shares) < 6


def test_the_choice_and_the_report_are_made_on_different_reviews(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[int, ...], tuple[str, ...]]] = []

    def right(
        model: Any, tokenizer: Any, items: Any, ranked: Any, *, shots: int, words: int, seeds: Any
    ) -> list[float]:
        asked.append((tuple(seeds), tuple(item.text for item in items)))
        # Four examples are better, and one word.
        return [0.5 + 0.1 * (shots == 4) + 0.1 * (ranked is not None and words == 1)] * len(items)

    monkeypatch.setattr(rationales, "right", right)
    items = prompting.reviews("items")[:40]
    tables, entries = rationales.measured(*host, items)
    assert (entries["shots"], entries["words"]) == (4, 1)
    assert len(entries["choice"]) == 2 + 2 * (len(rationales.METHODS) + 2)
    choosing = {texts for seeds, texts in asked if seeds == rationales.CHOOSING}
    reporting = {texts for seeds, texts in asked if seeds == rationales.REPORTING}
    assert len(choosing) == len(reporting) == 1
    assert not set(*choosing) & set(*reporting)
    assert set(*choosing) | set(*reporting) == {item.text for item in items}
    assert len(tables[rationales.ACCURACY]) == 20 * (len(rationales.METHODS) + 3)
    gaps = [row["value"] for row in tables[rationales.GAPS].select(method="logit", metric=f"less {NONE}")]
    assert gaps == pytest.approx([0.1] * 20)


def numbers(**shifts: float) -> tuple[dict[str, str], str]:
    """Return the verdicts and the remark for accuracies that exceed those of the other kinds by a shift."""
    generator = torch.Generator().manual_seed(0)
    kinds = [NONE, *(method.label for method in rationales.METHODS), RANDOM, LAST]
    accuracies = {
        kind: (0.6 + 0.02 * torch.randn(60, generator=generator) + shifts.get(kind, 0.0)).tolist() for kind in kinds
    }
    tables = rationales.tables(accuracies)
    claims = rationales.RATIONALES.claims()
    rows = outcomes(claims, Results({name: {section.SEED: table} for name, table in tables.items()}))
    verdicts = {
        claim.text: verdict(claim, [row for row in rows if row["claim"] == at]) for at, claim in enumerate(claims)
    }
    choice = [
        {"method": NONE, "shots": 4, "words": 0, "accuracy": 0.6},
        *({"method": RANDOM, "shots": 4, "words": count, "accuracy": 0.1 * count} for count in rationales.WORDS),
    ]
    record = {"numbers": section.means(tables), "choice": choice, "shots": 4, "words": 3}
    return verdicts, rationales.RATIONALES.remark(record)


def test_verdicts_and_the_remark_follow_the_accuracies() -> None:
    default = rationales.DEFAULT.label
    verdicts, remark = numbers(**{default: 0.2})
    assert verdicts["Key words by the default raise the accuracy"] == "holds"
    assert verdicts["Key words by every method raise the accuracy"] != "holds"
    assert f"Above no rationale: {default} (" in remark and f"More than random words: {default}." in remark
    assert "0.600 with 4 examples" in remark and "0.300 with 3 key words" in remark
    verdicts, remark = numbers(attribution=-0.2)
    assert verdicts["Key words by attribution raise the accuracy"] == "contradicted"
    assert "Below no rationale: attribution (" in remark and "no method do better than random words" in remark


def test_the_default_is_that_of_causal_attention() -> None:
    assert rationales.METHODS[0].label == DEFAULTS[CAUSAL]


def test_the_remark_says_that_nothing_differs() -> None:
    every = [0.6, 0.4] * 30
    kinds = [NONE, *(method.label for method in rationales.METHODS), RANDOM, LAST]
    tables = rationales.tables(dict.fromkeys(kinds, every))
    record = {
        "numbers": section.means(tables),
        "choice": [{"method": RANDOM, "shots": 4, "words": count, "accuracy": 0.5} for count in rationales.WORDS],
        "shots": 4,
        "words": 1,
    }
    assert (
        "No kind of rationale differs significantly from none: all 6 intervals contain zero."
        in rationales.RATIONALES.remark(record)
    )
