"""The ranking metrics against their definitions, computed pair by pair and order by order."""

from itertools import pairwise, permutations
from statistics import correlation

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from unilinattn.errors import InputError
from unilinattn.evaluation.metrics import (
    RankCorrelation,
    RowScores,
    alignment_error_rate,
    completeness_gap,
    earlier_keys,
    gold_links,
    rank_correlation,
    row_scores,
)


def loop_auc(scores: list[float], relevant: list[bool]) -> float:
    pairs = [
        (1.0 if good > bad else 0.5 if good == bad else 0.0)
        for good, hit in zip(scores, relevant, strict=True)
        for bad, other in zip(scores, relevant, strict=True)
        if hit and not other
    ]
    return sum(pairs) / len(pairs)


def loop_average_precision(scores: list[float], relevant: list[bool]) -> float:
    """The sum over thresholds of precision times the step in recall."""
    total, recall_before, area = sum(relevant), 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        hits = [hit for score, hit in zip(scores, relevant, strict=True) if score >= threshold]
        recall = sum(hits) / total
        area += (recall - recall_before) * sum(hits) / len(hits)
        recall_before = recall
    return area


def loop_recall_at_k(scores: list[float], relevant: list[bool]) -> float:
    """The mean recall over all orders of tied keys."""
    k, recalls = sum(relevant), []
    for order in permutations(range(len(scores))):
        if all(scores[a] >= scores[b] for a, b in pairwise(order)):
            recalls.append(sum(relevant[place] for place in order[:k]) / k)
    return sum(recalls) / len(recalls)


def loop_hit_at_1(scores: list[float], relevant: list[bool]) -> float:
    """The mean of the hit over tied best keys."""
    hits = [hit for score, hit in zip(scores, relevant, strict=True) if score == max(scores)]
    return sum(hits) / len(hits)


def loop_row_scores(scores: torch.Tensor, relevant: torch.Tensor, valid: torch.Tensor) -> RowScores:
    rows, dropped = [], 0
    flat = (t.reshape(-1, scores.shape[-1]).tolist() for t in (scores, relevant, valid))
    for row, hits, allowed in zip(*flat, strict=True):
        candidates = [place for place, ok in enumerate(allowed) if ok]
        ranked, expected = [row[place] for place in candidates], [hits[place] for place in candidates]
        if not any(expected) or all(expected):
            dropped += 1
            continue
        rows.append([f(ranked, expected) for f in (loop_auc, loop_average_precision, loop_recall_at_k, loop_hit_at_1)])
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return RowScores(*means, rows=len(rows), dropped=dropped)


@st.composite
def rankings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, queries, keys = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(2, 5))
    count = batch * queries * keys
    levels = st.sampled_from([-torch.inf, -1.5, 0.0, 0.25, 0.5, 3.0])
    scores = torch.tensor(draw(st.lists(levels, min_size=count, max_size=count)), dtype=torch.float64)
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    relevant, valid = torch.tensor(draw(flags)), torch.tensor(draw(flags))
    relevant[:2], valid[:2] = torch.tensor([True, False]), True
    shape = (batch, queries, keys)
    return scores.view(shape), relevant.view(shape), valid.view(shape)


@pytest.mark.long
@settings(max_examples=150)
@given(rankings())
def test_metrics_equal_their_definitions(case: tuple[torch.Tensor, ...]) -> None:
    actual, expected = row_scores(*case), loop_row_scores(*case)
    assert (actual.rows, actual.dropped) == (expected.rows, expected.dropped)
    for name in ("auc", "ap", "recall_at_k", "hit_at_1"):
        assert getattr(actual, name) == pytest.approx(getattr(expected, name), abs=1e-12), name


@settings(max_examples=50)
@given(rankings(), st.sampled_from(["affine", "cube", "arctan", "float32"]))
def test_monotone_transforms_change_nothing(case: tuple[torch.Tensor, ...], transform: str) -> None:
    scores, relevant, valid = case
    changed = {
        "affine": lambda x: 7 * x + 2,
        "cube": lambda x: x**3,
        "arctan": torch.atan,
        "float32": lambda x: x.float(),
    }[transform](scores)
    assert row_scores(changed, relevant, valid) == row_scores(scores, relevant, valid)


@settings(max_examples=50)
@given(rankings(), st.randoms(use_true_random=False))
def test_the_order_of_keys_changes_nothing(case: tuple[torch.Tensor, ...], random) -> None:
    order = list(range(case[0].shape[-1]))
    random.shuffle(order)
    shuffled, expected = row_scores(*(t[..., order] for t in case)), row_scores(*case)
    for name in ("auc", "ap", "recall_at_k", "hit_at_1", "rows", "dropped"):
        assert getattr(shuffled, name) == pytest.approx(getattr(expected, name), abs=1e-12)


