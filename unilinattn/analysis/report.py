"""The report of a comparison: a text, and a folder with a page, a JSON file and, for tasks, a picture."""

import json
import os
import platform
import shutil
import textwrap
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unilinattn.analysis.comparison import (
    AXES,
    RANDOM,
    WIDTH,
    ModelComparison,
    ModelMeasurements,
    Row,
    area_rows,
    kind_text,
    known_rows,
    known_table,
    layer_rows,
    model_rows,
    remarks,
    similarity_rows,
)
from unilinattn.analysis.statistics import STATISTICS
from unilinattn.errors import ResultFileError
from unilinattn.evaluation.perturbation import TENTHS, PerturbationCurve
from unilinattn.evaluation.scorers import BASELINES, DRAWS
from unilinattn.evaluation.trained import CHOSEN_BY, INTERVENTION, INTERVENTION_SEED, REPLACEMENTS, Counts
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
"""Version 3: one list of layers for both kinds of comparison."""

PAGE, PICTURE, NUMBERS = "index.html", "compare.png", "compare.json"
"""The files of a report; its folder holds no others."""

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


MEANING = {
    "hit@1": "how often the best key is the one that holds the answer",
    "AP": "average precision of the ranked keys",
    "AUC": "the chance that the key of the answer scores above another key",
    "corr.": "rank correlation with the effect on the answer of replacing each token",
}
"""Meaning of each score column, averaged over queries; the candidates are the keys before the query."""

ABOUT_ERRORS = (
    "||op(x) - y|| / ||y|| in float32 against the host's own output y: the worst scored sequence of each layer; 0 "
    "means equal bit for bit."
)

REFERENCES = (*BASELINES, INTERVENTION)
"""Rows of the table that are not methods."""

ABOUT_REFERENCES = (
    f"To compare with: random scores, the mean of {DRAWS} draws; recency, a key's position; primacy, its "
    "negative; and intervention, how much the log-probability of the answer falls if the key's token is replaced, the "
    f"mean over {REPLACEMENTS} other tokens. Most keys have next to no effect, and their order lowers corr. even for "
    "scores that find the answer."
)


def definitions(found: ModelComparison) -> dict[str, str]:
    """Return the definition of each number."""
    if found.known is not None:
        return MEANING
    return {name: meaning.format(**UNITS[found.unit]) for name, meaning in DEFINITIONS.items()}


def text(comparisons: Sequence[ModelComparison]) -> str:
    """Return the tables of a comparison on texts or images, or of several tasks, and the definitions of the numbers."""
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in definitions(comparisons[0]).items())
    if (known := comparisons[0].known) is None:
        return f"{comparisons[0]}\n\n{textwrap.fill(f'{meanings}.', WIDTH)}"
    counts = known.counts
    caption = (
        f"Over {counts.scored} held-out sequences of each task; the candidates of a query are the keys before it, its "
        f"own left out. {meanings}. {ABOUT_REFERENCES} accuracy: over {counts.accuracy} sequences. worst error: "
        "||op(x) - y|| / ||y|| of the worst layer, in float32. layer: the one with the best AP on "
        f"{counts.selection} other sequences, counted from 0; all: the method composes them; -: none is read."
    )
    return f"{known_table(comparisons)}\n\n{textwrap.fill(caption, WIDTH)}"


def numbers(comparisons: Sequence[ModelComparison]) -> dict[str, Any]:
    """Return the content of `compare.json`: plain values, without the machine's name or paths."""
    named = {_key(found, name): (found, one) for found in comparisons for name, one in found.models.items()}
    known = comparisons[0].known
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "definitions": definitions(comparisons[0]),
        "models": {key: _model(found, one) for key, (found, one) in named.items()},
        **(_unlabelled(comparisons[0]) if known is None else _labelled(named, known.counts)),
        "versions": {
            "python": platform.python_version(),
            **{name: version for _, one in named.values() for name, version in one.versions.items()},
        },
        "machine": machine(),
    }


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
    """Return the report as a self-contained HTML page: the scores first, then the tables."""
    found = comparisons[0]
    if found.known is None:
        title, sections = f"{', '.join(found.models)} side by side", _unlabelled_sections(found)
        count, parts = len(found.samples), UNITS[found.unit]["parts"]
        lead = (
            f"{count} {found.unit}{'s' if count > 1 else ''}, for which no answer is known. Each model is measured "
            f"by itself: how exact its operators are, its maps, and which {parts} its prediction depends on."
        )
    else:
        title, sections = (
            f"Trained models side by side: {', '.join(map(_task, comparisons))}",
            _known_sections(comparisons),
        )
        lead = (
            "Small models, each trained on a task whose answer is known for every query (outlined). The first held-out "
            "sequence of each task; a query's own key is blank."
        )
    return blocks.page(title, sections, lead=lead)


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
    if comparisons[0].known is not None:
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


