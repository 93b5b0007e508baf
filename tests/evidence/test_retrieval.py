"""Passkeys and frequent words against look-ups of plain Python, metrics of wrong answers, and the verdicts."""

from collections import Counter

import pytest
import torch

import unilinattn as ula
from evidence import bootstrap, retrieval_length
from evidence.answers import (
    OF_ANSWERS,
    SCORED_LENGTHS,
    Answer,
    first_half,
    of_all_lengths,
    one_of_each_context,
)
from evidence.baselines import CONTROLS, control
from evidence.questions import (
    ASK,
    LENGTHS,
    NAME,
    NAMES,
    PAIRS,
    PASSKEY_LENGTHS,
    VOCABULARY,
    Questions,
    frequent_words,
    passkeys,
)
from evidence.retrieval import SEED_STEP, STUDY
from evidence.retrieval_claims import BASELINES, METHODS, MODELS, OF_WORDS, RANKS
from evidence.study import SEEDS
from evidence.training import scored_seed, selection_seed
from tests.evidence.tables import made, without
from tests.evidence.tables import verdicts as of_claims
from unilinattn.errors import InputError, OptionError
from unilinattn.evaluation import Case
from unilinattn.examples import load
from unilinattn.examples.tasks import NO_ANSWER
from unilinattn.results.attribution import Attribution


def looked_up(context: list[int]) -> dict[int, tuple[int, int]]:
    """Return the value of each key of a context, and its position; ids below 16 are noise, those below 32 keys."""
    found: dict[int, tuple[int, int]] = {}
    for at, token in enumerate(context):
        if 16 <= token < 32:
            assert 32 <= context[at + 1] < 48
            assert token not in found
            found[token] = (context[at + 1], at + 1)
    assert len({value for value, _ in found.values()}) == len(found)
    assert 2 * len(found) == sum(token >= 16 for token in context)
    return found


def require_passkeys(drawn: Questions, questions: int) -> list[tuple[int, int]]:
    """Compare the answers with those looked up; return the number of pairs, and the rank of the last asked one."""
    sizes = []
    for ids, labels, relevant in zip(drawn.input_ids.tolist(), drawn.labels.tolist(), drawn.relevant, strict=True):
        pairs = looked_up(ids[: drawn.context])
        expected = {}
        for number in range(questions):
            start = drawn.context + 3 * number
            assert ids[start] == ASK
            value, place = pairs[ids[start + 1]]
            expected[start + 1] = value, place
            assert number == questions - 1 or ids[start + 2] == value
        assert len(ids) == drawn.context + 3 * questions - 1
        assert {at: label for at, label in enumerate(labels) if label != NO_ANSWER} == {
            at: value for at, (value, _) in expected.items()
        }
        assert relevant.nonzero().tolist() == [[at, place] for at, (_, place) in expected.items()]
        sizes.append((len(pairs), sorted(place for _, place in pairs.values()).index(place)))
    return sizes


@pytest.mark.parametrize("questions", [1, 3])
def test_passkeys_are_those_looked_up(questions: int) -> None:
    sizes = require_passkeys(passkeys(200, 4, questions=questions), questions)
    assert {size for size, _ in sizes} == set(PAIRS)
    drawn = passkeys(3, 4, questions=questions)
    turned = Questions(drawn.input_ids, drawn.labels, drawn.relevant.roll(1, 2), drawn.context)
    with pytest.raises(AssertionError):
        require_passkeys(turned, questions)


@pytest.mark.parametrize("pairs", PAIRS)
def test_the_asked_pair_is_the_first_or_a_later_one(pairs: int) -> None:
    first = require_passkeys(passkeys(40, 2, length=PASSKEY_LENGTHS[0], pairs=pairs, first=True), 1)
    assert set(first) == {(pairs, 0)}
    if pairs == 1:
        with pytest.raises(OptionError, match="pairs >= 2"):
            passkeys(40, 2, pairs=1, first=False)
    else:
        later = require_passkeys(passkeys(40, 2, length=LENGTHS[-1], pairs=pairs, first=False), 1)
        assert {rank for _, rank in later} == set(range(1, pairs))


@pytest.mark.parametrize("length", [25, 26, 48, 71, 96])
def test_frequent_words_are_those_counted(length: int) -> None:
    drawn = frequent_words(40, 6, length=length)
    for ids, labels, relevant in zip(drawn.input_ids.tolist(), drawn.labels.tolist(), drawn.relevant, strict=True):
        passage = ids[:length]
        counts = Counter(passage).most_common()
        assert [count for _, count in counts[:3]] == sorted({count for _, count in counts}, reverse=True)[:3]
        named = [word for word, _ in counts[:3]]
        assert ids[length:] == [NAME, *named[:2]]
        assert labels == [NO_ANSWER] * length + named
        expected = [
            [length + at, key] for at, word in enumerate(named) for key in range(length) if passage[key] == word
        ]
        assert relevant.nonzero().tolist() == expected


