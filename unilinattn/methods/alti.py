"""`alti`: how much closer each token's share brings a row to its output, the residual stream included."""

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.contribution_norms.naive import Products
from unilinattn.options import Alti
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.scoring.composition import Composition, at_rows, layerwise, product_cost, score_steps, stacked_count
from unilinattn.scoring.maps import blank_padding, map_shape, sum_on_first
from unilinattn.scoring.selection import StepRows, only_port, reads_own_tokens, residual_of, stream_errors
from unilinattn.scoring.vectors import (
    cancellation,
    contribution_tiles,
    head_tiles,
    head_tiles_cost,
    shares_cost,
    through_heads,
)
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


def cost(trace: Trace, options: Alti, *, target: Target | None = None) -> Estimate:
    """Return the cost of `alti`: tiles of vectors, or the vectors of a few rows; composed also that of two maps."""
    scoring = layerwise(trace, options, target, options.heads)
    for layer in scoring.layers if options.residual else ():
        residual_of(trace, layer, "alti", options.without_stream)
    exact = options.activation == "exact"
    batch, queries, _ = map_shape(scoring.layers[0])

    def of(layer: Layer) -> int:
        batch, queries, keys = map_shape(layer)
        rows = queries if target is None else 1
        apart = batch * rows * keys * layer.output.element_size() if options.layers == "mean" else 0
        if options.is_through_heads:
            return apart + head_tiles_cost(through_heads(options, layer), rows, exact=exact, products=True)
        return apart + shares_cost((layer,), rows, exact=exact)

    # The cancellation of each row, and its share of the residual apart from heads.
    numbers = (2 if options.is_through_heads else 1) * batch * (queries if target is None else 1)
    extras = stacked_count(scoring) * numbers * scoring.layers[0].output.element_size()
    if isinstance(scoring, Composition):
        return product_cost(
            scoring, lambda step: shares_cost(step, step[0].output.shape[1], exact=exact), extras=extras
        )
    return scoring.estimate(of, extras=extras)


@register_method(Alti, cost=cost)
def alti(trace: Trace, options: Alti, *, target: Target | None = None) -> Attribution:
    """Run `Alti`."""
    scoring = layerwise(trace, options, target, options.heads)
    errors = stream_errors(trace, scoring.layers, "alti", options.without_stream) if options.residual else None
    ratios: dict[str, Tensor] = {}
    residuals: dict[str, Tensor] = {}

    def fill(rows: StepRows, out: Float[Tensor, "batch *head row key"]) -> Float[Tensor, "batch row"] | None:
        mix = _head_mixing if options.is_through_heads else mixing
        ratios[rows.layer.name], residual = mix(out, rows, options)
        if residual is not None:
            residuals[rows.layer.name] = residual
        return residual

    scores, scale = score_steps(scoring, fill)
    extras = {"cancellation": at_rows(scoring, ratios), **scale}
    # A step without a share apart has that of its token among the keys.
    if len(residuals) == len(ratios):
        extras["residual"] = at_rows(scoring, residuals)
    return scoring.result(scores, scope="layer", extras=extras, stream_error=errors)


def _stream(trace: Trace, layer: Layer, options: Alti) -> Float[Tensor, "batch query out"]:
    """Return the stream that is part of y_i: zeros with residual=False."""
    if not options.residual:
        return torch.zeros_like(layer.output)
    return residual_of(trace, layer, "alti", options.without_stream)