def test_constant_scores_are_at_chance() -> None:
    relevant = torch.zeros(4, 10, dtype=torch.bool)
    relevant[:, :3] = True
    actual = row_scores(torch.full((4, 10), 0.7), relevant)
    assert (actual.auc, actual.rows, actual.dropped) == (0.5, 4, 0)
    assert (actual.ap, actual.recall_at_k, actual.hit_at_1) == (pytest.approx(0.3),) * 3


def test_perfect_and_reversed_scores() -> None:
    relevant = torch.eye(6, dtype=torch.bool)
    assert row_scores(relevant.float(), relevant) == RowScores(1.0, 1.0, 1.0, 1.0, 6, 0)
    worst = row_scores(-relevant.float(), relevant)
    assert (worst.auc, worst.recall_at_k, worst.hit_at_1) == (0.0, 0.0, 0.0)
    assert worst.ap == pytest.approx(1 / 6)


def test_only_valid_keys_are_candidates() -> None:
    length = 5
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    relevant = torch.zeros(length, length, dtype=torch.bool)
    relevant[:, 0] = True
    scores = relevant.float().expand(2, -1, -1).clone()
    scores[:, ~causal] = torch.nan
    # In both sequences, row 0 has no irrelevant candidate because of causality.
    assert row_scores(scores, relevant, causal) == RowScores(1.0, 1.0, 1.0, 1.0, 8, 2)
    above = causal.new_zeros(length, length)
    above[1, 4] = above[4, 4] = True
    assert row_scores(relevant.float(), above, causal).rows == 1


def test_a_row_with_no_relevant_key_is_dropped_and_counted() -> None:
    relevant = torch.tensor([[True, False], [False, False]])
    assert row_scores(torch.tensor([[1.0, 0.0], [5.0, 0.0]]), relevant) == RowScores(1.0, 1.0, 1.0, 1.0, 1, 1)


def test_tied_best_keys_share_the_hit() -> None:
    relevant = torch.tensor([[True, False, False, True]])
    assert row_scores(torch.tensor([[2.0, 2.0, 2.0, 1.0]]), relevant).hit_at_1 == pytest.approx(1 / 3)
    # Breaking ties by position would count the first of the tied keys as a hit.
    assert row_scores(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), relevant).hit_at_1 == pytest.approx(1 / 3)


def loop_mid_ranks(values: list[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


def loop_rank_correlation(scores: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor) -> tuple[list[float], int]:
    """Pearson's correlation of the mid-ranks of each row, and the number of dropped rows."""
    correlations, dropped = [], 0
    for row, reference, allowed in zip(*(t.flatten(0, -2).tolist() for t in (scores, truth, valid)), strict=True):
        ranks = [
            loop_mid_ranks([value for value, ok in zip(values, allowed, strict=True) if ok])
            for values in (row, reference)
        ]
        if len(set(ranks[1])) < 2:
            dropped += 1
        else:
            correlations.append(0.0 if len(set(ranks[0])) < 2 else correlation(*ranks))
    return correlations, dropped


@pytest.mark.long
@settings(max_examples=150)
@given(rankings(), st.randoms(use_true_random=False))
def test_the_rank_correlation_equals_its_definition(case: tuple[torch.Tensor, ...], random) -> None:
    scores, _, valid = case
    truth = torch.tensor([float(random.randrange(4)) for _ in range(scores.numel())]).view(scores.shape)
    truth[..., :2, :2] = torch.tensor([0.0, 1.0])
    expected, dropped = loop_rank_correlation(scores, truth, valid)
    actual = rank_correlation(scores, truth, valid)
    assert (actual.rows, actual.dropped) == (len(expected), dropped)
    assert actual.mean == pytest.approx(sum(expected) / len(expected), abs=1e-12)


def test_a_worked_rank_correlation() -> None:
    # Without ties it is 1 - 6 sum d^2 / (n (n^2 - 1)): here d = (1, -1, 0, 0, 0), so 1 - 12 / 120.
    truth = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert rank_correlation(torch.tensor([[20.0, 10.0, 30.0, 40.0, 50.0]]), truth).mean == pytest.approx(0.9)
    assert rank_correlation(truth.exp(), truth) == RankCorrelation(1.0, 1, 0)
    assert rank_correlation(-truth, truth).mean == pytest.approx(-1.0)
    # Mid-ranks (1.5, 1.5, 3) against (1, 2, 3): 1.5 / sqrt(1.5 * 2).
    assert rank_correlation(torch.tensor([[0.0, 0.0, 1.0]]), truth[:, :3]).mean == pytest.approx(0.75**0.5)


def test_rows_with_constant_truth_are_dropped_and_constant_scores_count_as_zero() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0], [7.0, 7.0, 7.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    truth = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [4.0, 4.0, 4.0], [1.0, 2.0, 3.0]])
    valid = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [True, False, False]])
    assert rank_correlation(scores, truth, valid) == RankCorrelation(0.5, 2, 2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("scores", "truth", "words"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), r"the scores' shape \(2, 3\); got torch.float32 \(2, 4\)"),
        (torch.ones(2, 3), [[1.0]], "got list"),
        (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.long), "truth must be a floating-point"),
        (torch.ones(2, 3), torch.full((2, 3), torch.nan), "truth holds NaN"),
        (torch.full((2, 3), torch.nan), torch.ones(2, 3), "scores holds NaN"),
        (torch.rand(2, 3), torch.ones(2, 3), "two valid keys that differ in truth"),
    ],
)
def test_a_rank_correlation_that_is_undefined_is_refused(scores, truth, words: str) -> None:
    with pytest.raises(InputError, match=words):
        rank_correlation(scores, truth)


