"""`alti`: how much closer each token's share brings a row to its output, the residual stream included."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.contribution_norms.naive import Products
from unilinattn.methods.composition import layers_of, product_cost, score_steps, stacked_count
from unilinattn.methods.costs import estimated
from unilinattn.methods.heads import head_axis, through_heads
from unilinattn.methods.joint import Joint
from unilinattn.methods.latim import residual_of, stream_errors
from unilinattn.methods.maps import blank_padding, gather_rows, map_shape, sum_on_first
from unilinattn.methods.results import to_result
from unilinattn.methods.selection import only_port, reads_own_tokens
from unilinattn.methods.vectors import (
    cancellation,
    contribution_tiles,
    head_tiles,
    head_tiles_cost,
    shares_cost,
)
from unilinattn.options import Alti
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


def cost(trace: Trace, options: Alti, *, target: Target | None = None) -> Estimate:
    """Return the cost of `alti`: tiles of vectors, or the vectors of a few rows; composed also that of two maps."""
    layers = layers_of(trace, options)
    if options.residual:
        for layer in layers:
            residual_of(trace, layer, "alti", options.without_stream)
    exact = options.activation == "exact"
    batch, queries, _ = map_shape(layers[0])

    def of(layer: Layer) -> int:
        batch, queries, keys = map_shape(layer)
        rows = queries if target is None else 1
        apart = batch * rows * keys * layer.output.element_size() if options.layers == "mean" else 0
        if options.is_through_heads:
            split = through_heads("alti", layer, options.heads, by_head=options.by_head)
            return apart + head_tiles_cost(split, rows, exact=exact, products=True)
        return apart + shares_cost((layer,), rows, exact=exact)

    # The cancellation of each row, and its share of the residual apart from heads.
    numbers = (2 if options.is_through_heads else 1) * batch * (queries if target is None else 1)
    extras = stacked_count(trace, options, layers) * numbers * layers[0].output.element_size()
    if options.compose == "rollout":
        joint = Joint.of(trace, "alti", layers)
        of_step, resident = product_cost(
            joint, layers, target, lambda step: shares_cost(step, step[0].output.shape[1], exact=exact)
        )
        axes = joint.axes(whole=target is None)
        return estimated(options, layers, target, of_step, resident=resident, extras=extras, axes=axes)
    axis = head_axis("alti", layers, options.heads) if options.by_head else None
    return estimated(options, layers, target, of, heads=axis, extras=extras)


@register_method(Alti, cost=cost)
def alti(trace: Trace, options: Alti, *, target: Target | None = None) -> Attribution:
    """Run `Alti`."""
    layers = layers_of(trace, options)
    errors = stream_errors(trace, layers, "alti", options.without_stream) if options.residual else None
    ratios: dict[str, Tensor] = {}
    residuals: dict[str, Tensor] = {}

    def fill(
        step: Sequence[Layer], rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch *head row key"]
    ) -> Float[Tensor, "batch row"] | None:
        residual: Tensor | None
        if options.is_through_heads:
            ratio, residual = _head_mixing(out, trace, step[0], rows, options)
        else:
            ratio, residual = mixing(out, trace, step, rows, options)
        ratios[step[0].name] = ratio
        if residual is not None:
            residuals[step[0].name] = residual
        return residual

    axis = head_axis("alti", layers, options.heads) if options.by_head else None
    scores, composed = score_steps(trace, options, layers, target, fill, heads=axis)
    # A step without a share apart has that of its token among the keys.
    apart = residuals if len(residuals) == len(ratios) else {}
    return to_result(
        trace,
        options,
        layers,
        scores,
        target=target,
        scope="layer",
        heads=axis,
        axes=composed.axes,
        extras=composed.by_row({"cancellation": ratios, **({"residual": apart} if apart else {})}),
        scale=composed.scale,
        stream_error=errors,
    )


def mixing(
    out: Float[Tensor, "batch row key"],
    trace: Trace,
    step: Sequence[Layer],
    rows: Int[Tensor, "batch row"],
    options: Alti,
) -> tuple[Float[Tensor, "batch row"], Float[Tensor, "batch row"] | None]:
    """Write rows of P of one step into `out`, which is zero: each real token's share of y_i, rows summing to 1.

    Returns the rows' cancellation, and the share of each row's own token if that is none of the keys, else None.
    """
    first = step[0]
    stream = (
        residual_of(trace, first, "alti", options.without_stream)
        if options.residual
        else torch.zeros_like(first.output)
    )
    is_among_keys = reads_own_tokens(trace, first)
    step = [layer.added for layer in step]
    output = sum_on_first([stream, *(layer.multiplier * layer.output for layer in step)])
    factors = [layer.multiplier for layer in step]
    extra, reference = gather_rows(stream, rows), gather_rows(output, rows)
    sizes, total = output.new_zeros(rows.shape), torch.zeros_like(reference)
    # The sum of all rows takes linear time, that of their tiles as long as a product with W.
    in_linear_time = options.activation == "exact" and rows.shape[1] == output.shape[1]
    if in_linear_time:
        applied = (op.apply(op.inputs, bias=False) for op in map(only_port, step))
        total = gather_rows(sum_on_first([f * y for f, y in zip(factors, applied, strict=True)]), rows)
    # A pair without a tile has T_i(x_j) = 0 and a score of 0.
    for tile in contribution_tiles(step, factors, rows, options.activation):
        scores, magnitudes = tile.alti_norms(reference[:, tile.rows])
        sizes[:, tile.rows] += magnitudes.sum(-1)
        if not in_linear_time:
            total[:, tile.rows] += tile.total()
        if is_among_keys:
            scores = tile.with_extra(scores, "alti", extra[:, tile.rows], reference[:, tile.rows])
        out[:, tile.rows, tile.cols] = scores
    out.clamp_min_(0)
    blank_padding(out, trace, first, rows)
    ratio = cancellation(sizes, total, 1.0, first, rows)
    if not is_among_keys:
        residual = _nearness(extra.unsqueeze(1), reference).squeeze(1)
        return ratio, normalized_with(out.unsqueeze(1), residual, first, rows)
    row_sums = out.sum(-1, keepdim=True)
    out.div_(row_sums.masked_fill(row_sums == 0, 1))
    # A row in which every entry is clipped is one-hot on its own token; a row of padding stays zero.
    out.scatter_add_(2, rows.unsqueeze(-1), (row_sums == 0).to(out))
    blank_padding(out, trace, first, rows)
    return ratio, None


def _head_mixing(
    out: Float[Tensor, "batch *head row key"],
    trace: Trace,
    layer: Layer,
    rows: Int[Tensor, "batch row"],
    options: Alti,
) -> tuple[Float[Tensor, "batch row"], Float[Tensor, "batch row"]]:
    """Write the shares of heads and keys in y_i into `out`, which is zero.

    Returns the rows' cancellation and the shares of the residual.
    """
    layer = layer.added
    split, factor = through_heads("alti", layer, options.heads, by_head=options.by_head), layer.multiplier
    stream = (
        residual_of(trace, layer, "alti", options.without_stream)
        if options.residual
        else torch.zeros_like(layer.output)
    )
    output = gather_rows(stream + factor * layer.output, rows)
    by_part = out if options.by_head else out.unsqueeze(1)
    sizes, total = output.new_zeros(rows.shape), torch.zeros_like(output)
    for span, tile in head_tiles(split, factor, rows, options.activation):
        scores, magnitudes = tile.alti_norms(output[:, tile.rows])
        sizes[:, tile.rows] += magnitudes.sum((1, 3))
        total[:, tile.rows] += tile.total()
        by_part[:, span, tile.rows, tile.cols] = scores
    by_part.clamp_min_(0)
    for scores in by_part.unbind(1):
        blank_padding(scores, trace, layer, rows)
    residual = _nearness(gather_rows(stream + factor * split.around(), rows).unsqueeze(1), output).squeeze(1)
    return cancellation(sizes, total, 1.0, layer, rows), normalized_with(by_part, residual, layer, rows)


def _nearness(
    vectors: Float[Tensor, "batch one row out"], reference: Float[Tensor, "batch row out"]
) -> Float[Tensor, "batch one row"]:
    """Return how much closer vectors bring the rows to their outputs, at least 0."""
    columns = vectors.permute(0, 3, 2, 1)
    norms = implementation("contribution_norms", columns).norms
    return norms(Products(columns, None), order="alti", reference=reference).transpose(1, 2).clamp_min(0)


def normalized_with(
    scores: Float[Tensor, "batch part row key"],
    residual: Float[Tensor, "batch row"],
    layer: Layer,
    rows: Int[Tensor, "batch row"],
) -> Float[Tensor, "batch row"]:
    """Divide the scores of each row by the sum of all its parts, keys and residual; return the residual's share."""
    row_sums = scores.sum((1, 3)) + residual
    clipped = row_sums == 0
    row_sums = row_sums.masked_fill(clipped, 1)
    scores.div_(row_sums[:, None, :, None])
    # A row in which every unit is clipped is all residual; a row of padding stays zero.
    residual = torch.where(clipped, torch.ones_like(residual), residual / row_sums)
    return residual if layer.mask is None else residual.masked_fill(~layer.mask.gather(1, rows), 0)
