"""Recorded verdicts, computed again from the recorded numbers of the samples by a bootstrap of plain numpy."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evidence import real_page

RESULTS = Path(__file__).parents[2] / "evidence" / "results"
STUDIES = ("ablation", "vision", "alignment", "retrieval", "copying", "induction", "reasoning", "removal", "edges")
SECTIONS = tuple(path.stem for name in real_page.SECTIONS if (path := RESULTS / f"real-{name}.json").is_file())
VERDICTS = ("holds", "contradicted", "inconclusive")
COUNT = 10
LARGEST = 500
"""Most samples of all seeds, so that a test takes a second."""


def record(study: str) -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((RESULTS / f"{study}.json").read_text())
    return numbers


def is_clear(row: dict[str, Any]) -> bool:
    """Whether the bound is not so near to an end of the interval that other random numbers could cross it."""
    width = row["high"] - row["low"]
    return all(abs(row[end] - row["bound"]) > 0.1 * width for end in ("low", "high"))


def rows() -> list[tuple[str, dict[str, Any]]]:
    """Return ten rows: one of each verdict in turn, from the studies in turn."""
    every = {study: record(study)["outcomes"] for study in STUDIES}
    clear = {
        (study, verdict): [
            row
            for row in every[study]
            if row["verdict"] == verdict and 3 < sum(row["samples"]) < LARGEST and is_clear(row)
        ]
        for study in STUDIES
        for verdict in VERDICTS
    }
    listed = [(study, row) for (study, _), of_kind in clear.items() for row in of_kind[:1]]
    return [*listed, *((study, row) for (study, _), of_kind in clear.items() for row in of_kind[1:2])][:COUNT]


def rows_of_sections() -> list[tuple[str, dict[str, Any]]]:
    """Return a row of each verdict from each measured section of the page of pretrained checkpoints."""
    listed = []
    for section in SECTIONS:
        for verdict in VERDICTS:
            clear = [row for row in record(section)["outcomes"] if row["verdict"] == verdict and is_clear(row)]
            listed += [(section, row) for row in clear[:1]]
    return listed


def sample_numbers(study: dict[str, Any], term: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the ratios and weights (sample, part) of a number, one pair a seed."""
    names = ("table", "model", "method", "metric")
    (entry,) = [one for one in study["samples"] if [one[name] for name in names] == term]

    def decoded(text: str) -> np.ndarray:
        units = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4")
        return units.reshape(-1, entry["parts"]) / 1e4

    ratios = decoded(entry["ratios"])
    weights = decoded(entry["weights"]) if entry["weights"] else np.ones_like(ratios)
    splits = np.cumsum(entry["counts"])[:-1]
    return list(zip(np.split(ratios, splits), np.split(weights, splits), strict=True))


def recomputed(study: dict[str, Any], row: dict[str, Any], resamples: int = 40_000) -> tuple[float, np.ndarray]:
    """Return the effect of a row, and its resamples."""
    random = np.random.default_rng(12345)
    seeds = len(row["samples"])
    drawn_seeds = random.integers(seeds, size=(resamples, seeds))
    effect, total = 0.0, np.zeros(resamples)
    # A resample of samples is a vector of counts, the same for seeds with as many samples.
    counts = {n: random.multinomial(n, np.full(n, 1 / n), resamples) for n in row["samples"]}
    for weight, *term in row["terms"]:
        numbers = sample_numbers(study, term)
        effect += weight * np.mean([((r * w).sum(0) / w.sum(0)).mean() for r, w in numbers])
        by_seed = [((counts[len(r)] @ (r * w)) / (counts[len(r)] @ w)).mean(1) for r, w in numbers]
        total += weight * np.mean([np.choose(drawn_seeds[:, slot], by_seed) for slot in range(seeds)], axis=0)
    return effect, total


@pytest.mark.parametrize(
    ("name", "row"),
    [*rows(), *rows_of_sections()],
    ids=lambda value: value if isinstance(value, str) else value["verdict"],
)
def test_a_verdict_follows_from_the_recorded_samples(name: str, row: dict[str, Any]) -> None:
    study = record(name)
    effect, resampled = recomputed(study, row)
    assert effect == pytest.approx(row["effect"], rel=1e-3, abs=1e-4)
    distinct = {json.dumps([one["terms"], one["relation"], one["bound"]]) for one in study["outcomes"]}
    level = 1 - 0.05 / len(distinct)
    assert row["level"] == pytest.approx(level, abs=1e-5)
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    above, below = low > row["bound"], high < row["bound"]
    right, wrong = (below, above) if row["relation"] in "<≤" else (above, below)
    fewest = min(row["samples"])
    if fewest > 1 and 2.0 ** (1 - fewest) > 1 - level:
        right = wrong = False
    assert row["verdict"] == ("holds" if right else "contradicted" if wrong else "inconclusive")


def test_the_recomputed_verdicts_are_of_every_kind() -> None:
    assert len(rows()) == COUNT
    assert {row["verdict"] for _, row in rows()} == set(VERDICTS)


def test_the_verdict_of_a_claim_follows_from_its_rows() -> None:
    for study in (*STUDIES, *SECTIONS, "theorems"):
        numbers = record(study)
        for at, claim in enumerate(numbers["claims"]):
            verdicts = {row["verdict"] for row in numbers["outcomes"] if row["claim"] == at}
            if not verdicts:
                assert claim["verdict"] == "not tested" and claim["untested"]
            elif "contradicted" in verdicts:
                assert claim["verdict"] == "contradicted"
            else:
                assert claim["verdict"] == ("holds" if verdicts == {"holds"} else "inconclusive")