def _task(found: ModelComparison) -> str:
    assert found.known is not None
    return found.known.task


def _key(found: ModelComparison, name: str) -> str:
    """Return the name of a model in the JSON file."""
    return name if found.known is None else f"{found.known.task}/{name}"


def _model(found: ModelComparison, one: ModelMeasurements) -> dict[str, Any]:
    measured = {} if isinstance(one.statistics, str) else {each.layer: each for each in one.statistics}
    return {
        **({} if found.known is None else {"task": found.known.task, "accuracy": one.accuracy}),
        "class": one.host,
        "kind": count_kinds(one.kinds),
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


def _labelled(named: Mapping[str, tuple[ModelComparison, ModelMeasurements]], counts: Counts) -> dict[str, Any]:
    """Return the numbers of models by "task/model" on sequences with known answers."""
    return {
        "scores": {
            key: {
                row: {**score.values, "layers": list(score.layers), f"selection_{CHOSEN_BY}": dict(score.selection)}
                for row, score in one.scores.items()
            }
            for key, (_, one) in named.items()
        },
        "seeds": {"selection": SELECTION_SEED, "held_out": HELD_OUT_SEED, "intervention": INTERVENTION_SEED},
        "options": {
            "sequences": asdict(counts),
            "candidates": "the keys j < i of query i",
            "replacements": REPLACEMENTS,
            "random_draws": DRAWS,
            "layer_chosen_by": f"{CHOSEN_BY} on the selection sequences",
        },
    }


def _unlabelled(found: ModelComparison) -> dict[str, Any]:
    """Return the numbers of models on texts or images."""
    names, similarity = f"{found.unit}s", found.similarity
    return {
        names: list(found.samples),
        "similarity": None
        if similarity is None
        else {
            "layers": list(similarity.names),
            "rank_correlation": [[*map(_number, row)] for row in similarity.rank_correlation.tolist()],
            "divergence": [[*map(_number, row)] for row in similarity.divergence.tolist()],
            names: [{"models": list(pair), names: count} for pair, count in found.compared.items()],
        },
        "not_compared": dict(found.not_compared),
        "options": {"scope": found.scope, "masking": found.masking, "fractions": list(TENTHS), "random_draws": DRAWS},
    }


def _number(value: float | None) -> float | None:
    """Return a number, None for NaN, which JSON lacks."""
    return None if value != value else value


def _unlabelled_sections(found: ModelComparison) -> Iterator[tuple[str, str]]:
    """Yield the sections on texts or images: scores of the first, models, deletion curves, similarity, layers."""
    if found.images:
        names = [one.name for one in found.on_images]
        heading = "Scores on the images" if len(names) == len(found.images) else f"Scores on {len(names)} images"
        predictions = [(one.name, *one.predicted.values()) for one in found.on_images]
        yield heading, blocks.table(["predicted class of", *found.models], predictions) + _image_board(found)
    elif found.shown is not None:
        yield "Scores on the first text", pages.comparison(found.shown)
    yield "Models", _table(model_rows(found))
    tables = [_table(_curves(name, one)) for name, one in found.models.items()]
    yield (
        f"Which {UNITS[found.unit]['parts']} the prediction depends on",
        _plots(found)
        + _table(area_rows(found))
        + blocks.details("Probability of the prediction by fraction removed", *tables),
    )
    matrices = blocks.details("Every two layers", *map(_table, _matrices(found)))
    yield "Similarity of the maps", _table(similarity_rows(found)) + matrices
    yield "Layers", _table(layer_rows(found))
    yield (
        "How it was measured",
        "".join(blocks.paragraph(remark) for remark in remarks(found))
        + blocks.facts(definitions(found))
        + blocks.details(f"{found.unit.title()}s", *(blocks.paragraph(name) for name in found.samples)),
    )


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


def _known_sections(comparisons: Sequence[ModelComparison]) -> Iterator[tuple[str, str]]:
    """Yield the sections on tasks: the maps of each, the scores of every method, layers."""
    for found in comparisons:
        yield _task(found), _task_board(found)
    meaning = "; ".join(f"{name}: {words}" for name, words in MEANING.items())
    about = (
        f"Averages over queries, whose candidates are the keys before the query. {meaning}. A method that scores layer "
        'by layer shows the layer, counted from 0, with the best AP on sequences of another seed; "all" composes the '
        "layers. Stressed: each model's best method by AP."
    )
    tables = (blocks.group(_task(found), _known_table(found)) for found in comparisons)
    yield "Which method finds the answer", "".join([*map(blocks.paragraph, (about, ABOUT_REFERENCES)), *tables])
    errors = (blocks.group(_task(found), _table(layer_rows(found))) for found in comparisons)
    yield "How exact the operators are", blocks.paragraph(ABOUT_ERRORS) + "".join(errors)
    report = numbers(comparisons)
    listed = {
        name: ", ".join(f"{key} {value}" for key, value in values.items())
        for name, values in {
            "sequences": report["options"]["sequences"],
            **{name: report[name] for name in ("seeds", "versions", "machine")},
        }.items()
    }
    yield "How it was measured", blocks.facts(listed)


def _known_table(found: ModelComparison) -> str:
    """Return the scores of each method, with the best of each model emphasised."""
    head, *rows = known_rows(found)
    strong = set()
    scores = [(one, row) for one in found.models.values() for row in one.scores]
    for one in found.models.values():
        precisions = {row: score.values["ap"] for row, score in one.scores.items() if row not in REFERENCES}
        for at, (other, row) in enumerate(scores):
            if other is one and precisions.get(row) == max(precisions.values()):
                strong |= {(at, 3), (at, 5)}
    return blocks.table([str(name) for name in head], rows, strong=strong)


def _task_board(found: ModelComparison) -> str:
    """Return the maps of a task: models in columns, methods in rows, each at its scored layer first."""
    assert found.known is not None and found.shown is not None
    cells = []
    for row in found.shown.methods:
        for model, one in found.models.items():
            result, score = found.shown[model][row], one.scores[row]
            notes, start = [f"AP over all sequences {score.values['ap']:.3f}"], 0
            if "layer" in result.dims:
                start = result.layers.index(score.layers[0])
                notes = [notes[0] if at == start else "layer not scored" for at in range(len(result.layers))]
            made = cell(result, row, model, batches=[0], expected=found.known.expected, start=start, notes=notes)
            # The own key is blank, so there is none to leave out of the scale.
            cells.append(replace(made, apart=False))
    columns = {name: f"{kind_text(one.kinds)}, accuracy {one.accuracy:.1%}" for name, one in found.models.items()}
    return board(cells, columns=columns, layer_hint="compare fewer models or methods for all scores")


def _task_figure(found: ModelComparison) -> "Figure":
    assert found.known is not None and found.shown is not None
    # Panels of all tasks have one size only without labels of tokens.
    chosen = {
        model: {
            row: replace(
                result.select(layer=found.models[model].scores[row].layers[0]) if "layer" in result.dims else result,
                tokens=None,
            )
            for row, result in results.items()
        }
        for model, results in found.shown.items()
    }
    figure = plots.comparison(Comparison(chosen), expected=found.known.expected)
    length = TASKS[_task(found)].length
    title = f"{_task(found)}, {length} tokens: each method at its scored layer, the known answer outlined"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def _pixels(figure: "Figure") -> np.ndarray:
    canvas = import_extra("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())
