"""Warnings of results: tokens whose scores measure no word, and products over heads below the range of their dtype."""

import warnings
from dataclasses import replace
from math import log2
from typing import Any

import torch

from unilinattn.errors import SinkWarning
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.selection import only_port, query_rows
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.sinks import OUTLIER
from unilinattn.tracing.trace import Target, Trace

MOST_NAMED = 8
"""Largest number of sinks that a warning names."""


def warn_of_sinks(result: Attribution) -> Attribution:
    """Return the result with a warning that names its attention sinks, if it has any, and raise that warning."""
    names = _sink_names(result)
    if not names:
        return result
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    several = len(names) > 1
    message = (
        f"attention sink{'s' * several}: {', '.join(names[:MOST_NAMED])}{more}. The residual stream there is more than "
        f"{OUTLIER:g} times as large as at the median token in half of the layers or more. Such a token is usually "
        "read whatever its word is, so its score says little about the word, and rankings leave it out. To measure a "
        "word, replace it in the input."
    )
    warnings.warn(message, SinkWarning, stacklevel=3)
    return replace(result, warnings=(*result.warnings, message))


def _sink_names(result: Attribution) -> list[str]:
    """Return the position, counted over real tokens, and the text of each sink, with its sequence among several."""
    names = []
    for index, keys in enumerate(result.sinks or ()):
        for key in keys:
            position = key if result.mask is None else int(result.mask[index, :key].sum())
            text = "" if result.tokens is None else f" {result.tokens[index][key]!r}"
            sequence = f" of sequence {index}" if result.sizes.get("batch", 1) > 1 else ""
            names.append(f"position {position}{text}{sequence}")
    return names


def head_underflow(result: Attribution, trace: Trace, target: Target | None) -> tuple[str, ...]:
    """Return a warning if heads="product" makes zeros of layers whose maps are not zero.

    It reads one row of each layer and sequence, that of the target or the last one, in linear time.
    """
    if result.options.get("heads") != "product":
        return ()
    scope: Any = result.scope
    sizes = {
        layer.name: size
        for layer in trace.layers
        if layer.name in result.layers and (size := _log2_size(layer, trace, target, scope)) is not None
    }
    if not sizes:
        return ()
    dtype = str(result.scores.dtype).removeprefix("torch.")
    shown = [*list(sizes)[:3], *(["..."] if len(sizes) > 3 else [])]
    return (
        f"heads='product' underflows {dtype} in {len(sizes)} of {len(result.layers)} layers ({', '.join(shown)}): the "
        f"largest entry of a row is about 2**{max(sizes.values()):.0f}, so the row is zero. Take "
        "heads='geometric-mean', the root of the same product.",
    )


def _log2_size(layer: Layer, trace: Trace, target: Target | None, scope: str) -> float | None:
    """Return log2 of the largest product in the row of the first sequence that underflows, None if none does."""
    op, rows = only_port(layer), query_rows(trace, layer, -1 if target is None else target)
    heads = op.num_heads(scope)
    largest = op.rows(rows, scope=scope, heads="geometric-mean").abs().amax((1, 2)).double()
    sizes = [heads * log2(value) for value in largest.tolist() if value > 0]
    limit = log2(torch.finfo(layer.output.dtype).tiny)
    return next((size for size in sizes if size < limit), None)