@pytest.mark.parametrize("draw", [passkeys, frequent_words])
def test_contexts_depend_on_the_seed_only(draw) -> None:
    one, same, other = draw(5, 7), draw(5, 7), draw(5, 8)
    assert torch.equal(one.input_ids, same.input_ids)
    assert torch.equal(one.relevant, same.relevant)
    assert one.input_ids.tolist() != other.input_ids.tolist()
    assert {draw(1, seed).context for seed in range(600)} == set(LENGTHS)
    assert len(NAMES) == VOCABULARY
    with pytest.raises(InputError, match="at least one context"):
        draw(0, 7)
    with pytest.raises(OptionError, match="16 to 1024" if draw is passkeys else "25 to 96"):
        draw(1, 7, length=15)


def test_pairs_are_checked() -> None:
    with pytest.raises(OptionError, match="accepted: 1, 2, 4, 8"):
        passkeys(1, 0, pairs=3)


def test_metrics_of_a_wrong_answer() -> None:
    host = load("induction", "mamba")
    trace = ula.trace(host, torch.zeros(1, 8, dtype=torch.long), progress=False)
    # The answer 40 stands at 1, the predicted 41 at 3.
    one = Answer(torch.tensor([[0, 40, 2, 41, 3, ASK, 16, 40]]), 5, answer=40, predicted=41, name="5-0")
    assert not one.right

    def case(scores: list[float]) -> Case:
        result = Attribution(scores=torch.tensor([scores]), dims=("batch", "key"), method="made", mask=None, model="")
        return Case(host, one.sample, trace, result)

    def measured(case: Case, *names: str) -> tuple[float, ...]:
        return tuple(OF_ANSWERS[name](case).value for name in names)

    reason = case([0.1, 0.2, 0.0, 0.9, 0.3, 5, 5, 5])
    # The answer is third of the candidates, which are the tokens of the context.
    assert (reason.ranking.hit_at_1, *measured(reason, "answer_hit", "either_hit")) == (1, 0, 1)
    assert measured(reason, "answer_ap", "lead") == pytest.approx((1 / 3, 2 / 3))
    other = case([0.1, 0.9, 0.0, 0.2, 0.3, 5, 5, 5])
    assert (other.ranking.hit_at_1, *measured(other, "answer_hit", "either_hit")) == (0, 1, 1)
    assert measured(other, "lead") == pytest.approx((-2 / 3,))
    neither = case([0.9, 0.5, 0.0, 0.2, 0.3, 5, 5, 5])
    assert measured(neither, "either_hit") == (0,)
    word = Answer(torch.tensor([[7, 8, 7, 7, 8, 7, 7, NAME]]), 7, answer=7, predicted=7, name="7-0")
    result = Attribution(
        scores=torch.tensor([[3.0, 9, -1, 5, 9, 1, 0, 9]]), dims=("batch", "key"), method="made", mask=None, model=""
    )
    # Five occurrences with 3, -1, 5, 1, 0: the one in the middle counts in neither half.
    assert first_half(Case(host, word.sample, trace, result)) == pytest.approx(4 / 5)


def test_each_passage_has_words_of_another_seed_and_one_question() -> None:
    host = STUDY.models["transformer_words"].build().eval()
    shared, apart = (of_all_lengths(host, frequent_words, 6, 0, step=step) for step in (0, SEED_STEP))
    for every, count in ((shared, 6), (apart, 6 * len(SCORED_LENGTHS))):
        words: dict[tuple[int, int], tuple[int, ...]] = {}
        for answer in every:
            words[answer.of] = (*words.get(answer.of, ()), answer.answer)
        # Contexts that are drawn from one seed have the same three words at every length.
        assert len(words) == 6 * len(SCORED_LENGTHS)
        assert len(set(words.values())) == count
    alone = one_of_each_context(apart)
    assert len({answer.of for answer in alone}) == len(alone) == 6 * len(SCORED_LENGTHS)
    ranks = Counter(answer.ids.shape[1] - answer.context - 1 for answer in alone)
    assert ranks == {rank: 2 * len(SCORED_LENGTHS) for rank in range(len(RANKS))}


def test_no_two_sets_of_contexts_are_drawn_from_one_seed() -> None:
    seeds = [
        first(seed) + SEED_STEP * length
        for first in (scored_seed, selection_seed)
        for seed in SEEDS
        for length in range(len(SCORED_LENGTHS))
    ]
    assert len(set(seeds)) == len(seeds)


