"""A layer's L x L map for the methods: heads reduced, scores postprocessed, rows multiplied by the map."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.kernels.row_product.naive import Sign, apply_sign
from unilinattn.memory import parts as slices
from unilinattn.memory import require, rows_within
from unilinattn.operator.cost import left_multiply_elements, map_cut
from unilinattn.operator.selection import checked_heads
from unilinattn.options.bases import MapOptions
from unilinattn.scoring.selection import (
    StepRows,
    key_mask,
    mixing_operator,
    query_rows,
    reads_own_tokens,
    real_pairs,
    streams_of,
)
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace

ONE_ROW = "ask for one row with target="


@dataclass(frozen=True)
class Weight:
    """Factors of a layer's map: one for each token, or for each head and token, along the rows or the keys."""

    values: Float[Tensor, "batch *head token"]
    axis: Literal["row", "key"] = "row"

    @property
    def by_head(self) -> bool:
        """Whether each head has its factors; they and `sign` then apply before the mean over heads."""
        return self.values.ndim == 3

    def of(self, rows: slice) -> Float[Tensor, "..."]:
        """Return the factors of some rows, which multiply a block (batch, [head,] row, key)."""
        return self.values[..., rows].unsqueeze(-1) if self.axis == "row" else self.values.unsqueeze(-2)


def attention_rows(layer: Layer, options: MapOptions, rows: Int[Tensor, "batch row"]) -> Float[Tensor, "batch row key"]:
    """Return rows of the layer's attention map, reduced over heads by `options.heads`."""
    return _mean_of_several(mixing_operator(layer).rows(rows, scope=options.scope, heads=options.heads))