def mixing(
    out: Float[Tensor, "batch row key"], rows: StepRows, options: Alti
) -> tuple[Float[Tensor, "batch row"], Float[Tensor, "batch row"] | None]:
    """Write rows of P of one step into `out`, which is zero: each real token's share of y_i, rows summing to 1.

    Returns the rows' cancellation, and the share of each row's own token if that is none of the keys, else None.
    """
    stream = _stream(rows.trace, rows.layer, options)
    is_among_keys = reads_own_tokens(rows.trace, rows.layer)
    step = [layer.added for layer in rows.step]
    output = sum_on_first([stream, *(layer.multiplier * layer.output for layer in step)])
    factors = [layer.multiplier for layer in step]
    extra, reference = rows.of(stream), rows.of(output)
    sizes, total = output.new_zeros(reference.shape[:2]), torch.zeros_like(reference)
    # The sum of all rows takes linear time, that of their tiles as long as a product with W.
    in_linear_time = options.activation == "exact" and rows.are_all
    if in_linear_time:
        applied = (op.apply(op.inputs, bias=False) for op in map(only_port, step))
        total = rows.of(sum_on_first([f * y for f, y in zip(factors, applied, strict=True)]))
    # A pair without a tile has T_i(x_j) = 0 and a score of 0.
    for tile in contribution_tiles(step, factors, rows.index, options.activation):
        scores, magnitudes = tile.alti_norms(reference[:, tile.rows])
        sizes[:, tile.rows] += magnitudes.sum(-1)
        if not in_linear_time:
            total[:, tile.rows] += tile.total()
        if is_among_keys:
            scores = tile.with_extra(scores, "alti", extra[:, tile.rows], reference[:, tile.rows])
        out[:, tile.rows, tile.cols] = scores
    out.clamp_min_(0)
    blank_padding(out, rows)
    ratio = cancellation(sizes, total, 1.0, rows)
    if not is_among_keys:
        residual = _nearness(extra.unsqueeze(1), reference).squeeze(1)
        return ratio, normalized_with(out.unsqueeze(1), residual, rows)
    row_sums = out.sum(-1, keepdim=True)
    out.div_(row_sums.masked_fill(row_sums == 0, 1))
    # A row in which every entry is clipped is one-hot on its own token; a row of padding stays zero.
    out.scatter_add_(2, rows.index.unsqueeze(-1), (row_sums == 0).to(out))
    blank_padding(out, rows)
    return ratio, None


def _head_mixing(
    out: Float[Tensor, "batch *head row key"], rows: StepRows, options: Alti
) -> tuple[Float[Tensor, "batch row"], Float[Tensor, "batch row"]]:
    """Write the shares of heads and keys in y_i into `out`, which is zero.

    Returns the rows' cancellation and the shares of the residual.
    """
    layer = rows.layer.added
    split, factor, stream = through_heads(options, layer), layer.multiplier, _stream(rows.trace, layer, options)
    output = rows.of(stream + factor * layer.output)
    by_part = out if options.by_head else out.unsqueeze(1)
    sizes, total = output.new_zeros(output.shape[:2]), torch.zeros_like(output)
    for span, tile in head_tiles(split, factor, rows.index, options.activation):
        scores, magnitudes = tile.alti_norms(output[:, tile.rows])
        sizes[:, tile.rows] += magnitudes.sum((1, 3))
        total[:, tile.rows] += tile.total()
        by_part[:, span, tile.rows, tile.cols] = scores
    by_part.clamp_min_(0)
    for scores in by_part.unbind(1):
        blank_padding(scores, rows)
    residual = _nearness(rows.of(stream + factor * split.around()).unsqueeze(1), output).squeeze(1)
    return cancellation(sizes, total, 1.0, rows), normalized_with(by_part, residual, rows)


def _nearness(
    vectors: Float[Tensor, "batch one row out"], reference: Float[Tensor, "batch row out"]
) -> Float[Tensor, "batch one row"]:
    """Return how much closer vectors bring the rows to their outputs, at least 0."""
    columns = vectors.permute(0, 3, 2, 1)
    norms = implementation("contribution_norms", columns).norms
    return norms(Products(columns, None), order="alti", reference=reference).transpose(1, 2).clamp_min(0)


def normalized_with(
    scores: Float[Tensor, "batch part row key"], residual: Float[Tensor, "batch row"], rows: StepRows
) -> Float[Tensor, "batch row"]:
    """Divide the scores of each row by the sum of all its parts, keys and residual; return the residual's share."""
    row_sums = scores.sum((1, 3)) + residual
    clipped = row_sums == 0
    row_sums = row_sums.masked_fill(clipped, 1)
    scores.div_(row_sums[:, None, :, None])
    # A row in which every unit is clipped is all residual; a row of padding stays zero.
    residual = torch.where(clipped, torch.ones_like(residual), residual / row_sums)
    return residual.masked_fill(~rows.real, 0)