def loop_error_rate(scores: torch.Tensor, sure: torch.Tensor, possible: torch.Tensor, valid: torch.Tensor) -> float:
    hits_sure = hits_possible = links = 0.0
    for row, s, p, ok in zip(*(t.flatten(0, -2).tolist() for t in (scores, sure, possible, valid)), strict=True):
        candidates = [place for place, allowed in enumerate(ok) if allowed]
        best = [place for place in candidates if row[place] == max(row[k] for k in candidates)]
        for place in best:
            links += 1 / len(best)
            hits_sure += s[place] / len(best)
            hits_possible += (p[place] or s[place]) / len(best)
    return 1 - (hits_sure + hits_possible) / (links + int(sure.sum()))


@settings(max_examples=80)
@given(rankings(), st.randoms(use_true_random=False))
def test_alignment_error_rate_equals_its_definition(case: tuple[torch.Tensor, ...], random) -> None:
    scores, sure, valid = case
    sure = sure & valid
    possible = torch.tensor([random.random() < 0.3 for _ in range(sure.numel())]).view(sure.shape) & valid
    known = loop_error_rate(scores, sure, possible, valid)
    assert alignment_error_rate(scores, sure, possible, valid) == pytest.approx(known, abs=1e-12)


def test_the_querys_own_key_is_no_earlier_key() -> None:
    for length in (1, 4):
        for query in range(length):
            assert earlier_keys(length)[query].nonzero().flatten().tolist() == list(range(query))
    # Rows 1 to 3 rank their own key first and the key before it second; row 1 has no other candidate.
    scores = 2 * torch.eye(4) + torch.eye(4).roll(-1, 1)
    before = torch.eye(4, dtype=torch.bool).roll(-1, 1) & earlier_keys(4)
    assert row_scores(scores, before, earlier_keys(4)) == RowScores(1.0, 1.0, 1.0, 1.0, 2, 2)
    assert row_scores(scores, before).hit_at_1 == 0.0


def test_gold_links_are_pairs_of_positions() -> None:
    links = [(0, 1), (2, 0), (2, 2), (2, 0)]
    expected = [[(query, key) in links for key in range(4)] for query in range(3)]
    assert gold_links(links, 3, 4).tolist() == expected
    assert not gold_links([], 2, 2).any()
    # The two sentences exchanged give another error rate.
    scores = gold_links([(0, 1), (1, 2), (2, 0)], 3, 3).double()
    gold = gold_links([(0, 1), (1, 2), (2, 1)], 3, 3)
    assert alignment_error_rate(scores, gold) == pytest.approx(1 / 3)
    assert alignment_error_rate(scores, gold.mT) == pytest.approx(2 / 3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("link", "words"),
    [
        ((3, 0), r"\(3, 0\) lies outside the sentence, which has queries 0 to 2 and keys 0 to 3"),
        ((0, 4), "outside"),
        ((-1, 0), "outside"),
        ((0, 1, 2), "no pair"),
        ((0.5, 1), "no pair"),
        (3, "no pair"),
    ],
)
def test_a_gold_link_outside_the_sentence_is_refused(link, words: str) -> None:
    with pytest.raises(InputError, match=words):
        gold_links([(0, 0), link], 3, 4)


def test_a_gold_link_to_a_key_that_is_not_valid_is_refused() -> None:
    scores, valid = torch.rand(2, 3), torch.tensor([True, True, False])
    gold = torch.tensor([[False, True, False], [False, False, True]])
    with pytest.raises(InputError, match=r"1 sure links lead to keys that are not valid, the first at \(1, 2\)"):
        alignment_error_rate(scores, gold, valid=valid)
    with pytest.raises(InputError, match="1 possible links"):
        alignment_error_rate(scores, gold & valid, gold, valid)