def attention_blocks(
    layer: Layer, options: MapOptions, extra_elements: int = 0
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield the layer's attention map in blocks of rows, reduced over heads by `options.heads`.

    `extra_elements` is the number of elements that the caller holds for each entry of a block, within the memory limit.
    """
    operator = mixing_operator(layer)
    blocks = operator.row_blocks(scope=options.scope, heads=options.heads, extra_elements=extra_elements)
    return ((rows, _mean_of_several(block)) for rows, block in blocks)


def _mean_of_several(scores: Float[Tensor, "batch *head row key"]) -> Float[Tensor, "batch row key"]:
    """Return the mean over the heads of a list, which have an axis; one head and reductions have none."""
    return scores.mean(1) if scores.ndim == 4 else scores


def fill_attention(out: Float[Tensor, "batch query key"], layer: Layer, options: MapOptions) -> None:
    """Write the layer's whole attention map into `out`, reduced over heads by `options.heads`."""
    for span, block in attention_blocks(layer, options):
        out[:, span] = block


def attention_map(layer: Layer, options: MapOptions) -> Float[Tensor, "batch query key"]:
    """Return the layer's whole attention map, reduced over heads by `options.heads`."""
    out = layer.output.new_empty(map_shape(layer))
    fill_attention(out, layer, options)
    return out


def map_shape(layer: Layer) -> tuple[int, int, int]:
    """Return (batch, query, key) of a layer's map."""
    batch, keys = next(iter(layer.ports.values()))
    return batch, layer.output.shape[1], keys


def map_bytes(layer: Layer) -> int:
    """Return the bytes of a layer's whole map."""
    return prod(map_shape(layer)) * layer.output.element_size()


def postprocess(
    scores: Float[Tensor, "batch row key"],
    real: Bool[Tensor, "batch row key"],
    protected: Int[Tensor, "batch row"],
    *,
    discard: float,
    normalize: str,
) -> Float[Tensor, "batch row key"]:
    """Set pairs with padding to zero, then discard each row's lowest scores, then normalise.

    `protected` is the key that each row never discards. "rows" normalises each row, "min-max" the whole map.
    """
    scores = _kept(scores, real, protected, discard)
    if normalize == "rows":
        return _ratio(scores, scores.abs().sum(-1, keepdim=True))
    if normalize == "min-max":
        return _between(scores, real, *_extremes(scores, real))
    return scores


def postprocess_(
    scores: Float[Tensor, "batch row key"], rows: StepRows, *, sign: Sign = "keep", discard: float, normalize: str
) -> None:
    """Apply the sign option and then `postprocess` in place, in blocks of rows."""
    trace, layer, index = rows.trace, rows.layer, rows.index
    spans = _row_slices(scores, postprocess_elements(discard))
    extremes = []
    for span in spans:
        real, each = real_pairs(trace, layer, index[:, span]), apply_sign(sign, scores[:, span])
        by_row = "none" if normalize == "min-max" else normalize
        protected = protected_keys(trace, layer, index[:, span])
        scores[:, span] = postprocess(each, real, protected, discard=discard, normalize=by_row)
        if normalize == "min-max":
            extremes.append(_extremes(scores[:, span], real))
    if normalize == "min-max":
        low = torch.stack([each for each, _ in extremes]).amin(0)
        high = torch.stack([each for _, each in extremes]).amax(0)
        for span in spans:
            real = real_pairs(trace, layer, index[:, span])
            scores[:, span] = _between(scores[:, span], real, low, high)


def protected_keys(
    trace: Trace, layer: Layer, rows: Int[Tensor, "batch row"], target: Int[Tensor, "batch 1"] | None = None
) -> Int[Tensor, "batch row"]:
    """Return the key that each row never discards: the target, by default its own token, -1 if that is none of them."""
    if not reads_own_tokens(trace, layer):
        return torch.full_like(rows, -1)
    on_target = streams_of(trace, layer)[0] == trace.target_stream
    return rows if target is None or not on_target else target.to(rows.device).expand_as(rows)


def postprocess_elements(discard: float) -> int:
    """Return the elements of four bytes that `postprocess` holds for each score; ranks to discard take the most."""
    return 14 if discard else 4


def postprocess_bytes(scores: tuple[int, int, int], width: int, discard: float) -> int:
    """Return the bytes that `postprocess_` holds for scores (batch, row, key) with elements of `width` bytes."""
    batch, count, keys = scores
    each = batch * keys * postprocess_elements(discard) * max(4, width)
    return min(count, rows_within(lambda rows: rows * each, max(1, count), None)) * each


def _row_slices(scores: Float[Tensor, "batch row key"], numbers: int) -> list[slice]:
    """Split rows so that `numbers` elements of at least four bytes for each score fit the memory limit."""
    batch, count, keys = scores.shape
    width = numbers * max(4, scores.element_size())
    step = rows_within(lambda rows: batch * rows * keys * width, max(1, count), "the treatment of a map")
    return list(slices(count, step))


def _kept(scores: Tensor, real: Tensor, protected: Tensor, discard: float) -> Float[Tensor, "batch row key"]:
    scores = scores.masked_fill(~real, 0)
    if discard:
        exempt = torch.arange(scores.shape[-1], device=scores.device) == protected.unsqueeze(-1)
        rank = scores.masked_fill(~real | exempt, torch.inf).argsort(dim=-1, stable=True).argsort(-1)
        # Without the small term rounding would make 0.29 of 100 scores 28.
        count = (discard * real.sum(-1, keepdim=True).double() + 1e-9).floor()
        scores = scores.masked_fill((rank < count) & ~exempt, 0)
    return scores


def _extremes(scores: Tensor, real: Tensor) -> tuple[Float[Tensor, "batch 1 1"], Float[Tensor, "batch 1 1"]]:
    """Return the smallest and the largest absolute score among real pairs."""
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
    weight: Weight | None = None,
    attention: Float[Tensor, "batch query key"] | None = None,
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield a layer's map in blocks of rows: reduced over heads, weighted, then postprocessed.

    Only normalize="min-max", which needs the extremes of the whole map first, holds all of it.

    Args:
        trace: the trace of the layer.
        layer: the layer.
        options: scope, heads, sign, discard and normalize.
        target: the key of each sequence that no row discards; by default each row's own token.
        weight: factors of the map, by default 1.
        attention: the map reduced over heads, if it is computed already.
    """
    every, blocks = query_rows(trace, layer), _signed_blocks(layer, options, weight, attention)
    if options.normalize == "min-max":
        size = postprocess_elements(options.discard)
        require((1 + size) * map_bytes(layer), f"normalize='min-max' of the map of {layer.name}", "take 'rows'")
        whole = layer.output.new_empty(map_shape(layer))
        for span, block in blocks:
            whole[:, span] = block
        blocks = iter([(slice(0, every.shape[1]), whole)])
    for span, scores in blocks:
        rows = every[:, span]
        protected = protected_keys(trace, layer, rows, target)
        real = real_pairs(trace, layer, rows)
        yield span, postprocess(scores, real, protected, discard=options.discard, normalize=options.normalize)


def _signed_blocks(
    layer: Layer, options: MapOptions, weight: Weight | None, attention: Float[Tensor, "batch query key"] | None
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield a layer's map in blocks of rows: reduced over heads, weighted and with the option `sign`."""
    size, by_head = postprocess_elements(options.discard), weight is not None and weight.by_head
    if attention is not None:
        blocks: Iterable[tuple[slice, Tensor]] = ((span, attention[:, span]) for span in _row_slices(attention, size))
    elif by_head:
        blocks = mixing_operator(layer).row_blocks(
            scope=options.scope, heads=None, extra_elements=head_elements(layer, options)
        )
    else:
        blocks = attention_blocks(layer, options, extra_elements=size)
    for span, block in blocks:
        scores = apply_sign(options.sign, block if weight is None else weight.of(span) * block)
        yield span, scores.mean(1) if by_head else scores


def head_elements(layer: Layer, options: MapOptions) -> int:
    """Return the elements held for each pair if heads are weighted: the weighted blocks, and those of postprocessing.

    The option `sign` takes another block, while the copy that `row_blocks` counts for the selection of heads is free.
    """
    return mixing_operator(layer).num_heads(options.scope) + postprocess_elements(options.discard)


def vecmat(
    row: Float[Tensor, "batch row query"],
    trace: Trace,
    layer: Layer,
    options: MapOptions,
    *,
    target: Int[Tensor, "batch row"],
    weight: Weight | None = None,
    attention: Float[Tensor, "batch query key"] | None = None,
) -> Float[Tensor, "batch row key"]:
    """Return rows times the map of `map_blocks`, in blocks or, where that is exact, by a linear-time pass."""
    row = row.to(layer.output)
    if row.shape[1] > 1 and not options.is_linear:
        # Each row discards other entries of the map, or takes another part of its signs.
        pairs = zip(row.split(1, dim=1), target.split(1, dim=1), strict=True)
        multiply = partial(vecmat, weight=weight, attention=attention)
        return torch.cat([multiply(x, trace, layer, options, target=key) for x, key in pairs], dim=1)
    if attention is not None or not options.is_plain or (weight is not None and weight.by_head):
        blocks = map_blocks(trace, layer, options, target=target, weight=weight, attention=attention)
        return sum_on_first(row[:, :, span] @ block for span, block in blocks)
    op, queries, keys = mixing_operator(layer), layer.mask, key_mask(trace, layer)
    real = 1 if keys is None else keys.unsqueeze(1)
    by_row = weight.values.to(row).unsqueeze(1) if weight is not None and weight.axis == "row" else torch.ones_like(row)
    ones = row.new_ones(*row.shape[:2], map_shape(layer)[2])
    by_key = weight.values.to(row).unsqueeze(1) if weight is not None and weight.axis == "key" else ones
    # The mask of queries multiplies the row and that of keys the product, as `postprocess` blanks both in a map.
    row = row if queries is None else row * queries.unsqueeze(1)
    if options.sign == "keep":
        return op.left_multiply(row * by_row, scope=options.scope) * by_key * real

    def product(factor: Tensor) -> Tensor:
        return op.row_product(row.squeeze(1), factor.squeeze(1), options.sign, scope=options.scope).unsqueeze(1) * real

    if options.sign == "abs":
        return product(by_row) * by_key.abs()
    # A negative factor of a key keeps the negative part of its column.
    total = product(by_row) * by_key.clamp_min(0)
    return total + product(-by_row) * (-by_key).clamp_min(0) if bool((by_key < 0).any()) else total


def sum_on_first(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors, on the device of the first."""
    first, *others = tensors
    return sum((other.to(first) for other in others), start=first)


def blank_padding(scores: Float[Tensor, "batch row key"], rows: StepRows) -> None:
    """Set the scores of pairs with padding to zero, in place."""
    keys = key_mask(rows.trace, rows.layer)
    if keys is not None:
        scores.masked_fill_(~keys[:, None, :], 0)
    scores.masked_fill_(~rows.real[:, :, None], 0)


def map_cost(layer: Layer, options: MapOptions, *, extra_elements: int = 0) -> int:
    """Return the bytes of `attention_blocks` with the same `extra_elements`."""
    scope = mixing_operator(layer).scoped_map(options.scope)
    return map_cut(scope, checked_heads(options.heads, scope.heads), extra_elements=extra_elements)[2]


def postprocess_cost(layer: Layer, options: MapOptions, *, computed: bool = False) -> int:
    """Return the bytes of `map_blocks`; `computed` says that the map exists already."""
    width, numbers = layer.output.element_size(), postprocess_elements(options.discard)
    if options.normalize == "min-max":
        whole = map_bytes(layer)
        return max((1 + numbers) * whole, whole + map_cost(layer, options, extra_elements=numbers))
    if computed:
        return postprocess_bytes(map_shape(layer), width, options.discard)
    return map_cost(layer, options, extra_elements=numbers)


def head_cost(layer: Layer, options: MapOptions) -> int:
    """Return the bytes of `map_blocks` with a weight of each head."""
    scope = mixing_operator(layer).scoped_map(options.scope)
    _, _, size = map_cut(scope, None, extra_elements=head_elements(layer, options))
    if options.normalize == "min-max":
        size += (1 + postprocess_elements(options.discard)) * map_bytes(layer)
    return size


def vecmat_cost(layer: Layer, options: MapOptions, *, computed: bool = False) -> int:
    """Return the bytes of `vecmat`: a linear-time pass, or blocks of the map, which may be `computed` already."""
    if options.is_linear and not computed:
        elements = left_multiply_elements(mixing_operator(layer).scoped_map(options.scope), 1)
        return elements * layer.output.element_size()
    if options.is_plain and not computed:
        return map_cost(layer, options)
    return postprocess_cost(layer, options, computed=computed)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide by the denominator, or by 1 where it is zero: the numerator is then zero too."""
    return numerator / denominator.masked_fill(denominator == 0, 1)
