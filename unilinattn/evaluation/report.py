"""The report of a side-by-side comparison: a text table, and a folder with a page, a picture and the numbers."""

import json
import os
import platform
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unilinattn.attribution import Attribution, Comparison, import_extra
from unilinattn.errors import ResultFileError
from unilinattn.evaluation.side_by_side import Counts, Measured
from unilinattn.examples import TASKS
from unilinattn.examples.tasks import HELD_OUT_SEED, SELECTION_SEED
from unilinattn.viz import figures, html
from unilinattn.viz.panels import panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "unilinattn.report"
FORMAT_VERSION = "1"

PAGE, PICTURE, NUMBERS = "index.html", "compare.png", "compare.json"
"""The files of a report, and all that its folder may hold."""

MEANING = {
    "AUC": "the chance that a key of the known answer scores above another key",
    "AP": "average precision of the ranked keys",
    "R@K": "share of the answer's K keys among the K best",
}
"""What the columns of scores say, each averaged over queries; the candidates are the keys up to the query."""


def text_table(measured: Sequence[Measured]) -> str:
    """Return an aligned text table: a line a method, the model's own numbers on its first line."""
    header = ("task", "model", "mixer", "accuracy", "worst error", "method", "AUC", "AP", "R@K", "layer")
    lines: list[tuple[str, ...]] = []
    for one in measured:
        own: tuple[str, ...] = (one.task, one.model, one.kind, f"{one.accuracy:.1%}", error_text(one.worst_error))
        for method, score in one.scores.items():
            found, layer = score.found, one.layer_index(method)
            ranks = tuple(f"{value:.3f}" for value in (found.auc, found.ap, found.recall_at_k))
            lines.append((*own, method, *ranks, "all" if layer is None else str(layer)))
            own = ("",) * len(own)
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    numeric = {header.index(name) for name in ("accuracy", "worst error", "AUC", "AP", "R@K", "layer")}

    def aligned(line: Sequence[str]) -> str:
        cells = [c.rjust(w) if j in numeric else c.ljust(w) for j, (c, w) in enumerate(zip(line, widths, strict=True))]
        return "  ".join(cells).rstrip()

    out = [aligned(header), "  ".join("-" * width for width in widths)]
    for line in lines:
        if line[0] and len(out) > 2:
            out.append("")
        out.append(aligned(line))
    return "\n".join(out)


def error_text(error: float) -> str:
    """Return a reconstruction error to two digits; 0 means equal bit for bit."""
    return "0" if error == 0 else f"{error:.1e}"


def numbers(measured: Sequence[Measured], counts: Counts, methods: Sequence[str]) -> dict[str, Any]:
    """Return what `compare.json` holds: plain values, without the name of the machine or any path of it."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "models": {one.name: _model(one) for one in measured},
        "scores": {one.name: {method: _score(one, method) for method in one.scores} for one in measured},
        "seeds": {"selection": SELECTION_SEED, "held_out": HELD_OUT_SEED},
        "options": {
            "tasks": list(dict.fromkeys(one.task for one in measured)),
            "models": list(dict.fromkeys(one.model for one in measured)),
            "methods": list(methods),
            "sequences": {"accuracy": counts.accuracy, "selection": counts.selection, "scored": counts.scored},
            "candidates": "the keys j <= i of query i",
            "layer_chosen_by": "average precision on the selection sequences",
        },
        "versions": {"python": platform.python_version(), **_versions(measured)},
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """Describe the machine without its name: what it runs, its kind of processor, cores and threads."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def page(measured: Sequence[Measured], report: Mapping[str, Any]) -> str:
    """Return the self-contained page: tables of scores and errors, then the maps model by model, layer by layer."""
    sequences = report["options"]["sequences"]
    lead = (
        f"Small models, each trained on a task whose answer is known for every query. The scores say how well a method "
        f"finds the tokens that hold the answer, on {sequences['scored']} held-out sequences; the reconstruction error "
        "says how far a layer's frozen linear operator is from what the model itself computed there."
    )
    sections = [
        ("Which method finds the answer", _scores_section(measured, sequences)),
        ("How exact the operators are", _errors_section(measured)),
        *((f"{one.task}: {one.model}", _maps_section(one)) for one in measured),
        ("How it was measured", _about_section(report)),
    ]
    return html.page("Trained models side by side", sections, lead=lead)


def picture(measured: Sequence[Measured], path: Path) -> None:
    """Write the picture: the tasks side by side, a column a model, a row a method at its chosen layer.

    Raises `MissingExtraError` without matplotlib.
    """
    tasks = list(dict.fromkeys(one.task for one in measured))
    drawn = [_pixels(_task_figure([one for one in measured if one.task == task], task)) for task in tasks]
    height = max(image.shape[0] for image in drawn)
    padded = [np.pad(i, ((0, height - i.shape[0]), (0, 0), (0, 0)), constant_values=255) for i in drawn]
    import_extra("matplotlib.image", "plot").imsave(path, np.ascontiguousarray(np.concatenate(padded, axis=1)))


