"""The report of comparisons: a text, and a folder with a page, a JSON file and, for tasks, a picture."""

import json
import os
import platform
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unilinattn.analysis.comparison import (
    AXES,
    RANDOM,
    WIDTH,
    ModelComparison,
    Row,
    layer_rows,
    model_rows,
    remarks,
    similarity_rows,
)
from unilinattn.analysis.report_folder import FORMAT, NUMBERS, PAGE, PICTURE
from unilinattn.analysis.similarity import LayerSimilarity
from unilinattn.evaluation.measures import METRICS
from unilinattn.evaluation.perturbation import TENTHS, PerturbationCurve
from unilinattn.evaluation.scorers import BASELINES, DRAWS
from unilinattn.evaluation.trained import CORRELATION, INTERVENTION, INTERVENTION_SEED, REPLACEMENTS
from unilinattn.examples import TASKS
from unilinattn.examples.tasks import HELD_OUT_SEED, SELECTION_SEED
from unilinattn.optional import import_extra
from unilinattn.results import pages, plots
from unilinattn.results.attribution import Attribution
from unilinattn.results.boards import cell
from unilinattn.results.comparison import Comparison
from unilinattn.results.scores import count_kinds
from unilinattn.viz import blocks
from unilinattn.viz.board import Cell, board
from unilinattn.viz.curves import Curves, curves
from unilinattn.viz.image import pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT_VERSION = "3"
"""Version 3: the fields of `ModelMeasurements`, and the table of `evaluate`."""

DEFINITIONS = {
    "accuracy": "share of right answers on held-out sequences",
    "error": "||op(x) - y|| / ||y|| of a layer's frozen operator and the model's own output y, on the worst sample; 0 "
    "means equal bit for bit",
    "distance": "mean over rows i of sum_j p_ij |i - j|, in tokens, where p_ij = |a_ij| / sum_j |a_ij|",
    "entropy": "mean over rows of -sum_j p_ij log p_ij, in nats",
    "sparsity": "Hoyer's (sqrt(n) - ||a_i||_1 / ||a_i||_2) / (sqrt(n) - 1) of a row of n keys, 0 for even weights",
    "memory": "smallest distance within which a row has 90 % of its mass, in tokens",
    "rank correlation": "Spearman's correlation of the absolute weights of each row of two maps, averaged over rows, "
    "then over samples, then over all pairs of a layer of each model",
    "divergence": "Jensen-Shannon divergence of each row's distributions, in bits from 0 to 1, averaged alike",
    "deletion": "area under the probability of the model's own prediction while tokens or patches are removed, the "
    "highest scores first, averaged over samples. It is small for a method that finds those on which the prediction "
    "depends",
    "hit_at_1": "how often the best key is the one that holds the answer, averaged over queries like the next metrics; "
    "the candidates of a query are the keys before it",
    "ap": "average precision of the ranked keys",
    "auc": "the chance that the key of the answer scores above another key",
    CORRELATION: "rank correlation with the row intervention. Most keys have next to no effect, and their order lowers "
    "it even for scores that find the answer",
    "layer": "the scored layer, the best by ap on other sequences; all: the method composes or averages the layers",
    RANDOM: f"random scores, the mean of {DRAWS} draws",
    "recency": "a key's position",
    "primacy": "the negative of a key's position",
    INTERVENTION: "how much the log-probability of the answer falls if the key's token is replaced, the mean over "
    f"{REPLACEMENTS} other tokens",
}
"""Definitions of the numbers and of the rows that are no methods."""


def definitions(comparison: ModelComparison) -> dict[str, str]:
    """Return the definitions of the numbers in a comparison."""
    named = {row[name] for row in comparison.table for name in ("metric", "method")}
    absent = {*METRICS, CORRELATION, *BASELINES, INTERVENTION} - named | (set() if comparison.task else {"accuracy"})
    return {name: meaning for name, meaning in DEFINITIONS.items() if name not in absent}


def text(comparisons: Sequence[ModelComparison]) -> str:
    """Return the tables of comparisons, of tasks under their names, and the definitions of the numbers."""
    tables = "\n\n".join(
        f"{comparison.task}\n\n{comparison}" if comparison.task else str(comparison) for comparison in comparisons
    )
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in definitions(comparisons[0]).items())
    return f"{tables}\n\n{textwrap.fill(f'{meanings}.', WIDTH)}"


def numbers(comparisons: Sequence[ModelComparison]) -> dict[str, Any]:
    """Return the content of `compare.json`: plain values, without the machine's name or paths."""
    versions: dict[str, str] = {}
    for comparison in comparisons:
        for model in comparison.models.values():
            versions |= model.versions
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "definitions": definitions(comparisons[0]),
        "comparisons": [
            {
                "task": comparison.task or None,
                f"{comparison.unit}s": list(comparison.samples),
                "models": {
                    name: {**_plain(model), "worst_error": _plain(model.worst_error)}
                    for name, model in comparison.models.items()
                },
                "table": [dict(row) for row in comparison.table.summary()],
                "similarity": _plain(comparison.similarity),
                "compared": [{"models": list(pair), "samples": count} for pair, count in comparison.compared.items()],
                "not_compared": dict(comparison.not_compared),
                "options": {"scope": comparison.scope, "masking": comparison.masking},
            }
            for comparison in comparisons
        ],
        "sequences": _plain(comparisons[0].counts),
        "seeds": {"selection": SELECTION_SEED, "held_out": HELD_OUT_SEED, "intervention": INTERVENTION_SEED},
        "versions": {"python": platform.python_version(), **versions},
        "machine": machine(),
    }


