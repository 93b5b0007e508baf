"""Problems against plain solvers that read the tokens only, the truths of their tokens, and the verdicts."""

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import torch

import unilinattn as ula
from evidence import bootstrap
from evidence.problems import (
    ASK,
    CHAINS,
    HEAD,
    KINDS,
    LENGTHS,
    LINK,
    LOOKUP_VOCABULARY,
    MARK,
    MARKED,
    MODULUS,
    SIZE,
    SUM_LENGTH,
    VALUE,
    Problems,
    lookups,
    sums,
)
from evidence.reasoning import STUDY, asked_token, right_copy, same_token, sample
from evidence.reasoning_claims import BASELINES, EXPLAINED, METHODS, OF_DEFAULT, TASKS, WITH_COPIES
from evidence.replaced import effects
from tests.evidence.tables import made
from tests.evidence.tables import verdicts as of_claims
from unilinattn.errors import InputError, OptionError
from unilinattn.evaluation import Case
from unilinattn.examples import load
from unilinattn.examples.tasks import NO_ANSWER
from unilinattn.examples.tasks import TASKS as SHIPPED
from unilinattn.results.attribution import Attribution


def answer_of_lookup(context: list[int], question: list[int]) -> int | None:
    """Answer a question on chains, None if the context does not tell (ids as asserted below)."""
    pairs: dict[int, int] = {}
    for one, after in pairwise(context):
        if (8 <= one < 20 <= after < 32) or (20 <= one < 32 <= after < 44):
            assert one not in pairs
            pairs[one] = after
    kind, token = question
    end = pairs.get(token)
    if kind == 45 and end is not None:
        end = pairs.get(end)
    return None if end is None else 75 - end if kind == 46 else end


def answer_of_sum(context: list[int], question: list[int]) -> int:
    """Add the digits after marks."""
    assert question == [8]
    return sum(after for one, after in pairwise(context) if one == 7 and after < 7) % 7


Solver = Callable[[list[int], list[int]], int | None]


def require_truths(drawn: Problems, solve: Solver) -> None:
    """Solve the last question of each problem, and again after every allowed replacement of every token."""
    assert not drawn.relevant[:, :, drawn.context :].any()
    assert drawn.replacements.shape[:2] == (len(drawn.input_ids), drawn.context)
    query = drawn.input_ids.shape[1] - 1
    asks = 1 if solve is answer_of_sum else 2
    for ids, labels, relevant, replacements in zip(
        drawn.input_ids.tolist(), drawn.labels.tolist(), drawn.relevant, drawn.replacements, strict=True
    ):
        context, question = ids[: drawn.context], ids[-asks:]
        assert solve(context, question) == labels[query]
        for at in range(drawn.context):
            tokens = replacements[at].nonzero().flatten().tolist()
            assert len(tokens) >= 5 and ids[at] not in tokens
            changed = {solve([*context[:at], token, *context[at + 1 :]], question) != labels[query] for token in tokens}
            assert changed == {bool(relevant[query, at])}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [LENGTHS[0], LENGTHS[-1]])
def test_exactly_the_relevant_tokens_of_a_lookup_change_its_answer(kind: str, length: int) -> None:
    drawn = lookups(12, 5, kind=kind, length=length)
    require_truths(drawn, answer_of_lookup)
    assert set(drawn.relevant[:, -1].sum(-1).tolist()) == {4 if kind == "two hops" else 2}
    wrong = Problems(drawn.input_ids, drawn.labels, drawn.relevant.roll(1, 2), drawn.replacements, drawn.context)
    with pytest.raises(AssertionError):
        require_truths(wrong, answer_of_lookup)


def test_exactly_the_marks_and_the_marked_digits_change_a_sum() -> None:
    drawn = sums(20, 5)
    require_truths(drawn, answer_of_sum)
    assert drawn.relevant[:, -1].sum(-1).tolist() == [2 * MARKED] * 20
    assert ((drawn.input_ids == MARK).sum(1) == MARKED).all()
    assert drawn.context == SUM_LENGTH and MODULUS == MARK
    # The answer is often no token of the context that matters, or none at all.
    copies = (drawn.input_ids == drawn.labels[:, -1:]) & drawn.relevant[:, -1]
    assert not copies.any(1).all()


def test_a_shared_value_stands_twice_and_no_complement_is_the_stored_value() -> None:
    drawn = lookups(50, 3, kind="value")
    context = drawn.input_ids[:, : drawn.context]
    assert ((context == drawn.labels[:, -1:]).sum(1) == 2).all()
    turned = lookups(200, 3, kind="complement")
    stored = turned.input_ids[turned.relevant[:, -1]].view(200, 2)[:, 1]
    assert (turned.labels[:, -1] != stored).all()
    assert set(turned.labels[:, -1].tolist()) == set(range(VALUE, ASK))