def write(folder: Path, measured: Sequence[Measured], report: Mapping[str, Any]) -> None:
    """Write the three files of the report into a folder that exists."""
    (folder / PAGE).write_text(page(measured, report), encoding="utf-8")
    picture(measured, folder / PICTURE)
    (folder / NUMBERS).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Give a temporary folder beside `out` that takes its place at the end, or vanishes if anything goes wrong.

    A report of ours that stands there is replaced. Raises `ResultFileError`, before anything is computed, if `out` is
    anything else but an empty folder, or if nothing can be written beside it.
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
        _swap(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raise `ResultFileError` if a path is neither free, nor an empty folder, nor a report and nothing else."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ResultFileError(f"{out} is no folder, so no report can be written there; name another with --out.")
    held = sorted(entry.name for entry in out.iterdir()) if out.exists() else []
    strange = [name for name in held if name not in (PAGE, PICTURE, NUMBERS)]
    if not held or (not strange and _is_ours(out / NUMBERS)):
        return
    what = f"it holds {', '.join(map(repr, strange[:3]))}" if strange else f"its {NUMBERS} is not one of ours"
    raise ResultFileError(
        f"{out} is not empty and not just a report of this program ({what}), so it is left as it is; "
        "name another folder with --out, or empty it."
    )


def _is_ours(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def _swap(temporary: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.{uuid.uuid4().hex}.old")
    replaced = out.exists()
    if replaced:
        out.rename(old)
    try:
        temporary.rename(out)
    except BaseException:
        if replaced:
            old.rename(out)
        raise
    if replaced:
        shutil.rmtree(old, ignore_errors=True)


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


def _score(one: Measured, method: str) -> dict[str, Any]:
    score, result = one.scores[method], one.shown[method]
    return {
        "auc": score.found.auc,
        "ap": score.found.ap,
        "recall_at_k": score.found.recall_at_k,
        "layer": score.layer,
        "layer_index": one.layer_index(method),
        "selection_ap": dict(score.selection),
        "rows": score.found.rows,
        "dropped_rows": score.found.dropped,
        "scope": result.scope,
        "options": dict(result.options),
    }


def _versions(measured: Sequence[Measured]) -> dict[str, str]:
    return {name: version for one in measured for name, version in one.versions.items()}


def _scores_section(measured: Sequence[Measured], sequences: Mapping[str, int]) -> str:
    blocks = []
    for task in dict.fromkeys(one.task for one in measured):
        rows: list[tuple[object, ...]] = []
        best = set()
        for one in (one for one in measured if one.task == task):
            top = max(score.found.ap for score in one.scores.values())
            for place, (method, score) in enumerate(one.scores.items()):
                found, layer = score.found, score.layer
                if found.ap == top:
                    best |= {(len(rows), 3), (len(rows), 5)}
                own = ("", "", "") if place else (one.model, one.kind, f"{one.accuracy:.1%}")
                rows.append((*own, method, found.auc, found.ap, found.recall_at_k, layer or "all, composed"))
        header = ("model", "mixer", "accuracy", "method", *MEANING, "layer")
        blocks.append(html.group(task, html.table(header, rows, strong=best)))
    meaning = "; ".join(f"{name}: {text}" for name, text in MEANING.items())
    chosen = (
        f"Averages over queries, whose candidates are the keys up to the query. {meaning}. A method that "
        f"scores layer by layer shows the layer with the best AP on {sequences['selection']} sequences of another "
        "seed. Stressed: each model's best method by AP."
    )
    return html.paragraph(chosen) + "".join(blocks)


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
    return html.paragraph(text) + html.table(("task", "model", "layer", "mixer", "reconstruction error"), rows)


def _maps_section(one: Measured) -> str:
    drawn = {method: panels(result, expected=one.expected) for method, result in one.shown.items()}
    signed = any(panel.signed for made in drawn.values() for panel in made)
    blocks = [
        html.facts(
            {
                "mixer": one.kind,
                "accuracy": f"{one.accuracy:.1%}",
                "worst reconstruction error": error_text(one.worst_error),
                "shown": f"the first held-out sequence of {one.task}",
            }
        ),
        html.legend(signed=signed, expected=True),
    ]
    maps = []
    for method, made in drawn.items():
        score = one.scores[method]
        for panel in made:
            composed = score.layer is None
            scored = composed or panel.title == score.layer
            maps.append(
                html.heatmap(
                    panel.values,
                    title=f"{method}: {'all layers, composed' if composed else panel.title}",
                    notes=[
                        *panel.notes,
                        f"AP over all sequences {score.found.ap:.3f}" if scored else "layer not scored",
                    ],
                    row_tokens=panel.row_tokens,
                    column_tokens=panel.column_tokens,
                    expected=panel.expected,
                    signed=signed,
                )
            )
    return "".join((*blocks, html.grid(*maps)))


def _about_section(report: Mapping[str, Any]) -> str:
    def listed(values: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {value}" for name, value in values.items())

    return html.facts(
        {
            "sequences": listed(report["options"]["sequences"]),
            "seeds": listed(report["seeds"]),
            "versions": listed(report["versions"]),
            "machine": listed(report["machine"]),
        }
    )


def _task_figure(measured: Sequence[Measured], task: str) -> "Figure":
    chosen = {one.model: {m: _scored_layer(one, m) for m in one.shown} for one in measured}
    figure = figures.comparison(Comparison(chosen), expected=measured[0].expected)
    title = f"{task}, {TASKS[task].length} tokens: each method at its scored layer, the known answer outlined"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def _scored_layer(one: Measured, method: str) -> Attribution:
    layer = one.scores[method].layer
    return one.shown[method] if layer is None else one.shown[method].select(layer=layer)


def _pixels(figure: "Figure") -> np.ndarray:
    canvas = import_extra("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())
