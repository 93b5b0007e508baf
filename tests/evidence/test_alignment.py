"""The synthetic translation against a translator of plain Python, its gold links, and the verdicts."""

import pytest
import torch

from evidence import activations, bootstrap
from evidence.alignment import (
    BY_LAYER,
    BY_WORD,
    DICTIONARY,
    END_TO_END,
    MODELS,
    STUDY,
    diagonal,
    entropy,
    samples,
    single_words,
)
from evidence.baselines import CONTROLS, control
from evidence.pictures import BASELINES
from evidence.translation import END, LENGTH, NAMES, SEPARATOR, VOCABULARY, WORDS, Sentences, sentences
from tests.evidence.tables import made, without
from tests.evidence.tables import verdicts as of_claims
from unilinattn.errors import InputError
from unilinattn.evaluation import Sample, alignment_error_rate, row_scores
from unilinattn.examples.tasks import NO_ANSWER
from unilinattn.methods.default import CAUSAL

Links = list[tuple[int, set[int], set[int]]]
"""Target words, each with its sure and its only possible source positions."""


def translate(source: list[int]) -> Links:
    """Translate word by word: 18 nouns, 6 modifiers, 5 verbs and 3 particles; 18 stems, 2 articles, 12 and 20 forms."""
    links: Links = []
    at = 0
    while at < len(source):
        word = source[at]
        modifier = None
        if 18 <= word < 24:
            modifier, at = at, at + 1
            word = source[at]
        if word < 18:
            if word < 13:
                links.append((33 + 18 + word % 2, {at}, set()))
            links.append((33 + word, {at}, set()))
            if modifier is not None:
                links.append((53 + 2 * (source[modifier] - 18) + word % 2, {modifier}, {at}))
        elif at + 1 < len(source) and source[at + 1] >= 29:
            links.append((65 + 4 * (word - 24) + 1 + source[at + 1] - 29, {at, at + 1}, set()))
            at += 1
        else:
            links.append((65 + 4 * (word - 24), {at}, set()))
        at += 1
    return links


def require_gold(data: Sentences) -> None:
    """Compare sentences with the translator's."""
    for ids, labels, sure, possible, length in zip(
        data.input_ids.tolist(), data.labels.tolist(), data.sure, data.possible, data.lengths.tolist(), strict=True
    ):
        links = translate(ids[:WORDS])
        words = [word for word, _, _ in links]
        padding = LENGTH - WORDS - 1 - len(words)
        assert ids[WORDS:] == [SEPARATOR, *words, *[END] * padding]
        assert length == WORDS + 1 + len(words)
        assert labels == [NO_ANSWER] * WORDS + [*words, END] + [NO_ANSWER] * padding
        queries = range(WORDS, WORDS + len(links))
        assert {tuple(link) for link in sure.nonzero().tolist()} == {
            (query, key) for query, (_, keys, _) in zip(queries, links, strict=True) for key in keys
        }
        assert {tuple(link) for link in (possible & ~sure).nonzero().tolist()} == {
            (query, key) for query, (_, _, keys) in zip(queries, links, strict=True) for key in keys
        }


def test_sentences_are_translated_and_aligned_as_by_the_translator() -> None:
    data = sentences(300, 3)
    require_gold(data)
    assert len(NAMES) == VOCABULARY
    assert data.input_ids[:, :WORDS].unique().tolist() == list(range(32)), "every word of the lexicon occurs"
    shifted = Sentences(
        data.input_ids, data.labels, data.sure.roll(1, 1), data.possible.roll(1, 1), data.lengths
    )  # fmt: skip
    with pytest.raises(AssertionError):
        require_gold(shifted)


def test_sentences_depend_on_the_seed_only() -> None:
    one, same, other = sentences(5, 7), sentences(5, 7), sentences(5, 8)
    assert torch.equal(one.input_ids, same.input_ids)
    assert torch.equal(one.possible, same.possible)
    assert not torch.equal(one.input_ids, other.input_ids)
    with pytest.raises(InputError, match="at least one sentence"):
        sentences(0, 7)


