"""HTML pages and fragments of results."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from unilinattn.errors import InputError
from unilinattn.results.boards import beneath, cell, heads_sentence
from unilinattn.results.explained import explained, explained_by_model, marked, sentence
from unilinattn.results.panels import fitting_pattern
from unilinattn.results.ranking import ranking
from unilinattn.results.scores import Scores, axes_text, count_kinds
from unilinattn.results.summary import SINKS, cancellation, checked, nothing_ranked, sink_names, sums
from unilinattn.results.table import ScoreTable
from unilinattn.viz.blocks import details, facts, group, paragraph, table, warning
from unilinattn.viz.board import board

WHOLE = "result.select(layer=0).to_html() draws one layer with all its scores"
"""Remedy for a result that has too many scores for one page."""


def attribution(
    result: Scores,
    *,
    batch: int | Sequence[int] = 0,
    expected: Bool[Tensor, "..."] | None = None,
    image: Any = None,
) -> str:
    """Return HTML blocks of a result: its largest scores, its pictures, linked, and its labels and layers, folded.

    `batch`: index or indices of the sequences to draw. `expected`: a boolean pattern to outline, (batch, query, key),
    or (batch, key) without a query axis. `image`: the picture beneath the patches of an image.

    Raises `InputError` if `batch`, `expected` or `image` does not fit.
    """
    return _shown(result, batch, expected, image) + _about(result)


def comparison(
    results: ScoreTable[Any],
    *,
    batch: int | Sequence[int] = 0,
    expected: Bool[Tensor, "..."] | None = None,
    image: Any = None,
) -> str:
    """Return HTML blocks of a comparison: models in columns and methods in rows, then a folded table of all results.

    `expected` is outlined in every result with its axes: (batch, query, key), or (batch, key) for those of a target.

    Raises `InputError` if `batch`, `expected` or `image` does not fit.
    """
    batches = _batches(batch, image)
    pixels = beneath((result for _, _, result in results.results()), image)
    cells = [
        cell(result, method, model, batches=batches, expected=fitting_pattern(result, expected), image=pixels)
        for method in results.methods
        for model in results
        if (result := results[model].get(method)) is not None
    ]
    kinds = {model: count_kinds(next(iter(results[model].values())).kinds) for model in results if results[model]}
    lead = "".join(map(paragraph, explained_by_model(results, batches[0])))
    lead += "".join(
        paragraph(f"{model}, {method}: {note}")
        for model, method, result in results.results()
        if (note := heads_sentence(result, len(batches)))
    )
    cancelling = "".join(
        paragraph(f"{model}, {method}: {clause}.")
        for model, method, result in results.results()
        if (clause := cancellation(result, batches[0], marked))
    )
    methods: dict[tuple[str, str], list[str]] = {}
    for model, method, result in results.results():
        for message in result.warnings:
            methods.setdefault((model, message), []).append(method)
    alerts = "".join(warning(f"{model}, {', '.join(names)}: {message}") for (model, message), names in methods.items())
    drawn = board(cells, columns=kinds, layer_hint="compare fewer results for all scores")
    return lead + alerts + drawn + cancelling + _table(results)


def _shown(result: Scores, batch: int | Sequence[int], expected: Tensor | None, image: Any) -> str:
    batches = _batches(batch, image)
    pixels = beneath([result], image)
    drawn = cell(result, result.method, result.model, batches=batches, expected=expected, image=pixels)
    sentences = [explained(result, index) for index in batches]
    lead = sentences[0] if len(set(sentences)) == 1 else ""
    worst, kinds = result.worst_error, count_kinds(result.kinds)
    short = [
        lead,
        f"Layers: {kinds}." if kinds else "",
        "" if worst is None else f"Worst reconstruction error {worst[1]:.1e}.",
        heads_sentence(result, len(batches)),
    ]
    if len(batches) > 1 and not lead:
        short += [f"Sequence {index}: {text}" for index, text in zip(batches, sentences, strict=True)]
    alerts = "".join(warning(message) for message in result.warnings)
    if result.left_out:
        alerts += warning(f"left out, no adapter knows them: {', '.join(result.left_out)}")
    text = " ".join(sentence for sentence in short if sentence)
    head = "".join(_largest(result, index, len(batches)) for index in batches)
    return (paragraph(text) if text else "") + head + alerts + board([drawn], layer_hint=WHOLE)


def _largest(result: Scores, batch: int, sequences: int) -> str:
    """Return the largest scores of a sequence, its sums and its attention sinks."""
    ranks = ranking(result, batch, quote=marked)
    caption = f"Largest scores of sequence {batch}" if sequences > 1 else "Largest scores"
    rows = zip(ranks.columns, *(entry.numbers for entry in ranks.top), strict=True)
    header = ("query and key" if ranks.pairs else "key", *(entry.name for entry in ranks.top))
    ranked = table(header, rows, caption=caption) if ranks.top else paragraph(sentence(nothing_ranked(ranks)))
    notes = filter(None, (cancellation(result, batch, marked), checked(result, batch)))
    blocks = [ranked, facts({**sums(result, batch), SINKS: sink_names(ranks)})]
    return "".join(blocks + [paragraph(sentence(note)) for note in notes])


def _about(result: Scores) -> str:
    blocks = [facts(_facts(result))]
    if result.layers:
        kinds = result.kinds or ("",) * len(result.layers)
        rows = [
            (name, kind, result.reconstruction_error.get(name, "not recorded"))
            for name, kind in zip(result.layers, kinds, strict=True)
        ]
        blocks.append(table(("layer", "mixer", "reconstruction error"), rows))
    return details("Labels of the result, its layers and their errors", *blocks)


def _facts(result: Scores) -> dict[str, object]:
    worst, gap = result.worst_error, result.completeness_gap
    return {
        "model": result.model,
        "method": result.method,
        "scope": result.scope,
        "options": _pairs(result.options),
        "scores": axes_text(result),
        "left out (no adapter knows them)": ", ".join(result.left_out) or None,
        "worst reconstruction error": None if worst is None else f"{worst[1]:.1e} ({worst[0]})",
        "completeness gap": None if gap is None else f"{gap:.1e}",
        "versions": _pairs(result.versions),
    }


def _table(results: ScoreTable[Any]) -> str:
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
    body = table(header, rows) + facts({"versions": _pairs(versions)})
    return details("Results, their options and errors", group("Results", body))


def _batches(batch: int | Sequence[int], image: Any) -> list[int]:
    batches = [batch] if isinstance(batch, int) else list(batch)
    if not batches:
        raise InputError("`batch` names no sequence; give the index of at least one.")
    if image is not None and len(batches) > 1:
        raise InputError(f"`image` is the picture of one sequence, but batch={batches}; write a page for each.")
    return batches


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
