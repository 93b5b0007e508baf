"""The report of a side-by-side comparison: a text table, and a folder with a page, a picture and a JSON file."""

import json
import os
import platform
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unilinattn.errors import ResultFileError
from unilinattn.evaluation.scorers import BASELINES, DRAWS
from unilinattn.evaluation.side_by_side import (
    INTERVENTION,
    INTERVENTION_SEED,
    RANDOM_SEED,
    REPLACEMENTS,
    Counts,
    Measured,
    Score,
)
from unilinattn.examples import TASKS
from unilinattn.examples.tasks import HELD_OUT_SEED, SELECTION_SEED
from unilinattn.optional import import_extra
from unilinattn.results import plots
from unilinattn.results.attribution import Attribution
from unilinattn.results.boards import cell
from unilinattn.results.comparison import Comparison
from unilinattn.viz import blocks
from unilinattn.viz.board import board

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "unilinattn.report"
FORMAT_VERSION = "2"
"""Version 2: a query's own key is no candidate; `scores` have hit@1, a rank correlation and `layers`."""

PAGE, PICTURE, NUMBERS = "index.html", "compare.png", "compare.json"
"""The files of a report; its folder holds no others."""

MEANING = {
    "hit@1": "how often the best key is the one that holds the answer",
    "AP": "average precision of the ranked keys",
    "AUC": "the chance that the key of the answer scores above another key",
    "corr.": "rank correlation with the effect on the answer of replacing each token",
}
"""Meaning of each score column, averaged over queries; the candidates are the keys before the query."""

REFERENCES = (*BASELINES, INTERVENTION)
"""Rows of the table that are not methods."""

ABOUT_REFERENCES = (
    f"To compare with: random scores, the mean of {DRAWS} draws; recency, a key's position; primacy, its "
    "negative; and intervention, how much the log-probability of the answer falls if the key's token is replaced, the "
    f"mean over {REPLACEMENTS} other tokens. Most keys have next to no effect, and their order lowers corr. even for "
    "scores that find the answer."
)


def text_table(measured: Sequence[Measured]) -> str:
    """Return an aligned text table with one line per row of scores; a model's first line has its accuracy and error."""
    header = ("task", "model", "mixer", "accuracy", "worst error", "method", *MEANING, "layer")
    lines: list[tuple[str, ...]] = []
    for one in measured:
        leading: tuple[str, ...] = (one.task, one.model, one.kind, f"{one.accuracy:.1%}", error_text(one.worst_error))
        for row, score in one.scores.items():
            hits, *ranks = columns(score)
            lines.append((*leading, row, f"{hits:.1%}", *(f"{value:.3f}" for value in ranks), one.layer_text(row)))
            leading = ("",) * len(leading)
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    numeric = {header.index(name) for name in ("accuracy", "worst error", *MEANING, "layer")}

    def aligned(line: Sequence[str]) -> str:
        cells = [c.rjust(w) if j in numeric else c.ljust(w) for j, (c, w) in enumerate(zip(line, widths, strict=True))]
        return "  ".join(cells).rstrip()

    out = [aligned(header), "  ".join("-" * width for width in widths)]
    for line in lines:
        if line[0] and len(out) > 2:
            out.append("")
        out.append(aligned(line))
    return "\n".join(out)


def columns(score: Score) -> tuple[float, float, float, float]:
    """Return the values of the columns of `MEANING`, in order."""
    return score.found.hit_at_1, score.found.ap, score.found.auc, score.correlation.mean


def error_text(error: float) -> str:
    """Return a reconstruction error to two digits; 0 means equal bit for bit."""
    return "0" if error == 0 else f"{error:.1e}"


