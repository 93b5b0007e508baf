"""A layer's L x L map as the methods use it: heads reduced, signs and scale treated, rows carried through it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.memory import require, reserved, rows_within
from unilinattn.methods.options import MapOptions
from unilinattn.methods.selection import key_mask, only_port, query_rows, real_pairs
from unilinattn.trace import Layer, Trace

SIGNS = {"keep": lambda a: a, "clamp": lambda a: a.clamp_min(0), "abs": lambda a: a.abs()}
"""What becomes of negative scores (HMA ACL Table 6)."""

ONE_ROW = "ask for one row with target="


def attention_rows(layer: Layer, options: MapOptions, rows: Int[Tensor, "batch row"]) -> Float[Tensor, "batch row key"]:
    """Return rows of the layer's attention map, its heads reduced as the option says."""
    heads = options.heads if isinstance(options.heads, (str, int)) else list(options.heads)
    found = only_port(layer).rows(rows, scope=options.scope, heads=heads)
    return found if isinstance(heads, (str, int)) else found.mean(1)


def attention_blocks(
    layer: Layer, options: MapOptions, beside: int = 0
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield the layer's attention map block of rows by block of rows, its heads reduced as the option says.

    `beside`: numbers for each entry of a block that the caller will hold, to be counted to what may be taken.
    """
    heads = options.heads if isinstance(options.heads, (str, int)) else list(options.heads)
    for rows, found in only_port(layer).row_blocks(scope=options.scope, heads=heads, beside=beside):
        yield rows, found if isinstance(heads, (str, int)) else found.mean(1)


def fill_attention(out: Float[Tensor, "batch query key"], layer: Layer, options: MapOptions) -> None:
    """Write the layer's whole attention map, its heads reduced as the option says."""
    for part, block in attention_blocks(layer, options):
        out[:, part] = block


def attention_map(layer: Layer, options: MapOptions) -> Float[Tensor, "batch query key"]:
    """Return the layer's whole attention map, its heads reduced as the option says."""
    out = layer.output.new_empty(map_shape(layer))
    fill_attention(out, layer, options)
    return out


def map_shape(layer: Layer) -> tuple[int, int, int]:
    """Return (batch, query, key) of a layer's map."""
    batch, keys = next(iter(layer.ports.values()))
    return batch, layer.output.shape[1], keys


def map_bytes(layer: Layer) -> int:
    """Return what a layer's whole map takes."""
    return prod(map_shape(layer)) * layer.output.element_size()


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
    scores = _kept(scores, real, protected, discard)
    if normalize == "rows":
        return _ratio(scores, scores.abs().sum(-1, keepdim=True))
    if normalize == "min-max":
        return _between(scores, real, *_extremes(scores, real))
    return scores


def treat(
    scores: Float[Tensor, "batch row key"],
    trace: Trace,
    layer: Layer,
    rows: Int[Tensor, "batch row"],
    *,
    sign: str = "keep",
    discard: float,
    normalize: str,
) -> None:
    """Do in place, some rows at a time, what `SIGNS` and then `treated` do; each row keeps its own token."""
    parts = _parts(scores, treatment_size(discard), "the treatment of a map")
    extremes = []
    for part in parts:
        real, each = real_pairs(trace, layer, rows[:, part]), SIGNS[sign](scores[:, part])
        by_row = "none" if normalize == "min-max" else normalize
        scores[:, part] = treated(each, real, rows[:, part], discard=discard, normalize=by_row)
        if normalize == "min-max":
            extremes.append(_extremes(scores[:, part], real))
    if normalize == "min-max":
        low = torch.stack([each for each, _ in extremes]).amin(0)
        high = torch.stack([each for _, each in extremes]).amax(0)
        for part in parts:
            real = real_pairs(trace, layer, rows[:, part])
            scores[:, part] = _between(scores[:, part], real, low, high)


def treatment_size(discard: float) -> int:
    """Return how many numbers of four bytes `treat` holds for each score: to rank them takes the most."""
    return 14 if discard else 4


def treatment_bytes(scores: tuple[int, int, int], width: int, discard: float) -> int:
    """Return what `treat` holds of scores (batch, row, key) whose numbers have so many bytes."""
    batch, count, keys = scores
    each = batch * keys * treatment_size(discard) * max(4, width)
    return min(count, rows_within(lambda rows: rows * each, max(1, count), None)) * each


def _parts(scores: Float[Tensor, "batch row key"], numbers: int, what: str) -> list[slice]:
    """Split rows so that so many numbers of four bytes for each score stay within what is allowed."""
    batch, count, keys = scores.shape
    width = numbers * max(4, scores.element_size())
    step = rows_within(lambda rows: batch * rows * keys * width, max(1, count), what)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _kept(scores: Tensor, real: Tensor, protected: Tensor, discard: float) -> Float[Tensor, "batch row key"]:
    scores = scores.masked_fill(~real, 0)
    if discard:
        own = torch.arange(scores.shape[-1], device=scores.device) == protected.unsqueeze(-1)
        rank = scores.masked_fill(~real | own, torch.inf).argsort(dim=-1, stable=True).argsort(-1)
        # The small term keeps fractions such as 0.29 of 100 from losing one to rounding.
        count = (discard * real.sum(-1, keepdim=True).double() + 1e-9).floor()
        scores = scores.masked_fill((rank < count) & ~own, 0)
    return scores


def _extremes(scores: Tensor, real: Tensor) -> tuple[Float[Tensor, "batch 1 1"], Float[Tensor, "batch 1 1"]]:
    """Return the least size of a real pair's score and the largest."""
    size = scores.abs()
    return size.masked_fill(~real, torch.inf).amin((1, 2), keepdim=True), size.amax((1, 2), keepdim=True)


def _between(scores: Tensor, real: Tensor, low: Tensor, high: Tensor) -> Float[Tensor, "batch row key"]:
    return _ratio((scores.abs() - low).masked_fill(~real, 0), high - low)


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
    every, size = query_rows(trace, layer), treatment_size(options.discard)
    if options.normalize == "min-max":
        require((1 + size) * map_bytes(layer), f"normalize='min-max' of the map of {layer.name}", "take 'rows'")
        attention = attention_map(layer, options) if attention is None else attention
        blocks: Iterable[tuple[slice, Tensor]] = [(slice(0, every.shape[1]), attention)]
    elif attention is not None:
        known = attention
        blocks = ((part, known[:, part]) for part in _parts(known, size, "the treatment of a map"))
    else:
        blocks = attention_blocks(layer, options, beside=size)
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
    with reserved(rho.numel() * rho.element_size(), "the product of the maps of two steps", ONE_ROW):
        total = rho.clone()
        for layer in together:
            weight = None if weights is None else weights[layer.name]
            for part, block in map_blocks(trace, layer, options, weight=weight):
                total[:, part].baddbmm_(block.to(rho), rho)
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
    return layer.output.new_zeros(*rows.shape, layer.output.shape[1]).scatter_(2, rows.unsqueeze(-1), 1.0)


def blank_padding(
    scores: Float[Tensor, "batch row key"], trace: Trace, layer: Layer, rows: Int[Tensor, "batch row"]
) -> None:
    """Set pairs with padding to zero, in place."""
    keys = key_mask(trace, layer)
    if keys is not None:
        scores.masked_fill_(~keys[:, None, :], 0)
    if layer.mask is not None:
        scores.masked_fill_(~layer.mask.gather(1, rows)[:, :, None], 0)


def picked(scores: Float[Tensor, "batch query key"], rows: Int[Tensor, "batch row"]) -> Float[Tensor, "batch row key"]:
    """Return selected rows, each sequence its own."""
    return scores.gather(1, rows.unsqueeze(-1).expand(-1, -1, scores.shape[-1]))


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide, giving zero where there is nothing to divide by."""
    return numerator / denominator.masked_fill(denominator == 0, 1)
