"""A layer's L x L map as the methods use it: heads reduced, signs and scale treated, rows carried through it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from unilinattn.methods.options import MapOptions
from unilinattn.methods.selection import key_mask, only_port, query_rows, real_pairs
from unilinattn.trace import Layer, Trace

SIGNS = {"keep": lambda a: a, "clamp": lambda a: a.clamp_min(0), "abs": lambda a: a.abs()}
"""What becomes of negative scores (HMA ACL Table 6)."""


def attention_rows(layer: Layer, options: MapOptions, rows: Int[Tensor, "batch row"]) -> Float[Tensor, "batch row key"]:
    """Return rows of the layer's attention map, its heads reduced as the option says."""
    heads = options.heads if isinstance(options.heads, (str, int)) else list(options.heads)
    found = only_port(layer).rows(rows, scope=options.scope, heads=heads)
    return found if isinstance(heads, (str, int)) else found.mean(1)


def attention_blocks(layer: Layer, options: MapOptions) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield the layer's attention map block of rows by block of rows, its heads reduced as the option says."""
    heads = options.heads if isinstance(options.heads, (str, int)) else list(options.heads)
    for rows, found in only_port(layer).row_blocks(scope=options.scope, heads=heads):
        yield rows, found if isinstance(heads, (str, int)) else found.mean(1)


def attention_map(layer: Layer, options: MapOptions) -> Float[Tensor, "batch query key"]:
    """Return the layer's whole attention map, its heads reduced as the option says."""
    return torch.cat([block for _, block in attention_blocks(layer, options)], dim=1)


def treated(
    scores: Float[Tensor, "batch row key"],
    real: Bool[Tensor, "batch row key"],
    protected: Int[Tensor, "batch row"],
    *,
    discard: float,
    normalize: str,
) -> Float[Tensor, "batch row key"]:
    """Set pairs with padding to zero, then discard each row's lowest scores, then normalise.

    `protected` is the key that each row never discards. Rows are normalised each by itself, "min-max" by the map.
    """
    scores = scores.masked_fill(~real, 0)
    if discard:
        own = torch.arange(scores.shape[-1], device=scores.device) == protected.unsqueeze(-1)
        rank = scores.masked_fill(~real | own, torch.inf).argsort(dim=-1, stable=True).argsort(-1)
        # The small term keeps fractions such as 0.29 of 100 from losing one to rounding.
        count = (discard * real.sum(-1, keepdim=True).double() + 1e-9).floor()
        scores = scores.masked_fill((rank < count) & ~own, 0)
    if normalize == "rows":
        return _ratio(scores, scores.abs().sum(-1, keepdim=True))
    if normalize == "min-max":
        size = scores.abs()
        low = size.masked_fill(~real, torch.inf).amin((1, 2), keepdim=True)
        return _ratio((size - low).masked_fill(~real, 0), size.amax((1, 2), keepdim=True) - low)
    return scores


def map_blocks(
    trace: Trace,
    layer: Layer,
    options: MapOptions,
    *,
    target: Int[Tensor, "batch 1"] | None = None,
    weight: Float[Tensor, "batch query"] | None = None,
    attention: Float[Tensor, "batch query key"] | None = None,
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield the map of a layer block of rows by block of rows: reduced over heads, times a weight a row, then treated.

    `target`: the positions whose column no row discards; without it each row keeps its own. `attention`: the
    reduced map, where it is known already. Only "min-max", which needs the extremes of the whole map first, holds
    all of it.
    """
    every = query_rows(trace, layer)
    blocks: Iterable[tuple[slice, Tensor]] = attention_blocks(layer, options)
    if attention is not None:
        blocks = [(slice(0, every.shape[1]), attention)]
    if options.normalize == "min-max":
        blocks = [(slice(0, every.shape[1]), torch.cat([block for _, block in blocks], dim=1))]
    for part, block in blocks:
        rows = every[:, part]
        scores = SIGNS[options.sign](block if weight is None else weight[:, part].unsqueeze(-1) * block)
        protected = rows if target is None else target.to(rows.device).expand_as(rows)
        real = real_pairs(trace, layer, rows)
        yield part, treated(scores, real, protected, discard=options.discard, normalize=options.normalize)


def composed(
    rho: Float[Tensor, "batch query key"],
    trace: Trace,
    together: Sequence[Layer],
    options: MapOptions,
    weights: Mapping[str, Float[Tensor, "batch query"]] | None = None,
) -> Float[Tensor, "batch query key"]:
    """Return (I + sum of these layers' maps) rho, the maps block by block."""
    total = rho.clone()
    for layer in together:
        weight = None if weights is None else weights[layer.name]
        for part, block in map_blocks(trace, layer, options, weight=weight):
            total[:, part] += block.to(rho) @ rho
    return total


def carried(
    row: Float[Tensor, "batch 1 query"],
    trace: Trace,
    layer: Layer,
    options: MapOptions,
    *,
    target: Int[Tensor, "batch 1"],
    weight: Float[Tensor, "batch query"] | None = None,
    attention: Float[Tensor, "batch query key"] | None = None,
) -> Float[Tensor, "batch 1 key"]:
    """Return a row times what `map_blocks` yields, the map never held: a linear-time pass where that is exact."""
    row = row.to(layer.output)
    if attention is not None or not options.is_plain:
        blocks = map_blocks(trace, layer, options, target=target, weight=weight, attention=attention)
        return added(row[:, :, part] @ block for part, block in blocks)
    op, mask = only_port(layer), key_mask(trace, layer)
    real = 1 if mask is None else mask.unsqueeze(1)
    if options.sign == "keep":
        row = row if weight is None else row * weight.unsqueeze(1)
        return op.left_multiply(row * real, scope=options.scope) * real
    weights = torch.ones_like(row) if weight is None else weight.to(row).unsqueeze(1)
    return (
        op.streamed((row * real).squeeze(1), weights.squeeze(1), options.sign, scope=options.scope).unsqueeze(1) * real
    )


def added(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors, on the device of the first."""
    first, *others = parts
    return sum((other.to(first) for other in others), start=first)


def unit_rows(rows: Int[Tensor, "batch row"], layer: Layer) -> Float[Tensor, "batch row query"]:
    """Return rows of the identity at selected positions."""
    return functional.one_hot(rows, layer.output.shape[1]).to(layer.output)


def picked(scores: Float[Tensor, "batch query key"], rows: Int[Tensor, "batch row"]) -> Float[Tensor, "batch row key"]:
    """Return selected rows, each sequence its own."""
    return scores.gather(1, rows.unsqueeze(-1).expand(-1, -1, scores.shape[-1]))


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide, giving zero where there is nothing to divide by."""
    return numerator / denominator.masked_fill(denominator == 0, 1)
