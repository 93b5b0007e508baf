"""Claims, their comparisons, and the bootstrap behind their verdicts."""

import numpy as np
import pytest
import torch

from evidence import bootstrap
from evidence.bootstrap import intervals, pooled
from evidence.claims import HERE, Claim, Results, outcomes, verdict
from evidence.comparisons import Comparison, Term, better, bounded, within
from evidence.rows import number
from evidence.study_page import reason
from unilinattn.errors import InputError
from unilinattn.evaluation import Table

ONE, OTHER = Term("t", "m", "one", "ap"), Term("t", "m", "other", "ap")


def table(scale: float, seed: int, samples: int = 60) -> Table:
    """Two methods on the same samples: `good` is better than `poor` by `scale` on average, with noise of 0.1."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for at in range(samples):
        easy, noise = (float(torch.randn((), generator=generator)) for _ in range(2))
        rows.append(number("good", "ap", easy + scale + 0.1 * noise, model="m", sample=str(at)))
        rows.append(number("poor", "ap", easy, model="m", sample=str(at)))
    return Table(rows)


def results(*scales: float) -> Results:
    return Results({"t": {seed: table(scale, seed) for seed, scale in enumerate(scales)}})


def judged(comparisons: list[Comparison], *scales: float) -> str:
    claim = Claim.of("", HERE, comparisons)
    return verdict(claim, outcomes([claim], results(*scales)))


def parts(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    weights = np.ones_like(values) if weights is None else weights
    return np.stack([values * weights, weights], -1)[:, None]


def test_the_interval_of_a_mean_of_one_seed_is_that_of_its_standard_error() -> None:
    values = np.random.default_rng(1).normal(0.5, 1, 400)
    ((low, high),) = intervals({ONE: [parts(values)]}, [{ONE: 1.0}], 0.95, 4000)
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_the_interval_of_several_seeds_covers_their_spread() -> None:
    # The samples of a seed are alike, so the resamples are the means of three seeds drawn with replacement.
    numbers = {ONE: [parts(np.full(50, value)) for value in (0.0, 3.0, 9.0)]}
    assert pooled(numbers[ONE]) == 4
    ((low, high),) = intervals(numbers, [{ONE: 1.0}], 0.99, 4000)
    assert (low, high) == (0, 9)
    # One resample in 27 has the first seed only, two in 27 have a smaller mean than (0 + 0 + 3) / 3 = 1 or as small.
    ((low, high),) = intervals(numbers, [{ONE: 1.0}], 0.90, 4000)
    assert (low, high) == (1, 7)


def test_a_difference_is_that_of_paired_samples() -> None:
    values = np.random.default_rng(2).normal(0, 10, 80)
    numbers = {ONE: [parts(values + 1)] * 3, OTHER: [parts(values)] * 3}
    ((low, high),) = intervals(numbers, [{ONE: 1.0, OTHER: -1.0}], 0.999, 500)
    assert (low, high) == (pytest.approx(1, abs=1e-5), pytest.approx(1, abs=1e-5))


def test_seeds_that_share_their_samples_add_no_samples() -> None:
    values = np.random.default_rng(3).normal(0, 1, 60)
    ((alone,), (thrice,)) = (intervals({ONE: [parts(values)] * seeds}, [{ONE: 1.0}], 0.95, 8000) for seeds in (1, 3))
    assert thrice == pytest.approx(alone, abs=0.1 * (alone[1] - alone[0]))


def test_ratios_are_pooled_before_they_are_divided() -> None:
    # The ratios of the single samples are 1 and 0, their mean one half; of the pooled ones 10 / 40.
    numbers = {ONE: [parts(np.tile([1.0, 0.0], 50), np.tile([10.0, 30.0], 50))]}
    assert pooled(numbers[ONE]) == 0.25
    ((low, high),) = intervals(numbers, [{ONE: 1.0}], 0.95, 2000)
    assert low < 0.25 < high < 0.4


def test_a_comparison_holds_or_is_contradicted_or_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 2000)
    forward, backward = (better("t", "ap", *pair, ["m"]) for pair in (("good", "poor"), ("poor", "good")))
    assert judged(forward, 0.2, 0.2, 0.2) == "holds"
    assert judged(backward, 0.2, 0.2, 0.2) == "contradicted"
    assert judged(better("t", "ap", "poor", "good", ["m"], larger=False), 0.2, 0.2, 0.2) == "holds"
    # Seeds that disagree, and a difference of nothing.
    assert judged(forward, 0.2, 0.2, -0.1) == judged(forward, 0.0, 0.0, 0.0) == "inconclusive"


def test_bounds_are_compared_with_the_whole_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 2000)
    gaps = {
        most: judged(within("t", "ap", "good", "poor", ["m"], most=most), 0.2, 0.2, 0.2) for most in (0.1, 0.2, 0.3)
    }
    assert gaps == {0.1: "contradicted", 0.2: "inconclusive", 0.3: "holds"}
    assert judged(bounded("t", "ap", "good", ["m"], ">", -2), 0.2, 0.2) == "holds"
    assert judged(bounded("t", "ap", "good", ["m"], "<", -2), 0.2, 0.2) == "contradicted"


def test_an_exact_number_may_equal_its_bound() -> None:
    exact = {
        relation: bounded("t", "ap", "raw", ["m"], relation, 1)[0].verdict(1, 1) for relation in ("≥", "≤", ">", "<")
    }
    assert exact == {"≥": "holds", "≤": "holds", ">": "inconclusive", "<": "inconclusive"}


def test_a_claim_holds_with_all_its_comparisons_and_is_contradicted_by_one() -> None:
    claim = Claim.of("", HERE, bounded("t", "ap", "raw", ["m"], ">", 0))

    def of(*verdicts: str) -> str:
        return verdict(claim, [{"verdict": one} for one in verdicts])

    assert of("holds", "holds") == "holds"
    assert of("holds", "inconclusive") == "inconclusive"
    assert of("holds", "inconclusive", "contradicted") == "contradicted"
    assert verdict(Claim("", "HMA", untested="no data"), []) == "not tested"


def test_the_level_is_corrected_for_the_comparisons_of_a_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 2000)
    forward = better("t", "ap", "good", "poor", ["m"])
    others = [bounded("t", "ap", "good", ["m"], ">", bound) for bound in range(4)]
    claims = [Claim.of("first", HERE, forward), Claim.of("again", HERE, forward, *others)]
    rows = outcomes(claims, results(0.2, 0.2, 0.2))
    assert {row["level"] for row in rows} == {0.99}
    alone = outcomes(claims[:1], results(0.2, 0.2, 0.2))[0]
    assert alone["level"] == 0.95
    assert rows[0]["low"] < alone["low"] < alone["effect"] < alone["high"] < rows[0]["high"]
    assert (rows[0]["claim"], rows[1]["claim"], rows[0]["samples"]) == (0, 1, [60, 60, 60])


def test_few_samples_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 500)
    claims = [Claim.of("", HERE, better("t", "ap", "good", "poor", ["m"]))]

    def of(samples: int) -> str:
        every = Results({"t": {seed: table(5, seed, samples) for seed in range(3)}})
        return str(outcomes(claims, every)[0]["verdict"])

    # 2^(1 - 5) is 0.0625, and 2^(1 - 6) is 0.03125; a single number is exact.
    assert [of(samples) for samples in (1, 5, 6)] == ["holds", "inconclusive", "holds"]


def test_the_reason_is_made_of_the_rows_and_lists_those_that_decide() -> None:
    def row(verdict: str, effect: float) -> dict:
        numbers = {"effect": effect, "low": effect - 1, "high": effect + 1}
        return {"quantity": "q", "relation": ">", "bound": 0.0, "samples": [5, 5], "verdict": verdict, **numbers}

    assert reason([row("holds", 2)]) == "q > 0: holds, +2 [+1, +3], n = 5 x 2"
    text = reason([row("holds", 2)] * 5 + [row("inconclusive", 0.5), row("contradicted", -4)])
    assert text.startswith("7 comparisons: 5 holds, 1 contradicted, 1 inconclusive; of these: q > 0: contradicted, -4")


def test_numbers_that_do_not_exist_are_named() -> None:
    with pytest.raises(InputError, match=r"no numbers of auc for good on m, seed 0, in table 't'"):
        results(0.1).values("t", "m", "good", "auc")
    rows = [*table(0.1, 0), number("other", "ap", 1.0, model="m", sample="x")]
    claim = Claim.of("", HERE, better("t", "ap", "good", "other", ["m"]))
    with pytest.raises(InputError, match="good on m and other on m were measured on different samples"):
        outcomes([claim], Results({"t": {0: Table(rows)}}))
