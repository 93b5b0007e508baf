"""The report on `compare_models`: text tables, plain values, and a folder with a page and a JSON file."""

import json
import platform
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from unilinattn.analysis.own_models import DRAWS, RANDOM, ModelComparison, ModelMeasurements
from unilinattn.analysis.pictures import text_table
from unilinattn.analysis.statistics import STATISTICS
from unilinattn.evaluation import report
from unilinattn.evaluation.perturbation import TENTHS, PerturbationCurve
from unilinattn.results.scores import count_kinds
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

WIDTH = 118

Row = tuple[object, ...]


def text(found: ModelComparison) -> str:
    """Return the tables as text."""
    tables = [_text(rows) for rows in (_models(found), _layers(found), _similarities(found), _areas(found))]
    notes = [*_remarks(found), "; ".join(f"{name}: {meaning}" for name, meaning in DEFINITIONS.items()) + "."]
    return "\n\n".join([*tables, *(textwrap.fill(note, WIDTH) for note in notes)])


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
    sections = [
        ("Models", _table(_models(found))),
        (
            "Which tokens the prediction depends on",
            _table(_areas(found)) + blocks.details("Probability of the prediction by fraction removed", *curves),
        ),
        (
            "Similarity of the maps",
            _table(_similarities(found)) + blocks.details("Every two layers", *map(_table, _matrices(found))),
        ),
        ("Layers", _table(_layers(found))),
        *([] if found.shown is None else [("Scores on the first text", found.shown._repr_html_())]),
        (
            "How it was measured",
            "".join(blocks.paragraph(remark) for remark in _remarks(found))
            + blocks.facts(DEFINITIONS)
            + blocks.details("Texts", *(blocks.paragraph(text) for text in found.texts)),
        ),
    ]
    return blocks.page(f"{', '.join(found.models)} side by side", sections, lead=lead)


def write(folder: Path, found: ModelComparison) -> None:
    """Write the page and the JSON file into an existing folder."""
    (folder / report.PAGE).write_text(page(found), encoding="utf-8")
    (folder / report.NUMBERS).write_text(json.dumps(numbers(found), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _text(rows: Iterable[Row]) -> str:
    head, *lines = rows
    # Names come before the numbers.
    texts = next((place for place, cell in enumerate(lines[0]) if not isinstance(cell, str)), len(head))
    return text_table([str(name) for name in head], [[_cell(cell) for cell in row] for row in lines], texts=texts)


def _table(rows: Iterable[Row]) -> str:
    head, *lines = rows
    return blocks.table([str(name) for name in head], lines)


def _cell(value: object) -> str:
    """Return the text of a cell, of numbers as in `blocks.table`."""
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"
    return str(value)


def _models(found: ModelComparison) -> Iterator[Row]:
    yield "model", "class", "mixers", "tokens", "worst error"
    for name, one in found.models.items():
        yield name, one.host, count_kinds(one.kinds), sum(one.tokens), _or_dash(one.worst_error)


def _layers(found: ModelComparison) -> Iterator[Row]:
    yield "model", "layer", "mixer", "error", *STATISTICS
    for name, one in found.models.items():
        measured = {} if isinstance(one.statistics, str) else {each.layer: each for each in one.statistics}
        for layer, kind in zip(one.layers, one.kinds, strict=True):
            each = measured.get(layer)
            values = ("-" if each is None else float(getattr(each, key).mean()) for key in STATISTICS)
            yield name, layer, kind, _or_dash(one.reconstruction_error[layer]), *values


def _similarities(found: ModelComparison) -> Iterator[Row]:
    yield "maps of", "and of", "texts", "rank correlation", "divergence"
    for first, second in combinations_with_replacement(found.models, 2):
        values = found.between(first, second) or ("-", "-")
        yield first, "its other layers" if first == second else second, found.compared.get((first, second), 0), *values


def _areas(found: ModelComparison) -> Iterator[Row]:
    yield "area of deletion", *found.models
    rows = dict.fromkeys(row for one in found.models.values() for row in one.deletion)
    for row in sorted(rows, key=lambda row: row != RANDOM):
        curves = (one.deletion.get(row) for one in found.models.values())
        yield row, *(each.area if isinstance(each, PerturbationCurve) else "-" for each in curves)


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


def _remarks(found: ModelComparison) -> Iterator[str]:
    """Yield what was not measured, and why."""
    for name, one in found.models.items():
        if isinstance(one.statistics, str):
            yield f"No statistics of {name}: {one.statistics}"
        for row, reason in one.deletion.items():
            if isinstance(reason, str):
                yield f"No {row} of {name}: {reason}"
    for name, reason in found.not_compared.items():
        yield f"No similarity of {name}: {reason}"
    for first, second in combinations_with_replacement(found.models, 2):
        count, most = found.compared.get((first, second), 0), len(found.texts)
        if count < most and not {first, second} & found.not_compared.keys():
            yield (
                f"The maps of {first} and {second} are compared on {count} of {most} texts, those that both tokenizers "
                "divide into the same tokens: elsewhere a position is not the same token."
            )


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


def _or_dash(value: float | None) -> float | str:
    return "-" if value is None else value
