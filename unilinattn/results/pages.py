"""HTML pages and fragments of results."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from unilinattn.results.panels import Panel, panels
from unilinattn.results.scores import Scores, count_kinds
from unilinattn.results.table import ScoreTable
from unilinattn.viz.blocks import details, facts, grid, group, legend, page, table
from unilinattn.viz.drawing import heatmap, strip


def attribution(result: Scores, *, batch: int | Sequence[int] = 0, expected: Bool[Tensor, "..."] | None = None) -> str:
    """Return HTML blocks of a result: its labels, its layers with their errors, and one picture per layer and sequence.

    `batch`: index or indices of the sequences to draw. `expected`: a boolean pattern to outline, (batch, query, key),
    or (batch, key) without a query axis.

    Raises `InputError` if `batch` or `expected` does not fit.
    """
    return _about(result) + _pictures(result, batch, expected)


def attribution_page(
    result: Scores, *, batch: int | Sequence[int] = 0, expected: Bool[Tensor, "..."] | None = None
) -> str:
    """Return `attribution` as a complete HTML document.

    Raises `InputError` if `batch` or `expected` does not fit.
    """
    title = f"{result.method} of {result.model}" if result.model else result.method
    sections = [("About", _about(result)), ("Scores", _pictures(result, batch, expected))]
    return page(title, sections)


def comparison(
    results: ScoreTable[Any], *, batch: int | Sequence[int] = 0, expected: Bool[Tensor, "..."] | None = None
) -> str:
    """Return HTML blocks of a comparison: a table of all results, then the pictures by model, method and layer.

    `expected` (batch, query, key) is outlined in every result with a query axis.

    Raises `InputError` if `batch` or `expected` does not fit.
    """
    parts = _comparison_parts(results, batch, expected)
    return "".join(f"<section><h2>{escape(heading)}</h2>{body}</section>" for heading, body in parts)


def comparison_page(
    results: ScoreTable[Any], *, batch: int | Sequence[int] = 0, expected: Bool[Tensor, "..."] | None = None
) -> str:
    """Return `comparison` as a complete HTML document.

    Raises `InputError` if `batch` or `expected` does not fit.
    """
    return page(f"Comparison of {', '.join(results)}", _comparison_parts(results, batch, expected))


def _about(result: Scores) -> str:
    blocks = [facts(_facts(result))]
    if result.layers:
        kinds = result.kinds or ("",) * len(result.layers)
        rows = [
            (name, kind, result.reconstruction_error.get(name, "not recorded"))
            for name, kind in zip(result.layers, kinds, strict=True)
        ]
        layers = table(("layer", "mixer", "reconstruction error"), rows)
        blocks.append(layers if len(rows) <= 6 else details(f"{len(rows)} layers and their errors", layers))
    return "".join(blocks)


def _facts(result: Scores) -> dict[str, object]:
    worst, gap = result.worst_error, result.completeness_gap
    return {
        "model": result.model,
        "method": result.method,
        "scope": result.scope,
        "options": _pairs(result.options),
        "scores": ", ".join(f"{name} {size}" for name, size in result.sizes.items()),
        "left out (no adapter knows them)": ", ".join(result.left_out) or None,
        "WARNING": " ".join(result.warnings) or None,
        "worst reconstruction error": None if worst is None else f"{worst[1]:.1e} ({worst[0]})",
        "completeness gap": None if gap is None else f"{gap:.1e}",
        "versions": _pairs(result.versions),
    }


def _pictures(result: Scores, batch: int | Sequence[int], expected: Tensor | None) -> str:
    chosen = [batch] if isinstance(batch, int) else list(batch)
    drawn = {index: panels(result, batch=index, expected=expected) for index in chosen}
    signed = any(panel.signed for made in drawn.values() for panel in made)
    strips = all(panel.kind == "strip" for made in drawn.values() for panel in made)
    blocks = [legend(signed=signed, expected=expected is not None, strips=strips)]
    total = result.sizes.get("batch", 1)
    for index, made in drawn.items():
        maps = grid(*(_picture(panel, signed) for panel in made))
        blocks.append(group(f"Sequence {index % total}", maps, note=f"of {total}") if total > 1 else maps)
    return "".join(blocks)


def _picture(panel: Panel, signed: bool, title: str = "") -> str:
    title = title or panel.title
    notes = [panel.mixer, *panel.notes]
    if panel.kind == "strip" and panel.column_tokens is not None:
        expected = None if panel.expected is None else panel.expected[0]
        return strip(panel.values[0], panel.column_tokens, title=title, notes=notes, expected=expected, own=panel.own)
    return heatmap(
        panel.values,
        title=title,
        notes=notes,
        row_tokens=panel.row_tokens,
        column_tokens=panel.column_tokens,
        expected=panel.expected,
        signed=signed,
        names=("patch row", "patch column") if panel.kind == "image" else ("query", "key"),
    )


def _comparison_parts(
    results: ScoreTable[Any], batch: int | Sequence[int], expected: Tensor | None
) -> list[tuple[str, str]]:
    chosen = [batch] if isinstance(batch, int) else list(batch)
    rows = [
        (
            model,
            count_kinds(result.kinds),
            method,
            result.scope or "",
            _pairs(result.options),
            "not recorded" if result.worst_error is None else result.worst_error[1],
        )
        for model, method, result in results.results()
    ]
    header = ("model", "mixers", "method", "scope", "options", "worst reconstruction error")
    versions = {name: v for _, _, result in results.results() for name, v in result.versions.items()}
    drawn: dict[str, list[tuple[str, int, tuple[Panel, ...]]]] = {model: [] for model in results}
    for model, method, result in results.results():
        pattern = expected if "query" in result.dims else None
        drawn[model] += [(method, index, panels(result, batch=index, expected=pattern)) for index in chosen]
    every = [panel for made in drawn.values() for *_, some in made for panel in some]
    signed = any(panel.signed for panel in every)
    overview = facts({"versions": _pairs(versions)}) + table(header, rows)
    outlined = any(panel.expected is not None for panel in every)
    strips = all(panel.kind == "strip" for panel in every)
    overview += legend(signed=signed, expected=outlined, strips=strips)
    parts = [("Overview", overview)]
    for model, made in drawn.items():
        sequences = {index: [entry for entry in made if entry[1] == index] for index in chosen}
        maps = {
            index: grid(
                *(_picture(panel, signed, f"{method}: {panel.title}") for method, _, some in entries for panel in some)
            )
            for index, entries in sequences.items()
        }
        parts.append((model, "".join(group(f"Sequence {i}", m) if len(maps) > 1 else m for i, m in maps.items())))
    return parts


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