def test_alignment_error_rate_of_known_links() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.5, 0.4, 0.1]])
    sure = torch.eye(3, dtype=torch.bool)
    assert alignment_error_rate(sure.float(), sure) == 0.0
    assert alignment_error_rate(scores, sure) == pytest.approx(1 - 4 / 6)
    possible = torch.zeros(3, 3, dtype=torch.bool)
    possible[2, 0] = True
    assert alignment_error_rate(scores, sure, possible) == pytest.approx(1 - 5 / 6)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("scores", "relevant", "valid", "words"),
    [
        (torch.ones(3), torch.ones(3, dtype=torch.bool), None, "query, key"),
        (torch.ones(2, 0), torch.ones(2, 0, dtype=torch.bool), None, "query, key"),
        (torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool), None, "int64"),
        ([[1.0, 2.0]], torch.ones(1, 2, dtype=torch.bool), None, "list"),
        (torch.ones(2, 3), torch.ones(2, 3), None, "relevant must be a boolean"),
        (torch.ones(2, 3), [[True]], None, "relevant must be a boolean"),
        (torch.ones(2, 3), torch.ones(2, 4, dtype=torch.bool), None, "relevant of shape"),
        (torch.ones(2, 3), torch.eye(2, 3).bool(), torch.ones(5, 3, dtype=torch.bool), "valid of shape"),
        (torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), None, "nothing to rank"),
        (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), None, "nothing to rank"),
        (torch.tensor([[1.0, torch.nan]]), torch.tensor([[True, False]]), None, "NaN"),
    ],
)
def test_invalid_inputs_are_refused(scores, relevant, valid, words: str) -> None:
    with pytest.raises(InputError, match=words):
        row_scores(scores, relevant, valid)


@pytest.mark.usefixtures("unchecked")
def test_an_error_rate_needs_links() -> None:
    none = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(InputError, match="neither"):
        alignment_error_rate(torch.ones(2, 3), none, valid=none)
    with pytest.raises(InputError, match="possible"):
        alignment_error_rate(torch.ones(2, 3), none, torch.ones(2, 3))


def test_the_completeness_gap_is_what_shares_and_bias_miss() -> None:
    shares = torch.tensor([[1.0, -3.0, 0.5], [2.0, 2.0, 2.0]], dtype=torch.float64)
    logit = torch.tensor([-2.0, 4.0], dtype=torch.float64)
    gap = completeness_gap(shares, torch.tensor([-0.5, -1.0], dtype=torch.float64), logit)
    assert gap.absolute.tolist() == [0.0, 1.0]
    assert gap.relative.tolist() == [0.0, 0.25]
    # Without the biases the first gap is 0.5 and the second 2.
    assert completeness_gap(shares, torch.zeros(2).double(), logit).absolute.tolist() == [0.5, 2.0]
    single = completeness_gap(torch.tensor([2.0, 3.0]), torch.tensor(1.0), torch.tensor(-8.0))
    assert (single.absolute.item(), single.relative.item()) == (14.0, 1.75)


def test_the_completeness_gap_is_summed_in_float64() -> None:
    shares = torch.tensor([1e8, 1.0, -1e8])
    assert completeness_gap(shares, torch.tensor(0.0), torch.tensor(1.0)).absolute.item() == 0.0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("shares", "bias", "logit", "words"),
    [
        (torch.ones(2, 3), torch.ones(3), torch.ones(2), r"\(2, 3\), bias of shape \(3,\) and logit of shape \(2,\)"),
        (torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0), "do not fit"),
        (torch.ones(2, 3), torch.ones(2), torch.ones(2, 1), "do not fit"),
        (torch.ones(2, 3), [1.0, 1.0], torch.ones(2), "bias must be a floating-point tensor; got list"),
        (
            torch.ones(2, 3).long(),
            torch.ones(2),
            torch.ones(2),
            "shares must be a floating-point tensor; got torch.int64",
        ),
        (torch.ones(2, 3), torch.ones(2), torch.tensor([1.0, torch.nan]), "logit holds NaN"),
        (torch.full((2, 3), torch.inf), torch.ones(2), torch.ones(2), "shares holds NaN or infinity"),
    ],
)
def test_a_completeness_gap_of_bad_input_is_refused(shares, bias, logit, words: str) -> None:
    with pytest.raises(InputError, match=words):
        completeness_gap(shares, bias, logit)


def test_the_relative_gap_of_a_zero_logit_is_undefined() -> None:
    gap = completeness_gap(torch.ones(2, 3), torch.zeros(2), torch.tensor([0.0, 3.0]))
    assert gap.absolute.tolist() == [3.0, 0.0]
    with pytest.raises(InputError, match="1 of 2 logits are 0"):
        _ = gap.relative
