"""The report on `compare_models`: a folder with a page and a JSON file."""

import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unilinattn.analysis.own_results import (
    AXES,
    DRAWS,
    RANDOM,
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
from unilinattn.results import pages
from unilinattn.results.boards import cell
from unilinattn.results.scores import count_kinds
from unilinattn.viz import blocks
from unilinattn.viz.board import Cell, board
from unilinattn.viz.curves import Curves, curves
from unilinattn.viz.image import pixels

DEFINITIONS = {
    "error": "||op(x) - y|| / ||y|| of a layer's frozen operator and the model's own output y, on the worst {unit}",
    "distance": "mean over rows i of sum_j p_ij |i - j|, in tokens, where p_ij = |a_ij| / sum_j |a_ij|",
    "entropy": "mean over rows of -sum_j p_ij log p_ij, in nats",
    "sparsity": "Hoyer's (sqrt(n) - ||a_i||_1 / ||a_i||_2) / (sqrt(n) - 1) of a row of n keys, 0 for even weights",
    "memory": "smallest distance within which a row has 90 % of its mass, in tokens",
    "rank correlation": "Spearman's correlation of the absolute weights of each row of two maps, averaged over rows, "
    "then over {unit}s, then over all pairs of a layer of each model",
    "divergence": "Jensen-Shannon divergence of each row's distributions, in bits from 0 to 1, averaged alike",
    "deletion": "probability of {prediction} removed, the highest scores first; its area over the fraction removed, "
    "averaged over {unit}s. It is small for a method that finds the {parts} on which the prediction depends",
}
"""Definition of each number, on texts or on images."""

UNITS = {
    "text": {
        "unit": "text",
        "prediction": "the model's own prediction after the last token, while the tokens before it are",
        "parts": "tokens",
    },
    "image": {
        "unit": "image",
        "prediction": "the class that the model predicts, while patches of the image are",
        "parts": "patches",
    },
}
"""The words of the definitions."""


def definitions(found: ModelComparison) -> dict[str, str]:
    """Return the definition of each number."""
    return {name: meaning.format(**UNITS[found.unit]) for name, meaning in DEFINITIONS.items()}


def caption(found: ModelComparison) -> str:
    """Return the definitions of the numbers as one text."""
    return "; ".join(f"{name}: {meaning}" for name, meaning in definitions(found).items()) + "."


def numbers(found: ModelComparison) -> dict[str, Any]:
    """Return the content of the JSON file: plain values, without the machine's name or paths."""
    similarity = found.similarity
    return {
        "format": report.FORMAT,
        "format_version": report.FORMAT_VERSION,
        "definitions": definitions(found),
        f"{found.unit}s": list(found.samples),
        "models": {name: _model(one) for name, one in found.models.items()},
        "similarity": None
        if similarity is None
        else {
            "layers": list(similarity.names),
            "rank_correlation": _plain(similarity.rank_correlation.tolist()),
            "divergence": _plain(similarity.divergence.tolist()),
            f"{found.unit}s": [
                {"models": list(pair), f"{found.unit}s": count} for pair, count in found.compared.items()
            ],
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
    count, parts = len(found.samples), UNITS[found.unit]["parts"]
    lead = (
        f"{count} {found.unit}{'s' if count > 1 else ''}, for which no answer is known. Each model is measured by "
        f"itself: how exact its operators are, what its maps look like, and which {parts} its prediction depends on."
    )
    tables = [_table(_curves(name, one)) for name, one in found.models.items()]
    sections = [
        *_scores(found),
        ("Models", _table(model_rows(found))),
        (
            f"Which {parts} the prediction depends on",
            _plots(found)
            + _table(area_rows(found))
            + blocks.details("Probability of the prediction by fraction removed", *tables),
        ),
        (
            "Similarity of the maps",
            _table(similarity_rows(found)) + blocks.details("Every two layers", *map(_table, _matrices(found))),
        ),
        ("Layers", _table(layer_rows(found))),
        (
            "How it was measured",
            "".join(blocks.paragraph(remark) for remark in remarks(found))
            + blocks.facts(definitions(found))
            + blocks.details(f"{found.unit.title()}s", *(blocks.paragraph(name) for name in found.samples)),
        ),
    ]
    return blocks.page(f"{', '.join(found.models)} side by side", sections, lead=lead)


def write(folder: Path, found: ModelComparison) -> None:
    """Write the page and the JSON file into an existing folder."""
    (folder / report.PAGE).write_text(page(found), encoding="utf-8")
    (folder / report.NUMBERS).write_text(json.dumps(numbers(found), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _scores(found: ModelComparison) -> Iterator[tuple[str, str]]:
    """Yield the section of the scores on the first text, or on the first images over their pictures."""
    if found.images:
        names = [one.name for one in found.on_images]
        heading = "Scores on the images" if len(names) == len(found.images) else f"Scores on {len(names)} images"
        predictions = [(one.name, *one.predicted.values()) for one in found.on_images]
        yield heading, blocks.table(["predicted class of", *found.models], predictions) + _image_board(found)
    elif found.shown is not None:
        yield "Scores on the first text", pages.comparison(found.shown)


def _image_board(found: ModelComparison) -> str:
    """Return the scores of each model and method over the image as the model read it, with a picker for the image."""
    pictures: dict[tuple[str, str], list[Cell]] = {}
    kinds = {name: count_kinds(one.kinds) for name, one in found.models.items()}
    for at, image in enumerate(found.on_images):
        results = [] if image.results is None else list(image.results.results())
        # The methods of a model have one grid.
        grids = {model: result.grid for model, _, result in results if result.grid is not None}
        below = {model: pixels(image.read[model], grid) for model, grid in grids.items()}
        for model, method, result in results:
            one = cell(result, method, model, batches=[0], image=below.get(model))
            moved = [replace(picture, sequence=at) for picture in one.pictures]
            pictures.setdefault((method, model), []).append(replace(one, pictures=moved))
    cells = [
        replace(cells[0], pictures=[picture for one in cells for picture in one.pictures])
        for cells in pictures.values()
    ]
    names = ("Image", [image.name for image in found.on_images])
    return board(cells, columns=kinds, sequences=names, layer_hint="compare fewer models or methods") if cells else ""


def _plots(found: ModelComparison) -> str:
    """Return the deletion curves of each model as plots."""
    names = AXES[found.unit]
    plots = []
    for model, one in found.models.items():
        lines = {row: curve for row, curve in one.deletion.items() if isinstance(curve, PerturbationCurve)}
        series = {row: curve.mean.tolist() for row, curve in lines.items()}
        notes = {row: f"area {curve.area:.3f}" for row, curve in lines.items()}
        if series:
            plots.append(Curves(model, series, [100 * fraction for fraction in TENTHS], names, RANDOM, notes))
    return curves(plots)


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
        "patches": one.patches or None,
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
