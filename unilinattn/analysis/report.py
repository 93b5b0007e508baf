"""The report of comparisons: a text, and a folder with a page, a JSON file and, for tasks, a picture."""

import json
import os
import platform
import shutil
import textwrap
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    ModelMeasurements,
    Row,
    layer_rows,
    model_rows,
    remarks,
    similarity_rows,
)
from unilinattn.errors import ResultFileError
from unilinattn.evaluation.measures import METRICS
from unilinattn.evaluation.perturbation import TENTHS, PerturbationCurve
from unilinattn.evaluation.scorers import BASELINES, DRAWS
from unilinattn.evaluation.trained import CORRELATION, INTERVENTION, INTERVENTION_SEED, REPLACEMENTS
from unilinattn.examples import TASKS
from unilinattn.examples.tasks import HELD_OUT_SEED, SELECTION_SEED
from unilinattn.optional import import_extra
from unilinattn.results import pages, plots
from unilinattn.results.boards import cell
from unilinattn.results.comparison import Comparison
from unilinattn.results.scores import count_kinds
from unilinattn.viz import blocks
from unilinattn.viz.board import Cell, board
from unilinattn.viz.curves import Curves, curves
from unilinattn.viz.image import pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "unilinattn.report"
FORMAT_VERSION = "3"
"""Version 3: the fields of `ModelMeasurements`, and the table of `evaluate`."""

PAGE, PICTURE, NUMBERS = "index.html", "compare.png", "compare.json"
"""The files of a report; its folder holds no others."""

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


def definitions(found: ModelComparison) -> dict[str, str]:
    """Return the definitions of the numbers in a comparison."""
    named = {row[name] for row in found.table for name in ("metric", "method")}
    absent = {*METRICS, CORRELATION, *BASELINES, INTERVENTION} - named | (set() if found.task else {"accuracy"})
    return {name: meaning for name, meaning in DEFINITIONS.items() if name not in absent}


def text(comparisons: Sequence[ModelComparison]) -> str:
    """Return the tables of comparisons, of tasks under their names, and the definitions of the numbers."""
    tables = "\n\n".join(f"{found.task}\n\n{found}" if found.task else str(found) for found in comparisons)
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in definitions(comparisons[0]).items())
    return f"{tables}\n\n{textwrap.fill(f'{meanings}.', WIDTH)}"


def numbers(comparisons: Sequence[ModelComparison]) -> dict[str, Any]:
    """Return the content of `compare.json`: plain values, without the machine's name or paths."""
    measured = [one for found in comparisons for one in found.models.values()]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "definitions": definitions(comparisons[0]),
        "comparisons": [
            {
                "task": found.task or None,
                f"{found.unit}s": list(found.samples),
                "models": {
                    name: {**_plain(one), "worst_error": _plain(one.worst_error)} for name, one in found.models.items()
                },
                "table": [dict(row) for row in found.table.summary()],
                "similarity": _plain(found.similarity),
                "compared": [{"models": list(pair), "samples": count} for pair, count in found.compared.items()],
                "not_compared": dict(found.not_compared),
                "options": {"scope": found.scope, "masking": found.masking},
            }
            for found in comparisons
        ],
        "sequences": _plain(comparisons[0].counts),
        "seeds": {"selection": SELECTION_SEED, "held_out": HELD_OUT_SEED, "intervention": INTERVENTION_SEED},
        "versions": {
            "python": platform.python_version(),
            **{name: version for one in measured for name, version in one.versions.items()},
        },
        "machine": machine(),
    }


def _plain(value: Any) -> Any:
    """Return JSON values of a dataclass and its fields, with None for NaN."""
    if is_dataclass(value):
        value = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
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
    found = comparisons[0]
    tasks = [each.task for each in comparisons if each.task]
    if tasks:
        title = f"Trained models side by side: {', '.join(tasks)}"
        lead = (
            "Small models, each trained on a task whose answer is known for every query (outlined). The first held-out "
            "sequence of each task; a query's own key is blank."
        )
    else:
        count, title = len(found.samples), f"{', '.join(found.models)} side by side"
        lead = f"{count} {found.unit}{'s' if count > 1 else ''}, for which no answer is known."
    sections = [
        (f"{each.task}: {heading}" if len(tasks) > 1 else heading, body)
        for each in comparisons
        for heading, body in _sections(each)
    ]
    about = [*map(blocks.paragraph, (remark for each in comparisons for remark in remarks(each)))]
    about += [blocks.facts(definitions(found)), _environment(comparisons)]
    if not tasks:
        about.append(blocks.details(f"{found.unit.title()}s", *map(blocks.paragraph, found.samples)))
    return blocks.page(title, [*sections, ("How it was measured", "".join(about))], lead=lead)


def _environment(comparisons: Sequence[ModelComparison]) -> str:
    report = numbers(comparisons)
    names = (*(("sequences", "seeds") if comparisons[0].task else ()), "versions", "machine")
    return blocks.facts({name: ", ".join(f"{key} {value}" for key, value in report[name].items()) for name in names})


