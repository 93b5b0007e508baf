"""The recorded numbers of a study: one JSON file, from which the page is written."""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from evidence.claims import DECIMALS, Claim, Results, outcomes, verdict
from evidence.comparisons import Term
from evidence.study import FOLDER, Study
from unilinattn.errors import ResultFileError
from unilinattn.evaluation import Table

RESULTS = FOLDER / "results"

DIFFERENT = 0.01
"""Difference at which two values of a metric count as different."""

DIFFERENT_SHARE = 0.02
"""Largest share of different numbers of a repeated run: the rounding of another processor can change a rank."""

COMPARED = ("table", "model", "method", "metric", "values")
"""What is kept of the rows of a quick run, with which a repeated one is compared."""

Numbers = Mapping[str, Any]


def summaries(tables: Mapping[str, Mapping[int, Table]]) -> list[dict[str, Any]]:
    """Return a row for each table, model, method and metric: its values over all samples, one for each seed."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, by_seed in tables.items():
        for table in by_seed.values():
            for row in table.summary():
                key = (name, row["model"], row["method"], row["metric"])
                entry = rows.setdefault(
                    key,
                    {**dict(zip(("table", "model", "method", "metric"), key, strict=True)), "layers": [], "values": []},
                )
                entry["layers"].append(row["layer"])
                entry["values"].append(float(f"{row['value']:.5g}"))
                entry["samples"] = row["samples"]
    return list(rows.values())


def described(
    study: Study,
    results: Results,
    claims: Sequence[Claim],
    training: Sequence[Mapping[str, Any]],
    quick: Any,
    **rest: Any,
) -> Numbers:
    """Return the record of a study."""
    judgement = judged(results, claims)
    return {
        "study": study.name,
        "size": asdict(study.size),
        "seeds": results.seeds,
        **rest,
        "training": list(training),
        "claims": judgement["claims"],
        "outcomes": judgement["outcomes"],
        "numbers": summaries(results.tables),
        "quick": [{key: row[key] for key in COMPARED} for row in quick],
        "samples": judgement["samples"],
    }


def judged(results: Results, claims: Sequence[Claim]) -> Numbers:
    """Return the claims with their verdicts, a row for each comparison, and the numbers of the samples behind them."""
    rows = outcomes(claims, results)
    by_claim = [[row for row in rows if row["claim"] == at] for at in range(len(claims))]
    terms = dict.fromkeys(Term(*term) for row in rows for _, *term in row["terms"])
    return {
        "claims": [
            {"text": claim.text, "source": claim.source, "verdict": verdict(claim, rows), "untested": claim.untested}
            for claim, rows in zip(claims, by_claim, strict=True)
        ],
        "outcomes": rows,
        "samples": [sample_numbers(term, results) for term in terms],
    }


def sample_numbers(term: Term, results: Results) -> dict[str, Any]:
    """Return a number of every sample, compactly: the ratios of its parts and their weights, seed after seed.

    `ratios` and `weights` are base64 of zlib of little-endian 32-bit integers in units of 10^-`DECIMALS`, of shape
    (sample, part) with `counts` samples of each seed. The metric of samples is the mean over parts of the mean of the
    ratios, weighted by the weights; without weights all are 1.
    """
    parts = np.concatenate(results.numbers(term))
    weights = parts[..., 1]
    return {
        **term._asdict(),
        "counts": [len(of_seed) for of_seed in results.numbers(term)],
        "parts": parts.shape[1],
        "ratios": _encoded(parts[..., 0] / weights),
        "weights": "" if (weights == 1).all() else _encoded(weights),
    }


def _encoded(values: np.ndarray) -> str:
    units = np.rint(values * 10**DECIMALS).astype("<i4")
    return base64.b64encode(zlib.compress(units.tobytes(), 9)).decode()


def stored(numbers: Numbers) -> str:
    """Return a record as JSON with one line for each row."""
    text = partial(json.dumps, separators=(",", ":"))
    lines = []
    for key, value in numbers.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            body = ",\n".join(map(text, value))
            lines.append(f"{text(key)}:[\n{body}\n]")
        else:
            lines.append(f"{text(key)}:{text(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(name: str) -> Numbers:
    """Return the record of a study.

    Raises `ResultFileError` if there is none.
    """
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise ResultFileError(f'{path} is absent; record the study with `make evidence ARGS="{name} --write"`.')
    return json.loads(path.read_text())


def differences(repeated: Iterable[Mapping[str, Any]], recorded: Iterable[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Compare the numbers of a repeated run with recorded ones: return their count, and those that differ, in words.

    A number that only one of the two has is a difference.
    """
    first, second = (
        {(r["table"], r["model"], r["method"], r["metric"]): r["values"] for r in rows} for rows in (repeated, recorded)
    )
    lines = []
    for key in sorted(first.keys() | second.keys()):
        one, other = first.get(key), second.get(key)
        if one is None or other is None:
            lines.append(f"{' '.join(key)}: {'not recorded' if other is None else 'not measured'}")
        elif len(one) != len(other) or any(abs(a - b) > DIFFERENT for a, b in zip(one, other, strict=True)):
            lines.append(f"{' '.join(key)}: {one}, recorded {other}")
    return len(first.keys() | second.keys()), lines
