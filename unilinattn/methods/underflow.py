"""Warn of products over heads that are below the range of their dtype."""

from math import log2
from typing import Any

import torch

from unilinattn.methods.selection import only_port, query_rows
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


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
