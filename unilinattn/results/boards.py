"""Boards of results: the pictures of a page, one cell for each model and method."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.errors import InputError
from unilinattn.results.panels import (
    MOST_HEADS,
    Panel,
    counts_residual,
    heads_note,
    largest_heads,
    one_sequence,
    panels,
    patch_names,
    patch_positions,
    sink_columns,
    target_key,
)
from unilinattn.results.scores import Scores, extra_dims, score_array
from unilinattn.viz.board import Cell, Picture
from unilinattn.viz.colours import Array
from unilinattn.viz.image import pixels
from unilinattn.viz.packing import MOST_CELLS, stored_cells

LEAST_HEADS = 6
"""Number of heads of each layer that a page shows, even if their scores must be pooled."""

HIDDEN_EXTRAS = ("gap",)
"""Extras of each query that a page does not list."""

Numbers = dict[str, list[float]]
"""Extras of the rows of a picture, by name."""


def cell(
    result: Scores,
    row: str,
    column: str,
    *,
    batches: Sequence[int],
    expected: Bool[Tensor, "..."] | None = None,
    start: int = 0,
    notes: Sequence[str] = (),
    image: Array | None = None,
) -> Cell:
    """Return the pictures of one result for a board: one per layer, head and sequence.

    The scores of a target without an image are one picture per sequence, whose rows are the layers, or one per layer,
    whose rows are the heads. Of each layer the heads of `shown_heads` are drawn. `expected`: a boolean pattern, as in
    `Attribution.plot`. `start`: index of the layer to show first. `notes`: a text for each layer. `image`: the pixels
    of `beneath`.

    Raises `InputError` if a sequence of `batches` does not exist or `expected` does not fit.
    """
    pictures: list[Picture] = []
    for batch in batches:
        heads = shown_heads(result, batch, len(batches))
        made = panels(result, batch=batch, expected=expected, heads=heads)
        single = one_sequence(result, batch)
        position = batch % result.sizes.get("batch", 1)
        facts, sinks = _facts(single, made), sink_columns(single)
        if made[0].kind == "strip":
            drawn = [_strip(result, batch, made, position, facts)]
        else:
            each = zip(made, facts, _labels(result, single, batch, heads, made), strict=True)
            drawn = [_picture(panel, numbers, position, **labels) for panel, numbers, labels in each]
        pictures += [replace(picture, sinks=sinks) for picture in drawn]
    if result.grid is not None and image is not None:
        pictures = [replace(picture, image=image) for picture in pictures]
    return Cell(row, column, pictures, start, counts_residual(result), notes)


def shown_heads(result: Scores, batch: int, sequences: int = 1) -> list[list[int]] | None:
    """Return the positions of each layer's heads on a page of some sequences; None for a result without heads.

    They are the largest by the sum of absolute scores: at most `MOST_HEADS`, and of maps fewer, if that many have more
    scores than fit on a page with all their tokens, but at least `LEAST_HEADS`.
    """
    if "head" not in result.dims:
        return None
    most = MOST_HEADS
    if "query" in result.dims:
        maps, stored = (
            sequences * result.sizes.get("layer", 1),
            stored_cells(result.sizes["query"], result.sizes["key"]),
        )
        most = max(LEAST_HEADS, min(most, MOST_CELLS // (maps * stored)))
    return largest_heads(result, batch=batch, each=most)


def heads_sentence(result: Scores, sequences: int = 1) -> str:
    """Return a sentence on the heads that a page leaves out, empty if it has all."""
    heads = shown_heads(result, 0, sequences)
    if heads is None or not (note := heads_note(result, len(heads[0]))):
        return ""
    where = "In each layer: " if result.sizes.get("layer", 1) > 1 else ""
    most = min(MOST_HEADS, result.sizes["head"])
    more = f" result.select(layer=0).to_html() draws {most} of one layer." if len(heads[0]) < most else ""
    return f"{where}{note}; result.select(head=...) has any other.{more}"


def beneath(results: Iterable[Scores], image: Any) -> Array | None:
    """Return the pixels of an image beneath the patches of results, or None without an image.

    Raises `InputError` if no result has a grid of patches, or if the image does not fit one.
    """
    if image is None:
        return None
    grids = dict.fromkeys(result.grid for result in results if result.grid is not None)
    if not grids:
        raise InputError("`image` is for scores of an image's patches, and these have no grid; leave it out.")
    return [pixels(image, grid) for grid in grids][-1]


def _picture(panel: Panel, numbers: Mapping[str, Sequence[float]], sequence: int, **changes: Any) -> Picture:
    """Return the picture of a panel, with its own labels but for `changes`."""
    picture = Picture(
        panel.values,
        panel.title,
        ", ".join(note for note in (panel.mixer, *panel.notes) if note),
        sequence,
        column_tokens=panel.column_tokens,
        expected=panel.expected,
        facts=numbers,
        head=panel.head,
    )
    return replace(picture, **changes)


def _strip(result: Scores, batch: int, made: Sequence[Panel], sequence: int, facts: Sequence[Numbers]) -> Picture:
    values = np.concatenate([panel.values for panel in made])
    for row, panel in zip(values, made, strict=True):
        if panel.own is not None:
            row[panel.own[0]] = panel.own[1]
    return _picture(
        made[0],
        {name: [number for numbers in facts for number in numbers[name]] for name in facts[0]},
        sequence,
        values=values,
        names=("layer", "key"),
        row_titles=[panel.title for panel in made],
        query=target_key(result, batch, values.shape[1]),
        # One pattern is of all layers.
        expected=None if made[0].expected is None else made[0].expected.repeat(len(made), 0),
        head="",
        **({} if len(made) == 1 else {"title": f"{len(made)} layers", "notes": ""}),
    )


def _labels(
    result: Scores, single: Scores, batch: int, heads: Sequence[Sequence[int]] | None, made: Sequence[Panel]
) -> list[dict[str, Any]]:
    """Return the fields of each picture that differ from those of its panel."""
    if made[0].rows != "query":
        query = target_key(result, batch, made[0].values.shape[1])
        return [
            {"names": (panel.rows, "key"), "row_titles": panel.row_tokens, "query": query, "head": ""} for panel in made
        ]
    patches = None if single.grid is None else patch_positions(single)
    if made[0].kind == "matrix" or patches is None:
        return [{"row_tokens": panel.row_tokens, "grid": single.grid, "places": patches} for panel in made]
    tokens = patch_names(single, patches) if single.tokens is None else single.tokens[0]
    scores = score_array(single).astype(np.float64)
    if heads is not None:
        by_layer = scores.reshape(len(heads), -1, scores.shape[-1])
        scores = np.concatenate([values[drawn] for values, drawn in zip(by_layer, heads, strict=True)])
    shared = {"names": ("target", "patch"), "column_tokens": tokens, "grid": single.grid, "places": patches}
    labels = []
    for panel, values in zip(made, scores.reshape(len(made), 1, -1), strict=True):
        pattern = None if panel.expected is None else np.zeros(values.shape, dtype=bool)
        if pattern is not None and panel.expected is not None:
            pattern[0, patches] = panel.expected.ravel()
        labels.append({**shared, "values": values, "expected": pattern})
    return labels


def _facts(single: Scores, made: Sequence[Panel]) -> list[Numbers]:
    """Return the extras of each query, by panel and name, those of a layer for each of its heads.

    Padded queries are left out.
    """
    titles = list(dict.fromkeys(panel.title for panel in made))
    real = single.mask[0].cpu().numpy() if single.queries_are_keys and single.mask is not None else None
    facts: list[Numbers] = [{} for _ in made]
    for name, tensor in sorted(single.extras.items(), key=lambda item: item[0] != "logit"):
        axes = extra_dims(name, single.dims, single.scores.shape, tensor.shape)
        if axes is None or {"head", "key"} & set(axes) or name in HIDDEN_EXTRAS:
            continue
        values: Float[Array, "layer query"] = tensor.double().cpu().numpy().reshape(len(titles), -1)
        for numbers, panel in zip(facts, made, strict=True):
            row = values[titles.index(panel.title)]
            # The numbers of a layer stand in the row of each of its heads.
            copies = 1 if panel.rows == "query" else len(panel.values)
            numbers[name] = (row if real is None else row[real]).tolist() * copies
    return facts