def test_the_questions_of_the_training_are_answered() -> None:
    drawn = lookups(60, 9, sharing=1, questions=4)
    kinds = set()
    for ids, labels in zip(drawn.input_ids.tolist(), drawn.labels.tolist(), strict=True):
        context = ids[: drawn.context]
        values = [token for token in context if VALUE <= token < ASK]
        assert len(set(values)) == len(values) == CHAINS
        for number in range(4):
            at = drawn.context + 3 * number + 1
            kinds.add((ids[at - 1], ids[at] < LINK))
            assert labels[at] == answer_of_lookup(context, ids[at - 1 : at + 1])
            assert number == 3 or ids[at + 1] == labels[at]
        assert sum(label != NO_ANSWER for label in labels) == 4
    assert kinds == {(ASK, False), (ASK, True), (ASK + 1, True), (ASK + 2, False)}
    assert (HEAD, LINK, VALUE, ASK, LOOKUP_VOCABULARY) == (8, 20, 32, 44, 47) and SIZE == 12


def test_problems_depend_on_the_seed_only() -> None:
    for draw in (lookups, sums):
        one, same, other = draw(5, 7), draw(5, 7), draw(5, 8)
        assert torch.equal(one.input_ids, same.input_ids)
        assert torch.equal(one.replacements, same.replacements)
        assert one.input_ids.tolist() != other.input_ids.tolist()
        with pytest.raises(InputError, match="at least one context"):
            draw(0, 7)
    with pytest.raises(OptionError, match="16 to 32"):
        lookups(1, 0, length=15)
    with pytest.raises(OptionError, match="two hops"):
        lookups(1, 0, kind="two hop")
    with pytest.raises(OptionError, match="divisor of the 4 chains"):
        lookups(1, 0, sharing=3)


def test_effects_are_falls_of_the_answers_logit() -> None:
    host = load("induction", "transformer")
    ids = SHIPPED["induction"].sample(1, 4).input_ids[:, :10]
    allowed = torch.zeros(7, 16, dtype=torch.bool)
    allowed[:, 3] = allowed[:, 9] = True
    measured = effects(host, ids, 6, allowed, draws=2, seed=0)
    assert measured.shape == (10,) and (measured[7:] == 0).all()
    with torch.no_grad():
        before = host(ids).logits[0, -1, 6]
        for at in (0, 6):
            after = []
            for token in (3, 9):
                changed = ids.clone()
                changed[0, at] = token
                after.append(host(changed).logits[0, -1, 6])
            assert float(measured[at]) == pytest.approx(float(before - sum(after) / 2), abs=1e-4)


def test_rows_without_a_model_and_the_asked_copy() -> None:
    drawn = lookups(1, 3, kind="value")
    one = sample(drawn, 0)
    answer, asked = int(drawn.labels[0, -1]), int(drawn.input_ids[0, -1])
    copies = [at for at, token in enumerate(drawn.input_ids[0].tolist()) if token == answer]
    host = load("induction", "mamba")
    trace = ula.trace(host, torch.zeros(1, 8, dtype=torch.long), progress=False)
    assert one.relevant is not None
    assert same_token(one).nonzero().flatten().tolist() == copies
    marked = asked_token(one).nonzero().flatten().tolist()
    places = [at for at, token in enumerate(drawn.input_ids[0].tolist()) if token == asked]
    length = drawn.input_ids.shape[1]
    assert set(marked) == {*places, *((at + 1) % length for at in places)}
    right = int((one.relevant & (drawn.input_ids[0] == answer)).nonzero())

    def score(best: list[int]) -> float:
        scores = torch.zeros(1, length)
        scores[0, best] = 1.0
        result = Attribution(scores=scores, dims=("batch", "key"), method="made", mask=None, model="")
        return right_copy(Case(host, one, trace, result)).value

    assert (score([right]), score([at for at in copies if at != right]), score([])) == (1, 0, 0.5)


TABLES: dict[str, tuple[Iterable[str], Iterable[str], Iterable[str]]] = {
    task: (
        EXPLAINED[task],
        [*BASELINES, "effect", *METHODS],
        ("ap", "spearman", *(("right_copy",) if task in WITH_COPIES else ())),
    )
    for task in TASKS
}


def test_verdicts_follow_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 50)
    order = [*BASELINES, *METHODS, "effect"]

    def verdicts(order: list[str]) -> dict[str, str]:
        def value(method: str, metric: str) -> float:
            return 0.5 + order.index(method) / len(order) / 2.05

        results = made(TABLES, value)
        return of_claims(STUDY.claims(results), results)

    given, turned = verdicts(order), verdicts(order[::-1])
    for task in ("Shared values", "Sums"):
        for claim in (
            f"{task}: {OF_DEFAULT} rank the decisive tokens better than every baseline here",
            f"{task}: {OF_DEFAULT} rank tokens by their effects better than every baseline here",
            f"{task}: `logit` ranks the decisive tokens better than every baseline here",
        ):
            assert (given[claim], turned[claim]) == ("holds", "contradicted"), claim
    claim = "`attn_lrp`, which counts what tokens decide, finds more than `logit`, which counts what they send here"
    assert (given[claim], turned[claim]) == ("holds", "contradicted")
    agree = next(claim for claim in given if claim.startswith("The measured effects agree"))
    assert (given[agree], turned[agree]) == ("holds", "contradicted")
