"""The text of installed packages, its split, its tokenizer, and the baselines."""

import math
from collections import Counter

import numpy as np
import pytest

from evidence import text_data
from evidence.text_baselines import DISCOUNT, baselines
from evidence.text_data import END, Document, encode, train_tokenizer
from evidence.train_text import BATCH, LENGTH, WARM_UP, batches, schedule
from unilinattn.errors import CheckpointError

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A matrix is a table: naïve, tabs\tand\nlines.",
)


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    packages = {"click": text_data.PACKAGES["click"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_data, "PACKAGES", packages)
        return text_data.documents()


def test_no_paragraph_of_the_text_occurs_twice(corpus: list[Document]) -> None:
    paragraphs = Counter(
        " ".join(paragraph.split())
        for document in corpus
        for text in document.texts
        for paragraph in text.split("\n\n")[1:]
        if len(paragraph) > 60
    )
    assert len(paragraphs) > 1000
    assert max(paragraphs.values()) == 1


def test_the_text_is_prose_of_packages_and_of_the_language(corpus: list[Document]) -> None:
    sources = [document.source for document in corpus]
    assert len(set(sources)) == len(sources)
    assert {source.split("/")[0] for source in sources} == {"click", "python"}
    texts = [text for document in corpus for text in document.texts]
    assert any(text.startswith("ArgumentParser\n\nObject for parsing command line strings") for text in texts)
    assert not any(">>>" in text for text in texts)
    assert all(len(text) > text_data.SHORTEST for text in texts)


def test_a_document_is_in_one_part_by_its_source(corpus: list[Document]) -> None:
    held_out = [document for document in corpus if document.held_out]
    assert 0 < len(held_out) < 0.06 * len(corpus)
    assert all(Document(document.source, ()).held_out for document in held_out)


def test_a_package_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_data, "PACKAGES", {"no_such_package": "MIT"})
    with pytest.raises(CheckpointError, match="no_such_package is not installed"):
        text_data.documents()


def test_a_tokenizer_keeps_every_byte_and_marks_the_beginnings() -> None:
    tokenizer = train_tokenizer(TEXTS * 2, 270)
    assert tokenizer.get_vocab_size() == 270
    ids = encode(tokenizer, [Document("a", TEXTS[:1]), Document("b", TEXTS[1:])])
    assert (ids == tokenizer.token_to_id(END)).nonzero()[0].tolist() == [0, len(tokenizer.encode(TEXTS[0]).ids) + 1]
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == "".join(END + text for text in TEXTS)


def test_an_epoch_has_every_piece_once_and_continues_from_a_step() -> None:
    tokens = np.arange(LENGTH * BATCH * 5 + LENGTH, dtype=np.uint16)
    stream = batches(tokens, 0)
    epoch = [next(stream) for _ in range(5)]
    starts = sorted(int(start) for batch in epoch for start in batch[:, 0])
    assert set(np.diff(starts).tolist()) == {LENGTH}
    assert all(batch.shape == (BATCH, LENGTH) and bool((batch.diff() == 1).all()) for batch in epoch)
    assert next(batches(tokens, 3)).equal(epoch[3])
    assert not next(stream).equal(epoch[0])


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    assert schedule(0.0) == 0.0
    assert schedule(WARM_UP) > 0.99
    assert schedule(0.5) == pytest.approx(0.5)
    assert schedule(1.0) == pytest.approx(0.0)


def test_the_baselines_are_those_of_counts() -> None:
    random = np.random.default_rng(0)
    training, held_out = random.integers(4, size=200), random.integers(4, size=30)
    # One token of the held-out part is not in the training.
    held_out[10] = 4
    computed = baselines(training, held_out, 5, 1.0)
    single = Counter(training.tolist())
    counts = {order: Counter(zip(*(training[lag:].tolist() for lag in range(order)), strict=False)) for order in (2, 3)}

    def probability(gram: tuple[int, ...]) -> float:
        if len(gram) == 1:
            return (single[gram[0]] + 1) / (len(training) + 5)
        after = [count for other, count in counts[len(gram)].items() if other[:-1] == gram[:-1]]
        if not after:
            return probability(gram[1:])
        count = max(counts[len(gram)][gram] - DISCOUNT, 0)
        return (count + DISCOUNT * len(after) * probability(gram[1:])) / sum(after)

    for name, order in (("unigram", 1), ("trigram", 3)):
        grams = [tuple(held_out[end - order + 1 : end + 1].tolist()) for end in range(2, 30)]
        loss = -sum(math.log(probability(gram)) for gram in grams) / len(grams)
        assert computed[f"{name}_perplexity"] == pytest.approx(math.exp(loss), rel=1e-10)
        assert computed[f"{name}_bits_per_byte"] == pytest.approx(loss, rel=1e-10)
    assert sum(probability((0, 1, token)) for token in range(5)) == pytest.approx(1, rel=1e-10)