def _plain(value: Any) -> Any:
    """Return JSON values of a dataclass and its fields, with None for NaN."""
    if is_dataclass(value):
        value = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if value != value else value


def machine() -> dict[str, Any]:
    """Return the machine's system, processor architecture, cores and threads, without its name."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def page(comparisons: Sequence[ModelComparison]) -> str:
    """Return the report as a self-contained HTML page."""
    comparison = comparisons[0]
    tasks = [each.task for each in comparisons if each.task]
    if tasks:
        title = f"Trained models side by side: {', '.join(tasks)}"
        lead = (
            "Small models, each trained on a task whose answer is known for every query (outlined). The first held-out "
            "sequence of each task; a query's own key is blank."
        )
    else:
        count, title = len(comparison.samples), f"{', '.join(comparison.models)} side by side"
        lead = f"{count} {comparison.unit}{'s' if count > 1 else ''}, for which no answer is known."
    sections = [
        (f"{each.task}: {heading}" if len(tasks) > 1 else heading, body)
        for each in comparisons
        for heading, body in _sections(each)
    ]
    about = [*map(blocks.paragraph, (remark for each in comparisons for remark in remarks(each)))]
    about += [blocks.facts(definitions(comparison)), _environment(comparisons)]
    if not tasks:
        about.append(blocks.details(f"{comparison.unit.title()}s", *map(blocks.paragraph, comparison.samples)))
    return blocks.page(title, [*sections, ("How it was measured", "".join(about))], lead=lead)


def _environment(comparisons: Sequence[ModelComparison]) -> str:
    report = numbers(comparisons)
    names = (*(("sequences", "seeds") if comparisons[0].task else ()), "versions", "machine")
    return blocks.facts({name: ", ".join(f"{key} {value}" for key, value in report[name].items()) for name in names})


def picture(comparisons: Sequence[ModelComparison], path: Path) -> None:
    """Write the picture: the tasks side by side, one column per model, one row per method at its scored layer.

    Raises `MissingExtraError` if matplotlib is missing.
    """
    drawn = [_pixels(_task_figure(comparison)) for comparison in comparisons]
    height = max(image.shape[0] for image in drawn)
    padded = [np.pad(i, ((0, height - i.shape[0]), (0, 0), (0, 0)), constant_values=255) for i in drawn]
    import_extra("matplotlib.image", "plot").imsave(path, np.ascontiguousarray(np.concatenate(padded, axis=1)))


def write(folder: Path, comparisons: Sequence[ModelComparison]) -> None:
    """Write the page, the JSON file and, for tasks, the picture into an existing folder.

    Raises `MissingExtraError` if matplotlib is missing.
    """
    (folder / PAGE).write_text(page(comparisons), encoding="utf-8")
    if comparisons[0].task:
        picture(comparisons, folder / PICTURE)
    plain = json.dumps(numbers(comparisons), indent=2, allow_nan=False)
    (folder / NUMBERS).write_text(plain + "\n", encoding="utf-8")


def _sections(comparison: ModelComparison) -> Iterator[tuple[str, str]]:
    """Yield the headings and the bodies of a comparison: scores, models, methods, similarity of maps, layers."""
    if comparison.images:
        names = [image.name for image in comparison.on_images]
        heading = "Scores on the images" if len(names) == len(comparison.images) else f"Scores on {len(names)} images"
        predictions = [(image.name, *image.predicted.values()) for image in comparison.on_images]
        yield heading, blocks.table(["predicted class of", *comparison.models], predictions) + _image_board(comparison)
    elif comparison.shown is not None:
        yield (
            f"Scores on the first {comparison.unit}",
            _task_board(comparison) if comparison.task else pages.comparison(comparison.shown),
        )
    yield "Models", _table(model_rows(comparison))
    if comparison.task:
        yield "Which method finds the answer", _methods(comparison)
    else:
        tables = [_table(_curves(name, model.curves)) for name, model in comparison.models.items()]
        folded = blocks.details("Probability of the prediction by fraction removed", *tables)
        yield (
            f"Which {AXES[comparison.unit][0].split()[0]} the prediction depends on",
            _plots(comparison) + _methods(comparison) + folded,
        )
    matrices = () if comparison.similarity is None else _matrices(comparison.similarity)
    yield "Similarity of the maps", _table(similarity_rows(comparison)) + blocks.details("Every two layers", *matrices)
    yield "Layers", _table(layer_rows(comparison))


def _methods(comparison: ModelComparison) -> str:
    """Return the table of the metrics, in which the best method of each model by each metric is emphasised."""
    head, *rows = comparison.table.cells()
    methods = [index for index, row in enumerate(rows) if row[1] not in (*BASELINES, INTERVENTION)]
    strong = set()
    for column, name in enumerate(head[3:], 3):
        best = max if name == CORRELATION or METRICS[name].larger_is_better else min
        for model in comparison.models:
            values = {index: rows[index][column] for index in methods if rows[index][0] == model}
            strong |= {(index, column) for index, value in values.items() if value == best(values.values())}
    return blocks.table(head, rows, strong=strong)


def _image_board(comparison: ModelComparison) -> str:
    """Return the scores of each model and method over the image as the model read it, with a picker for the image."""
    cells: dict[tuple[str, str], Cell] = {}
    kinds = {name: count_kinds(model.kinds) for name, model in comparison.models.items()}
    for number, image in enumerate(comparison.on_images):
        results = [] if image.results is None else list(image.results.results())
        # The methods of a model have one grid.
        grids = {model: result.grid for model, _, result in results if result.grid is not None}
        below = {model: pixels(image.read[model], grid) for model, grid in grids.items()}
        for model, method, result in results:
            drawn = cell(result, method, model, batches=[0], image=below.get(model))
            pictures = [replace(picture, sequence=number) for picture in drawn.pictures]
            if earlier := cells.get((method, model)):
                pictures = [*earlier.pictures, *pictures]
            cells[method, model] = replace(drawn, pictures=pictures)
    names = ("Image", [image.name for image in comparison.on_images])
    hint = "compare fewer models or methods"
    return board([*cells.values()], columns=kinds, sequences=names, layer_hint=hint) if cells else ""


def _plots(comparison: ModelComparison) -> str:
    """Return the deletion curves of each model as plots."""
    names, percent = AXES[comparison.unit], [100 * fraction for fraction in TENTHS]
    drawn = []
    for name, model in comparison.models.items():
        series = {row: curve.mean.tolist() for row, curve in model.curves.items()}
        notes = {row: f"area {curve.area:.3f}" for row, curve in model.curves.items()}
        if series:
            drawn.append(Curves(name, series, percent, names, RANDOM, notes))
    return curves(drawn)


def _table(rows: Iterable[Row]) -> str:
    head, *lines = rows
    return blocks.table([str(name) for name in head], lines)


def _curves(name: str, curves: Mapping[str, PerturbationCurve]) -> Iterator[Row]:
    yield name, *(f"{fraction:.0%}" for fraction in TENTHS), "area"
    for row, curve in curves.items():
        yield row, *curve.mean.tolist(), curve.area


def _matrices(similarity: LayerSimilarity) -> Iterator[str]:
    """Yield the tables of rank correlation and divergence of every two layers."""
    for title, values in (("rank correlation", similarity.rank_correlation), ("divergence", similarity.divergence)):
        rows = zip(similarity.names, _plain(values), strict=True)
        cells = [(name, *("-" if value is None else value for value in line)) for name, line in rows]
        yield blocks.table([title, *similarity.names], cells)


def _task_board(comparison: ModelComparison) -> str:
    """Return the maps of a task: models in columns, methods in rows, each at its scored layer first."""
    assert comparison.shown is not None
    precisions = {(row["model"], row["method"]): row for row in comparison.table.summary().select(metric="ap")}
    cells = []
    for row in comparison.shown.methods:
        for model in comparison.models:
            result, scored = comparison.shown[model][row], precisions[model, row]
            notes, start = [f"AP over all sequences {scored['value']:.3f}"], 0
            if "layer" in result.dims:
                start = result.layers.index(scored["layer"])
                notes = [notes[0] if name == scored["layer"] else "layer not scored" for name in result.layers]
            drawn = cell(result, row, model, batches=[0], expected=comparison.expected, start=start, notes=notes)
            # A query's own key is blank, so there is none to leave out of the scale.
            cells.append(replace(drawn, apart=False))
    columns = {
        name: f"{count_kinds(model.kinds)}, accuracy {model.accuracy:.1%}" for name, model in comparison.models.items()
    }
    return board(cells, columns=columns, layer_hint="compare fewer models or methods for all scores")


def _task_figure(comparison: ModelComparison) -> "Figure":
    assert comparison.shown is not None
    scored = {(row["model"], row["method"]): row["layer"] for row in comparison.table}
    # Panels of all tasks have one size only without labels of tokens.
    panels: dict[str, dict[str, Attribution]] = {model: {} for model in comparison.shown}
    for model, row, result in comparison.shown.results():
        layer = result.select(layer=scored[model, row]) if "layer" in result.dims else result
        panels[model][row] = replace(layer, tokens=None)
    figure = plots.comparison(Comparison(panels), expected=comparison.expected)
    length = TASKS[comparison.task].length
    title = f"{comparison.task}, {length} tokens: each method at its scored layer, the known answer outlined"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def _pixels(figure: "Figure") -> np.ndarray:
    canvas = import_extra("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())
