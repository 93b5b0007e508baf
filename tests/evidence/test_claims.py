"""Claims and their verdicts."""

import pytest
import torch

from evidence.claims import Claim, Outcome, Results, paired_interval
from evidence.rows import number
from unilinattn.errors import InputError
from unilinattn.evaluation import Table


def table(scale: float, samples: int = 40, seed: int = 0) -> Table:
    """Two methods on the same samples: `good` is better than `poor` by `scale` on average, with noise of 0.1."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for at in range(samples):
        easy, noise = (float(torch.randn((), generator=generator)) for _ in range(2))
        rows.append(number("good", "ap", easy + scale + 0.1 * noise, model="m", sample=str(at)))
        rows.append(number("poor", "ap", easy, model="m", sample=str(at)))
    return Table(rows)


def results(*scales: float) -> Results:
    return Results({"t": {seed: table(scale, seed=seed) for seed, scale in enumerate(scales)}})


def test_the_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    first = [[(value, 1.0)] for value in values.tolist()]
    second = [[(0.0, 1.0)]] * len(first)
    low, high = paired_interval(first, second)
    half = 1.96 * float(values.std()) / len(values) ** 0.5
    assert low == pytest.approx(float(values.mean()) - half, abs=0.1 * half)
    assert high == pytest.approx(float(values.mean()) + half, abs=0.1 * half)


def test_the_interval_of_a_ratio_pools_before_it_divides() -> None:
    # The ratios of the single samples are 1 and 0; of the pooled ones 10 / 40.
    first = [[(10.0, 10.0)], [(0.0, 30.0)]] * 50
    low, high = paired_interval(first, [[(0.0, 1.0)]] * 100)
    assert low < 0.25 < high < 0.4


def test_a_claim_holds_if_the_method_is_better_for_every_seed_and_its_reverse_does_not() -> None:
    found = results(0.1, 0.1, 0.1)
    claim = Claim.of("good beats poor", "here", found.better("t", "ap", "good", "poor", ["m"]))
    assert claim.verdict == "holds"
    assert "better in 3 of 3, worse in 0" in claim.reason
    reverse = Claim.of("poor beats good", "here", found.better("t", "ap", "poor", "good", ["m"]))
    assert reverse.verdict == "does not hold"
    assert "better in 0 of 3, worse in 3" in reverse.reason
    assert found.better("t", "ap", "poor", "good", ["m"], larger=False).holds


def test_one_seed_without_a_difference_refutes_a_claim() -> None:
    outcome = results(0.1, 0.1, 0.0).better("t", "ap", "good", "poor", ["m"])
    assert not outcome.holds
    assert "better in 2 of 3, worse in 0" in str(outcome)


def test_a_claim_holds_only_with_all_its_parts() -> None:
    assert Claim.of("both", "here", Outcome(True, "a"), Outcome(True, "b")).verdict == "holds"
    assert Claim.of("both", "here", Outcome(True, "a"), Outcome(False, "b")).verdict == "does not hold"
    assert Claim.untested("later", "HMA", "no data").verdict == "not tested"


def test_the_reason_of_a_claim_of_many_parts_lists_those_that_fail() -> None:
    parts = [Outcome(True, "right")] * 5
    assert Claim.of("many", "here", *parts).reason == "5 of 5 comparisons hold"
    assert Claim.of("many", "here", *parts, Outcome(False, "x")).reason == "5 of 6 comparisons hold, but not: x"


def test_thresholds_hold_for_every_seed() -> None:
    found = results(0.1, 0.3)
    gap = 0.2
    assert not found.within("t", "ap", "good", "poor", ["m"], most=gap).holds
    assert found.within("t", "ap", "good", "poor", ["m"], most=2 * gap).holds
    assert not found.every("t", "ap", "good", ["m"], lambda value: value > 0.2, "above").holds
    assert found.every("t", "ap", "good", ["m"], lambda value: value > -1, "above").holds


def test_numbers_that_do_not_exist_are_named() -> None:
    with pytest.raises(InputError, match=r"no numbers of auc for good on m, seed 0, in table 't'"):
        results(0.1).values("t", "m", "good", "auc")
    rows = [*table(0.1), number("other", "ap", 1.0, model="m", sample="x")]
    with pytest.raises(InputError, match="good and other on m were measured on different samples"):
        Results({"t": {0: Table(rows)}}).better("t", "ap", "good", "other", ["m"])
