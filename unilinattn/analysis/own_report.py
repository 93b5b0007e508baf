"""The report on `compare_models`: a folder with a page and a JSON file."""

import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from unilinattn.analysis.own_results import (
    DRAWS,
    ModelComparison,
    ModelMeasurements,
    Row,
    area_rows,
    layer_rows,
    model_rows,
    remarks,
    similarity_rows,
)
from unilinattn.analysis.statistics import STATISTICS
from unilinattn.evaluation import report
from unilinattn.evaluation.perturbation import TENTHS, PerturbationCurve
from unilinattn.viz import blocks

DEFINITIONS = {
    "error": "||op(x) - y|| / ||y|| of a layer's frozen operator and the model's own output y, on the worst text",
    "distance": "mean over rows i of sum_j p_ij |i - j|, in tokens, where p_ij = |a_ij| / sum_j |a_ij|",
    "entropy": "mean over rows of -sum_j p_ij log p_ij, in nats",
    "sparsity": "Hoyer's (sqrt(n) - ||a_i||_1 / ||a_i||_2) / (sqrt(n) - 1) of a row of n keys, 0 for even weights",
    "memory": "smallest distance within which a row has 90 % of its mass, in tokens",
    "rank correlation": "Spearman's correlation of the absolute weights of each row of two maps, averaged over rows, "
    "then over texts, then over all pairs of a layer of each model",
    "divergence": "Jensen-Shannon divergence of each row's distributions, in bits from 0 to 1, averaged alike",
    "deletion": "probability of the model's own prediction after the last token, while the tokens before it are "
    "removed, the highest scores first; its area over the fraction removed, averaged over texts. It is small for a "
    "method that finds the tokens on which the prediction depends",
}
"""Definition of each number."""


def caption() -> str:
    """Return the definitions of the numbers as one text."""
    return "; ".join(f"{name}: {meaning}" for name, meaning in DEFINITIONS.items()) + "."


def numbers(found: ModelComparison) -> dict[str, Any]:
    """Return the content of the JSON file: plain values, without the machine's name or paths."""
    similarity = found.similarity
    return {
        "format": report.FORMAT,
        "format_version": report.FORMAT_VERSION,
        "definitions": DEFINITIONS,
        "texts": list(found.texts),
        "models": {name: _model(one) for name, one in found.models.items()},
        "similarity": None
        if similarity is None
        else {
            "layers": list(similarity.names),
            "rank_correlation": _plain(similarity.rank_correlation.tolist()),
            "divergence": _plain(similarity.divergence.tolist()),
            "texts": [{"models": list(pair), "texts": count} for pair, count in found.compared.items()],
        },
        "not_compared": dict(found.not_compared),
        "options": {"scope": found.scope, "masking": found.masking, "fractions": list(TENTHS), "random_draws": DRAWS},
        "versions": {
            "python": platform.python_version(),
            **{name: version for one in found.models.values() for name, version in one.versions.items()},
        },
        "machine": report.machine(),
    }


def page(found: ModelComparison) -> str:
    """Return the report as a self-contained HTML page."""
    count = len(found.texts)
    lead = (
        f"{count} text{'s' if count > 1 else ''}, for which no answer is known. Each model is measured by itself: how "
        "exact its operators are, what its maps look like, and which tokens its own prediction depends on."
    )
    curves = [_table(_curves(name, one)) for name, one in found.models.items()]
    scores = [] if found.shown is None else [("Scores on the first text", found.shown._repr_html_())]
    sections = [
        *scores,
        ("Models", _table(model_rows(found))),
        (
            "Which tokens the prediction depends on",
            _table(area_rows(found)) + blocks.details("Probability of the prediction by fraction removed", *curves),
        ),
        (
            "Similarity of the maps",
            _table(similarity_rows(found)) + blocks.details("Every two layers", *map(_table, _matrices(found))),
        ),
        ("Layers", _table(layer_rows(found))),
        (
            "How it was measured",
            "".join(blocks.paragraph(remark) for remark in remarks(found))
            + blocks.facts(DEFINITIONS)
            + blocks.details("Texts", *(blocks.paragraph(text) for text in found.texts)),
        ),
    ]
    return blocks.page(f"{', '.join(found.models)} side by side", sections, lead=lead)


def write(folder: Path, found: ModelComparison) -> None:
    """Write the page and the JSON file into an existing folder."""
    (folder / report.PAGE).write_text(page(found), encoding="utf-8")
    (folder / report.NUMBERS).write_text(json.dumps(numbers(found), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _table(rows: Iterable[Row]) -> str:
    head, *lines = rows
    return blocks.table([str(name) for name in head], lines)


def _curves(name: str, one: ModelMeasurements) -> Iterator[Row]:
    yield name, *(f"{fraction:.0%}" for fraction in TENTHS), "area"
    for row, curve in one.deletion.items():
        if isinstance(curve, PerturbationCurve):
            yield row, *curve.mean.tolist(), curve.area


def _matrices(found: ModelComparison) -> Iterator[Iterator[Row]]:
    if found.similarity is not None:
        for title in ("rank_correlation", "divergence"):
            yield _matrix(title.replace("_", " "), found.similarity.names, getattr(found.similarity, title).tolist())


def _matrix(title: str, names: Sequence[str], values: Sequence[Sequence[float]]) -> Iterator[Row]:
    yield title, *names
    for name, line in zip(names, values, strict=True):
        yield name, *("-" if value != value else value for value in line)


def _model(one: ModelMeasurements) -> dict[str, Any]:
    measured = {} if isinstance(one.statistics, str) else {each.layer: each for each in one.statistics}
    return {
        "class": one.host,
        "tokens": list(one.tokens),
        "reconstruction_error": _number(one.worst_error),
        "layers": [
            {
                "name": layer,
                "kind": kind,
                "reconstruction_error": _number(one.reconstruction_error[layer]),
                "statistics": {key: [float(value) for value in getattr(measured[layer], key)] for key in STATISTICS}
                if layer in measured
                else None,
            }
            for layer, kind in zip(one.layers, one.kinds, strict=True)
        ],
        "deletion": {
            row: {"area": curve.area, "mean": curve.mean.tolist(), "texts": curve.values.tolist()}
            for row, curve in one.deletion.items()
            if isinstance(curve, PerturbationCurve)
        },
        "not_measured": {
            **({"statistics": one.statistics} if isinstance(one.statistics, str) else {}),
            **{row: reason for row, reason in one.deletion.items() if isinstance(reason, str)},
        },
    }


def _plain(values: list[list[float]]) -> list[list[float | None]]:
    return [[_number(value) for value in row] for row in values]


def _number(value: float | None) -> float | None:
    """Return a number, None for NaN, which JSON lacks."""
    return None if value != value else value