@torch.no_grad()
def test_answers_in_long_contexts_are_those_of_the_host() -> None:
    host = STUDY.models["mamba2"].build().eval()
    table = retrieval_length.measure({"mamba2": lambda: host}, 1, 3, SEED_STEP)
    asked = passkeys(3, scored_seed(1) + 4 * SEED_STEP, length=1024, pairs=4)
    right = host(asked.input_ids).logits.argmax(-1)[:, -1] == asked.labels[:, -1]
    rows = table.select(method="1024 tokens", metric="4 pairs")
    assert [row["value"] for row in rows] == right.double().tolist()
    assert len(table) == 3 * len(retrieval_length.LENGTHS) * len(retrieval_length.PAIRS)


def test_verdicts_on_long_contexts_follow_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 50)

    def of(one: float, four: float, short: float) -> set[str]:
        """Return the verdicts if 1 and 4 pairs have these numbers in long contexts, and short contexts another."""

        def value(method: str, metric: str) -> float:
            return {"1 pair": one, "2 pairs": four, "4 pairs": four}[metric] if method == "1024 tokens" else short

        rows = [f"{length} tokens" for length in retrieval_length.LENGTHS]
        results = made({retrieval_length.TABLE: (MODELS, rows, retrieval_length.PAIRS)}, value)
        return set(of_claims(retrieval_length.claims(MODELS), results).values())

    assert of(0.95, 0.5, 0.98) == {"holds"}
    assert of(0.5, 0.6, 0.4) == {"contradicted"}


ACCURACIES = [
    f"{count} pair{'s' * (count > 1)}{place}"
    for count in PAIRS
    for place in ("", ", first", ", later", ", 48 tokens", ", 96 tokens")
]
TABLES = {
    "accuracy": (MODELS, [*ACCURACIES, *RANKS], ("accuracy",)),
    "passkeys": (
        [*MODELS, *(control(model, name) for model in MODELS for name in CONTROLS)],
        [*BASELINES, *METHODS],
        ("ap",),
    ),
    "words": (MODELS, [*BASELINES, *OF_WORDS], ("ap", "first_half")),
    "wrong passkeys": (MODELS, [*METHODS], ("either_hit", "lead", "hit_at_1")),
    "wrong words": (MODELS, [*OF_WORDS], ("lead",)),
}
ORDER = ["96 tokens", "later", "8 pairs", "third word", "1 pair", "first", "48 tokens", *BASELINES, "input_x_gradient",
         "attribution", "raw", "rollout", "alti_logit", "lrp", "alti", "latim l2", "logit"]  # fmt: skip


def verdicts(order: list[str], tables: dict = TABLES) -> dict[str, str]:
    """Return the verdicts if rows with later labels of the order have larger numbers."""

    def value(method: str, metric: str) -> float:
        within = [at for at, label in enumerate(order) if label in method]
        place = order.index(method) if method in order else max(within, default=0)
        return place / len(order) * (2 if metric in ("first_half", "hit_at_1") else 1) - (metric == "lead") / 2

    results = made(tables, value)
    return of_claims(without(STUDY.claims(results), retrieval_length.TABLE), results)


def test_verdicts_follow_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 50)
    given, turned = verdicts(ORDER), verdicts(ORDER[::-1])
    assert given.keys() == turned.keys()
    for claim in (
        "More pairs lower the recall of Mamba-2 LaTIM 4.3, Table 5",
        "Longer contexts lower the recall of Mamba-2 LaTIM 4.3, Table 5",
        "Recall is better if the asked pair is the first LaTIM D.3, Table 6",
        "`logit` is the best method of all layers here",
        "`logit` finds passkeys better than every baseline here",
        "The best key of `logit` holds the predicted value in most wrong answers here",
        "The attention on a repeated word falls from its first occurrences to its last LaTIM 4.3 and D.3, Fig. 9",
    ):
        assert (given[claim], turned[claim]) == ("holds", "contradicted"), claim
    swapped = [{"raw": "alti", "alti": "raw"}.get(label, label) for label in ORDER]
    claim = "`alti` finds more than `raw` on every architecture here"
    assert (given[claim], verdicts(swapped)[claim]) == ("holds", "contradicted")


def test_claims_on_errors_are_not_tested_without_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 50)
    without = {name: parts for name, parts in TABLES.items() if "wrong" not in name}
    claim = "If a wrong word is named, LaTIM (l2) does not stand on the right word LaTIM 4.3, Fig. 3"
    assert verdicts(ORDER)[claim] != "not tested"
    assert verdicts(ORDER, without)[claim] == "not tested"