def test_the_error_rate_is_not_one_minus_recall() -> None:
    found = samples(20, 5)
    pieces = [
        (one.relevant[rows], one.possible[rows], one.valid[rows]) for one in found for rows in [one.valid.any(-1)]
    ]
    width = max(valid.shape[1] for _, _, valid in pieces)
    sure, possible, valid = (
        torch.cat([torch.nn.functional.pad(part[at], (0, width - part[at].shape[1])) for part in pieces])
        for at in range(3)
    )
    # One sure link of two for a verb with a particle, and a possible link for a modifier.
    scores = sure.double() + 2 * (possible & ~sure)
    rate = alignment_error_rate(scores, sure, possible, valid)
    recall = row_scores(scores, sure, valid).recall_at_k
    assert 0.01 < rate < abs(1 - recall) - 0.01


def test_the_diagonal_follows_the_target_words() -> None:
    sample = samples(1, 0)[0]
    words = sample.inputs.shape[1] - WORDS - 1
    best = diagonal(None, sample)[WORDS : WORDS + words].argmax(-1)
    expected = [min(range(WORDS), key=lambda key: abs((key + 0.5) / WORDS - (at + 0.5) / words)) for at in range(words)]
    assert best.tolist() == expected
    row = Sample(inputs=sample.inputs, target=WORDS + 2)
    assert torch.equal(diagonal(None, row), diagonal(None, sample)[WORDS + 2])


def test_the_words_of_sentences_take_turns() -> None:
    sentences = samples(12, 0)
    words = single_words(sentences)
    assert len({word.name for word in words}) == len(words) == 12
    asked = [sentence.relevant.any(-1).nonzero().flatten().tolist() for sentence in sentences]
    assert [word.target for word in words] == [targets[at % len(targets)] for at, targets in enumerate(asked)]
    assert all(torch.equal(one.relevant, all_.relevant[one.target]) for one, all_ in zip(words, sentences, strict=True))


def test_entropy_is_in_bits_of_the_source_words() -> None:
    class One:
        valid = torch.arange(12)[None] < torch.tensor([[WORDS], [0]])

    for row, bits in ((torch.ones(12), 3.0), (torch.arange(12) == 2, 0.0), (torch.arange(12) < 2, 1.0)):
        One.scores = torch.stack([row.double() * -5, torch.rand(12).double()])
        assert entropy(One()) == pytest.approx(bits, abs=1e-12)


TABLES = {
    "sentences": (
        [*MODELS, *(control(model, name) for model in MODELS for name in CONTROLS)],
        [*BASELINES, DICTIONARY, *BY_LAYER, *END_TO_END],
        ("aer", "ap", "entropy"),
    ),
    "words": (MODELS, [*BASELINES, DICTIONARY, "latim l2", "logit", *BY_WORD], ("aer", "ap", "entropy")),
}
ORDER = [*BASELINES, DICTIONARY, "input_x_gradient", "gradient", "contribution", "attribution", "raw", "rollout",
         "alti_logit", "lrp", "attn_lrp", CAUSAL.label, "alti rollout", "alti", "latim l1", "latim l2",
         "logit"]  # fmt: skip


def verdicts(order: list[str]) -> dict[str, str]:
    """Return the verdicts if later methods of the order are better."""

    def value(method: str, metric: str) -> float:
        place = order.index(method) / len(order)
        return place if metric == "ap" else 1 - place

    results = made(TABLES, value)
    return of_claims(without(STUDY.claims(results), activations.TABLE), results)


def test_verdicts_follow_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 50)
    given, turned = verdicts(ORDER), verdicts(ORDER[::-1])
    assert given.keys() == turned.keys()
    tested = [text for text in given if given[text] != "not tested" and "trained model" not in text]
    tested.remove(
        "`attn_lrp`, which counts what tokens decide, finds no less than `logit`, which counts what they send here"
    )
    assert len(tested) > 15
    assert all(given[text] == "holds" for text in tested if "LaTIM" in text)
    assert all(turned[text] == "contradicted" for text in tested)
    swapped = ["raw" if name == "alti" else "alti" if name == "raw" else name for name in ORDER]
    claim = "`alti` finds more than `raw` on every architecture here"
    assert (given[claim], verdicts(swapped)[claim]) == ("holds", "contradicted")