def picture(comparisons: Sequence[ModelComparison], path: Path) -> None:
    """Write the picture: the tasks side by side, one column per model, one row per method at its scored layer.

    Raises `MissingExtraError` if matplotlib is missing.
    """
    drawn = [_pixels(_task_figure(found)) for found in comparisons]
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


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out`, which replaces `out` on success and is removed on failure.

    Raises `ResultFileError`, on entry, unless `out` is free, an empty folder or an earlier report, or if its parent
    folder is not writable.
    """
    out = Path(os.path.abspath(out))
    check_replaceable(out)
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise ResultFileError(f"Cannot write a report to {out}: {error.strerror}. Name another folder.") from error
    try:
        yield temporary
        check_replaceable(out)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raise `ResultFileError` unless `out` is free, an empty folder, or a folder with only a report."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ResultFileError(f"{out} is no folder, so no report can be written there; name another with --out.")
    names = sorted(entry.name for entry in out.iterdir()) if out.exists() else []
    strange = [name for name in names if name not in (PAGE, PICTURE, NUMBERS)]
    if not names or (not strange and _is_ours(out / NUMBERS)):
        return
    reason = f"it holds {', '.join(map(repr, strange[:3]))}" if strange else f"its {NUMBERS} is not one of ours"
    raise ResultFileError(
        f"{out} is not empty and not just a report of this program ({reason}), so it is not changed; "
        "name another folder with --out, or empty it."
    )


def _is_ours(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def _sections(found: ModelComparison) -> Iterator[tuple[str, str]]:
    """Yield the headings and the bodies of a comparison: scores, models, methods, similarity of maps, layers."""
    if found.images:
        names = [one.name for one in found.on_images]
        heading = "Scores on the images" if len(names) == len(found.images) else f"Scores on {len(names)} images"
        predictions = [(one.name, *one.predicted.values()) for one in found.on_images]
        yield heading, blocks.table(["predicted class of", *found.models], predictions) + _image_board(found)
    elif found.shown is not None:
        yield f"Scores on the first {found.unit}", _task_board(found) if found.task else pages.comparison(found.shown)
    yield "Models", _table(model_rows(found))
    if found.task:
        yield "Which method finds the answer", _methods(found)
    else:
        tables = [_table(_curves(name, one)) for name, one in found.models.items()]
        folded = blocks.details("Probability of the prediction by fraction removed", *tables)
        yield (
            f"Which {AXES[found.unit][0].split()[0]} the prediction depends on",
            _plots(found) + _methods(found) + folded,
        )
    matrices = blocks.details("Every two layers", *map(_table, _matrices(found)))
    yield "Similarity of the maps", _table(similarity_rows(found)) + matrices
    yield "Layers", _table(layer_rows(found))


def _methods(found: ModelComparison) -> str:
    """Return the table of the metrics, in which the best method of each model by each metric is emphasised."""
    head, *rows = found.table.cells()
    methods = [at for at, row in enumerate(rows) if row[1] not in (*BASELINES, INTERVENTION)]
    strong = set()
    for column, name in enumerate(head[3:], 3):
        best = max if name == CORRELATION or METRICS[name].larger_is_better else min
        for model in found.models:
            values = {at: rows[at][column] for at in methods if rows[at][0] == model}
            strong |= {(at, column) for at, value in values.items() if value == best(values.values())}
    return blocks.table(head, rows, strong=strong)


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
    drawn = []
    for model, one in found.models.items():
        lines = {row: curve for row, curve in one.deletion.items() if isinstance(curve, PerturbationCurve)}
        series = {row: curve.mean.tolist() for row, curve in lines.items()}
        notes = {row: f"area {curve.area:.3f}" for row, curve in lines.items()}
        if series:
            drawn.append(Curves(model, series, [100 * fraction for fraction in TENTHS], names, RANDOM, notes))
    return curves(drawn)


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


def _task_board(found: ModelComparison) -> str:
    """Return the maps of a task: models in columns, methods in rows, each at its scored layer first."""
    assert found.shown is not None
    precisions = {(row["model"], row["method"]): row for row in found.table.summary().select(metric="ap")}
    cells = []
    for row in found.shown.methods:
        for model in found.models:
            result, scored = found.shown[model][row], precisions[model, row]
            notes, start = [f"AP over all sequences {scored['value']:.3f}"], 0
            if "layer" in result.dims:
                start = result.layers.index(scored["layer"])
                notes = [notes[0] if at == start else "layer not scored" for at in range(len(result.layers))]
            made = cell(result, row, model, batches=[0], expected=found.expected, start=start, notes=notes)
            # The own key is blank, so there is none to leave out of the scale.
            cells.append(replace(made, apart=False))
    columns = {name: f"{count_kinds(one.kinds)}, accuracy {one.accuracy:.1%}" for name, one in found.models.items()}
    return board(cells, columns=columns, layer_hint="compare fewer models or methods for all scores")


def _task_figure(found: ModelComparison) -> "Figure":
    assert found.shown is not None
    scored = {(row["model"], row["method"]): row["layer"] for row in found.table}
    # Panels of all tasks have one size only without labels of tokens.
    chosen = {
        model: {
            row: replace(
                result.select(layer=scored[model, row]) if "layer" in result.dims else result,
                tokens=None,
            )
            for row, result in results.items()
        }
        for model, results in found.shown.items()
    }
    figure = plots.comparison(Comparison(chosen), expected=found.expected)
    length = TASKS[found.task].length
    title = f"{found.task}, {length} tokens: each method at its scored layer, the known answer outlined"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def _pixels(figure: "Figure") -> np.ndarray:
    canvas = import_extra("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())
