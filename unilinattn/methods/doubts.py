"""Warnings of results: tokens whose scores measure no word, and products over heads below the range of their dtype."""

import warnings
from dataclasses import replace
from math import log2
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from unilinattn.errors import SinkWarning, UncoveredError
from unilinattn.operator.edges import is_causal
from unilinattn.operator.stages import Branch, Chain, Scale
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.selection import only_port, query_rows
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.sinks import OUTLIER
from unilinattn.tracing.trace import Target, Trace

MOST_NAMED = 8
"""Largest number of sinks that a warning names."""


def warn_of_sinks(result: Attribution, trace: Trace, tokenizer: Any = None) -> Attribution:
    """Return the result with a warning that names its attention sinks, if it has any, and raise that warning.

    It says how to add a beginning-of-text token to texts that `missing_start` reports. `tokenizer`: that of a text
    whose ids were traced.
    """
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
    if tokenizer is None and trace.text is not None and trace.text.texts is not None:
        tokenizer = trace.text.tokenizer
    if (start := missing_start(result, trace, tokenizer)) is not None:
        message += (
            f" The text lacks the tokenizer's beginning-of-text token {start!r}, so its first word is the sink: with "
            "bos=True (--bos on the command line) that token comes before it."
        )
    warnings.warn(message, SinkWarning, stacklevel=3)
    return replace(result, warnings=(*result.warnings, message))


def missing_start(result: Attribution, trace: Trace, tokenizer: Any) -> str | None:
    """Return the beginning-of-text token of a decoder's tokenizer, where a sequence lacks it and its first word sinks.

    None without such a token, for an encoder, if no sequence has a sink at its first real token, and if these tokens
    are special ones, whose scores measure no word anyway.
    """
    start = getattr(tokenizer, "bos_token_id", None)
    if start is None or trace.ids is None or result.streams or not result.sinks:
        return None
    firsts = [0] * len(trace.ids) if result.mask is None else result.mask.int().argmax(1).tolist()
    special = set(tokenizer.all_special_ids)
    words = [
        first in sinks and int(ids[first]) not in special
        for ids, sinks, first in zip(trace.ids, result.sinks, firsts, strict=True)
    ]
    return str(tokenizer.bos_token) if any(words) and is_decoder(trace) else None


def is_decoder(trace: Trace) -> bool:
    """Whether the first layer with an operator reads no later token."""
    layer = next((layer for layer in trace.layers if not layer.opaque), None)
    return layer is not None and (layer.in_pieces or is_causal(layer.operator))


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


def only_zeros(result: Attribution) -> tuple[str, ...]:
    """Return a warning if all scores of a number are zero; a map may be."""
    if "logit" not in result.options or not result.scores.numel() or bool(result.scores.any()):
        return ()
    return (
        f"every score of {result.method} is zero: the explained number does not move with the tokens along the paths "
        "that this method follows, as where its gradient is zero, where all products with a gradient are negative and "
        "so cut, or where it depends on the tokens only by choices, such as codes. Take another method to compare.",
    )


def equal_weights(result: Attribution, trace: Trace, target: Target | None) -> tuple[str, ...]:
    """Return a warning if a recorded layer's map has equal weights, and its tokens are multiplied by factors before.

    So is code that sums the products of weights and values. It reads one row of each layer's map.
    """
    if result.scope not in ("core", "mixer"):
        return ()
    layers = (layer for layer in trace.layers if layer.name in result.layers and layer.is_recorded)
    names = [layer.name for layer in layers if _has_equal_weights(layer, trace, target, result.scope)]
    if not names:
        return ()
    shown = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
    return (
        f"the maps of {len(names)} of {len(result.layers)} layers ({shown}) have equal weights for all tokens that are "
        "read: factors before the core weigh these, and the maps leave them out. 'latim', 'alti' and 'lrp' count them.",
    )


def _has_equal_weights(layer: Layer, trace: Trace, target: Target | None, scope: str) -> bool:
    # Methods read the map of the first port.
    port, chain = next(iter(layer.operator.chains.items()))
    if not _weighs_tokens(chain):
        return False
    row = layer.operator.rows(_example_rows(trace, layer, target), scope=scope, port=port)
    read = row[row != 0]
    return len(read) > 1 and bool((read == read[0]).all())


def _weighs_tokens(chain: Chain, *, is_term: bool = False) -> bool:
    """Tell whether factors differ by token up to a chain's last core, or by step in the terms of a sum.

    Factors behind the core weigh no token that is read.
    """
    last = max((number for number, stage in enumerate(chain) if stage.mixes), default=len(chain) - 1)
    for stage in chain[: last + 1]:
        if isinstance(stage, Branch):
            if any(_weighs_tokens(inner, is_term=stage.mixes) for inner in stage.chains):
                return True
        elif isinstance(stage, Scale) and (stage.scale.shape[1] > 1 or (is_term and stage.weighs)):
            return True
    return False


def _log2_size(layer: Layer, trace: Trace, target: Target | None, scope: str) -> float | None:
    """Return log2 of the largest product in the row of the first sequence that underflows, None if none does."""
    op, rows = only_port(layer), _example_rows(trace, layer, target)
    heads = op.num_heads(scope)
    largest = op.rows(rows, scope=scope, heads="geometric-mean").abs().amax((1, 2)).double()
    sizes = [heads * log2(value) for value in largest.tolist() if value > 0]
    limit = log2(torch.finfo(layer.output.dtype).tiny)
    return next((size for size in sizes if size < limit), None)


def _example_rows(trace: Trace, layer: Layer, target: Target | None) -> Int[Tensor, "batch 1"]:
    """Return one query of each sequence of a layer: the target's, or the last where a target counts other tokens."""
    try:
        return query_rows(trace, layer, -1 if target is None else target)
    except UncoveredError:
        batch, length = layer.output.shape[:2]
        return torch.full((batch, 1), length - 1, device=layer.output.device)