def numbers(measured: Sequence[Measured], counts: Counts, methods: Sequence[str]) -> dict[str, Any]:
    """Return the content of `compare.json`: plain values, without the machine's name or paths."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "models": {one.name: _model(one) for one in measured},
        "scores": {one.name: {row: _score(one, row) for row in one.scores} for one in measured},
        "seeds": {
            "selection": SELECTION_SEED,
            "held_out": HELD_OUT_SEED,
            "random": RANDOM_SEED,
            "intervention": INTERVENTION_SEED,
        },
        "options": {
            "tasks": list(dict.fromkeys(one.task for one in measured)),
            "models": list(dict.fromkeys(one.model for one in measured)),
            "methods": list(methods),
            "sequences": {"accuracy": counts.accuracy, "selection": counts.selection, "scored": counts.scored},
            "candidates": "the keys j < i of query i",
            "replacements": REPLACEMENTS,
            "random_draws": DRAWS,
            "layer_chosen_by": "average precision on the selection sequences",
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version for one in measured for name, version in one.versions.items()},
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


def page(measured: Sequence[Measured], report: Mapping[str, Any]) -> str:
    """Return the report as a self-contained HTML page: linked maps by model and method, then tables, folded."""
    sequences = report["options"]["sequences"]
    lead = (
        "Small models, each trained on a task whose answer is known for every query (outlined). The first held-out "
        "sequence of each task; a query's own key is blank."
    )
    tasks = {one.task: [each for each in measured if each.task == one.task] for one in measured}
    boards = {task: _task_board(some) for task, some in tasks.items()}
    first = "".join(blocks.section(task, body) if len(tasks) > 1 else body for task, body in boards.items())
    tables = (
        ("Which method finds the answer: scores of every method", _scores_section(measured, sequences)),
        ("How exact the operators are", _errors_section(measured)),
        ("How it was measured", _about_section(report)),
    )
    folded = "".join(blocks.details(heading, body) for heading, body in tables)
    return blocks.page(f"Trained models side by side: {', '.join(tasks)}", [], lead=lead, first=first + folded)


def picture(measured: Sequence[Measured], path: Path) -> None:
    """Write the picture: the tasks side by side, one column per model, one row per method at its chosen layer.

    Raises `MissingExtraError` if matplotlib is missing.
    """
    tasks = list(dict.fromkeys(one.task for one in measured))
    drawn = [_pixels(_task_figure([one for one in measured if one.task == task], task)) for task in tasks]
    height = max(image.shape[0] for image in drawn)
    padded = [np.pad(i, ((0, height - i.shape[0]), (0, 0), (0, 0)), constant_values=255) for i in drawn]
    import_extra("matplotlib.image", "plot").imsave(path, np.ascontiguousarray(np.concatenate(padded, axis=1)))


def write(folder: Path, measured: Sequence[Measured], report: Mapping[str, Any]) -> None:
    """Write the three files of the report into an existing folder.

    Raises `MissingExtraError` if matplotlib is missing.
    """
    (folder / PAGE).write_text(page(measured, report), encoding="utf-8")
    picture(measured, folder / PICTURE)
    (folder / NUMBERS).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


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


def _model(one: Measured) -> dict[str, Any]:
    return {
        "task": one.task,
        "model": one.model,
        "class": one.host,
        "kind": one.kind,
        "accuracy": one.accuracy,
        "reconstruction_error": one.worst_error,
        "reconstruction_errors": dict(one.reconstruction_error),
    }


def _score(one: Measured, row: str) -> dict[str, Any]:
    score, result = one.scores[row], one.shown.get(row)
    return {
        "hit_at_1": score.found.hit_at_1,
        "ap": score.found.ap,
        "auc": score.found.auc,
        "recall_at_k": score.found.recall_at_k,
        "rank_correlation": score.correlation.mean,
        "layers": list(score.layers),
        "selection_ap": dict(score.selection),
        "rows": score.found.rows,
        "dropped_rows": score.found.dropped,
        "scope": None if result is None else result.scope,
        "options": {} if result is None else dict(result.options),
    }


def _scores_section(measured: Sequence[Measured], sequences: Mapping[str, int]) -> str:
    parts = []
    for task in dict.fromkeys(one.task for one in measured):
        rows: list[tuple[object, ...]] = []
        best = set()
        for one in (one for one in measured if one.task == task):
            top = max((score.found.ap for row, score in one.scores.items() if row not in REFERENCES), default=None)
            for place, (row, score) in enumerate(one.scores.items()):
                if score.found.ap == top and row not in REFERENCES:
                    best |= {(len(rows), 3), (len(rows), 5)}
                leading = ("", "", "") if place else (one.model, one.kind, f"{one.accuracy:.1%}")
                layer = one.layer_text(row) if len(score.layers) != 1 else score.layers[0]
                rows.append((*leading, row, *columns(score), layer))
        header = ("model", "mixer", "accuracy", "method", *MEANING, "layer")
        parts.append(blocks.group(task, blocks.table(header, rows, strong=best)))
    meaning = "; ".join(f"{name}: {text}" for name, text in MEANING.items())
    about = (
        f"Averages over queries, whose candidates are the keys before the query. {meaning}. A method that scores layer "
        f'by layer shows the layer with the best AP on {sequences["selection"]} sequences of another seed; "all" '
        "composes the layers. Stressed: each model's best method by AP."
    )
    return blocks.paragraph(about) + blocks.paragraph(ABOUT_REFERENCES) + "".join(parts)


def _errors_section(measured: Sequence[Measured]) -> str:
    rows = [
        (one.task, one.model, layer, kind, error or error_text(error))
        for one in measured
        for (layer, error), kind in zip(one.reconstruction_error.items(), one.kinds, strict=True)
    ]
    text = (
        "||op(x) - y|| / ||y|| in float32 against the host's own output y: the worst scored sequence of each layer; 0 "
        "means equal bit for bit."
    )
    return blocks.paragraph(text) + blocks.table(("task", "model", "layer", "mixer", "reconstruction error"), rows)


def _task_board(measured: Sequence[Measured]) -> str:
    """Return the maps of a task: models in columns, methods in rows, each at its scored layer first."""
    rows = dict.fromkeys(row for one in measured for row in one.shown)
    cells = [
        cell(
            one.shown[row],
            row,
            one.model,
            batches=[0],
            expected=one.expected,
            start=_start(one, row),
            notes=_notes(one, row),
        )
        for row in rows
        for one in measured
        if row in one.shown
    ]
    # The own key is blank, so there is none to leave out of the scale.
    cells = [replace(each, apart=False) for each in cells]
    columns = {one.model: f"{one.kind}, accuracy {one.accuracy:.1%}" for one in measured}
    return board(cells, columns=columns, layer_hint="compare fewer models or methods for all scores")


def _start(one: Measured, row: str) -> int:
    result = one.shown[row]
    return result.layers.index(one.scores[row].layers[0]) if "layer" in result.dims else 0


def _notes(one: Measured, row: str) -> list[str]:
    score, result = one.scores[row], one.shown[row]
    found = f"AP over all sequences {score.found.ap:.3f}"
    if "layer" not in result.dims:
        return [found]
    return [found if layer in score.layers else "layer not scored" for layer in result.layers]


def _about_section(report: Mapping[str, Any]) -> str:
    def listed(values: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {value}" for name, value in values.items())

    return blocks.facts(
        {
            "sequences": listed(report["options"]["sequences"]),
            "seeds": listed(report["seeds"]),
            "versions": listed(report["versions"]),
            "machine": listed(report["machine"]),
        }
    )


def _task_figure(measured: Sequence[Measured], task: str) -> "Figure":
    # Panels of all tasks have one size only without labels of tokens.
    chosen = {one.model: {row: replace(_scored_layer(one, row), tokens=None) for row in one.shown} for one in measured}
    figure = plots.comparison(Comparison(chosen), expected=measured[0].expected)
    title = f"{task}, {TASKS[task].length} tokens: each method at its scored layer, the known answer outlined"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def _scored_layer(one: Measured, row: str) -> Attribution:
    result = one.shown[row]
    return result.select(layer=one.scores[row].layers[0]) if "layer" in result.dims else result


def _pixels(figure: "Figure") -> np.ndarray:
    canvas = import_extra("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())
